"""numerics: exact: a token's bits do not depend on batch, order, chunks or blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actor.model.runner import ModelRunner
from tests.model.tiny_models import BLOCK, FAMILIES, Part, batch, forward, oracle, runner_for

LENGTH = 18
EACH = -(-LENGTH // BLOCK)
STREAMS = 5
IDS = torch.randint(0, 97, (STREAMS, LENGTH), generator=torch.Generator().manual_seed(1))
_RUNNERS: dict[str, tuple[ModelRunner, torch.Tensor]] = {}


def solo(family: str) -> tuple[ModelRunner, torch.Tensor]:
    """A runner and the logits [STREAMS, LENGTH, vocab] of every stream alone, whole, in order."""
    if family not in _RUNNERS:
        runner = runner_for(oracle(family), "exact", blocks=STREAMS * EACH)
        alone = [
            forward(runner, batch([Part(ids.tolist(), 0, range(EACH))]), torch.arange(LENGTH))
            for ids in IDS
        ]
        _RUNNERS[family] = runner, torch.stack(alone)
    return _RUNNERS[family]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=12)
def test_any_schedule_gives_the_bits_of_solo_runs(family: str, data: st.DataObject) -> None:
    """Random interleaving of chunks of all streams in random blocks."""
    runner, want = solo(family)
    order = data.draw(st.permutations(range(STREAMS * EACH)))
    blocks = [order[i * EACH : (i + 1) * EACH] for i in range(STREAMS)]
    done = [0] * STREAMS
    while any(n < LENGTH for n in done):
        left = [i for i in range(STREAMS) if done[i] < LENGTH]
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        ends = {i: data.draw(st.integers(done[i] + 1, LENGTH)) for i in chosen}
        parts = [Part(IDS[i, done[i] : ends[i]].tolist(), done[i], blocks[i]) for i in chosen]
        inputs = batch(parts)
        got = forward(runner, inputs, torch.arange(inputs.n_tokens))
        expect = torch.cat([want[i, done[i] : ends[i]] for i in chosen])
        assert torch.equal(got, expect)
        for i in chosen:
            done[i] = ends[i]


def test_exact_with_half_a_cache_is_refused() -> None:
    """fp32 KV is part of the promise."""
    from engine_actor.model.config import ModelConfig
    from engine_actor.model.runner import build_runner
    from tests.model.tiny_models import canonical, hf_dict

    model = oracle("llama")
    config = ModelConfig.from_hf(hf_dict(model), None)
    with pytest.raises(ValueError, match=r"exact needs kv\.dtype fp32 or auto, got bf16"):
        build_runner(config, canonical(model), numerics="exact", kv_dtype="bf16")
