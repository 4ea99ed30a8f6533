"""What an engine runs before its first request."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import EngineConfig
from engine_actor import warm_up
from engine_actor.core.params import SamplingParams
from engine_actor.load.tiny import write_tiny
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.sampler import Sampler
from engine_actor.warm_up import KEY, ROWS, SAMPLED
from tests.engine.real_engine import load


@pytest.mark.parametrize(
    ("chunk", "seqs", "sizes"),
    [
        (512, 64, [512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1]),
        (20, 33, [33, 32, 24, 16, 8, 4, 2, 1]),
        (1, 1, [1]),
    ],
)
def test_sizes_of_the_forwards(chunk: int, seqs: int, sizes: list[int]) -> None:
    """The largest that a step can have, and all that get kernels of their own below it."""
    config = EngineConfig(prefill_chunk_tokens=chunk, max_num_seqs=seqs)
    assert warm_up._sizes(config) == sizes


def test_a_cpu_runs_one_prompt_and_one_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the sampler; no block but the first is written."""
    runner = load(write_tiny(tmp_path), "fast").runner
    runner.resize_kv(3)
    before = runner.kv_checksum((1, 2))
    seen: list[BatchInputs] = []
    embed = runner.embed
    monkeypatch.setattr(runner, "embed", lambda inputs: seen.append(inputs) or embed(inputs))
    warm_up.warm_up(runner, EngineConfig(), Sampler(runner.vocab_size))
    assert [inputs.q_lens for inputs in seen] == [(16,), (1,)]
    assert runner.kv_checksum((1, 2)) == before


def test_a_size_is_made_of_whole_blocks() -> None:
    """All in the block that nobody owns, one row for the head."""
    chunks = warm_up._chunks(40, 16)
    assert [(chunk.start, chunk.end, chunk.blocks) for chunk in chunks] == [
        (0, 16, (0,)),
        (0, 16, (0,)),
        (0, 8, (0,)),
    ]
    assert [chunk.samples for chunk in chunks] == [False, False, True]


def test_every_kind_of_row_is_sampled() -> None:
    """Greedy first: one row alone is the plain case."""
    rows = warm_up._rows(5)
    assert [row.sampling for row in rows] == [*SAMPLED, *SAMPLED[:2]]
    assert rows[0].sampling == SamplingParams(temperature=0.0)
    assert {row.key for row in rows} == {KEY}
    assert tuple(sorted(ROWS)) == ROWS
