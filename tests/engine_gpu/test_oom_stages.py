"""Real allocation failures in every stage of a step under a true cap.

Each ends at most the one request; the others' texts are those of a run without it, and the memory
goes back to its level. Bug case B-22, row S-42.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_actor.load.tiny import write_tiny
from engine_actor.messages import Flag
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.memory import card_ledger
from engine_actor.model.sampler import Sampler
from tests.engine.driver import CLIENT, Driver
from tests.engine.real_engine import Loaded, load, texts

pytestmark = pytest.mark.gpu

MIB = 1 << 20
DEVICE = torch.device("cuda")
PROMPTS = [[3 + (7 * rid + i) % 250 for i in range(10 + 4 * rid)] for rid in range(6)]
GUILTY = [3 + i % 250 for i in range(200)]
"""The only prompt of over 100 tokens: its keys give it away in every stage."""
N_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder: Path = write_tiny(
        tmp_path_factory.mktemp("stages"),
        "llama",
        seed=5,
        packed=True,
        dtype="float16",
        head_dim=64,
        hidden_size=128,
    )
    return load(folder, "fast", "cuda")


@contextmanager
def ledger_room(n_bytes: int) -> Iterator[None]:
    """Let torch and the KV pool take n_bytes more than they hold now, together."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    ledger = card_ledger(DEVICE)
    ledger.hold(ledger.held + n_bytes)
    try:
        yield
    finally:
        ledger.hold(None)


def starve() -> None:
    """More than the cap leaves, less than the card has."""
    torch.empty(256 * MIB, dtype=torch.uint8, device=DEVICE)


def is_guilty(inputs: BatchInputs) -> bool:
    return max(inputs.kv_lens) > 100


Damage = Callable[[pytest.MonkeyPatch, Loaded], None]


def in_prefill(patch: pytest.MonkeyPatch, model: Loaded) -> None:
    run = model.runner.run_layers

    def greedy(hidden: torch.Tensor, inputs: BatchInputs, first: int, last: int) -> torch.Tensor:
        if is_guilty(inputs):
            starve()
        return run(hidden, inputs, first, last)

    patch.setattr(model.runner, "run_layers", greedy)


def in_decode(patch: pytest.MonkeyPatch, model: Loaded) -> None:
    run = model.runner.decode_logits

    def greedy(inputs: BatchInputs) -> torch.Tensor:
        logits = run(inputs)
        if is_guilty(inputs):
            starve()
        return logits

    patch.setattr(model.runner, "decode_logits", greedy)


def in_sampling(patch: pytest.MonkeyPatch, model: Loaded) -> None:
    begin = Sampler.begin

    def greedy(self: Sampler, logits: torch.Tensor, rows: Any, *rest: Any) -> Any:
        if any(row.key == (CLIENT, len(PROMPTS)) for row in rows):
            starve()
        return begin(self, logits, rows, *rest)

    patch.setattr(Sampler, "begin", greedy)


@pytest.mark.parametrize("damage", [in_prefill, in_decode, in_sampling])
@pytest.mark.parametrize("depth", [0, 1])
def test_it_ends_one_request_and_nothing_else(
    model: Loaded, monkeypatch: pytest.MonkeyPatch, damage: Damage, depth: int
) -> None:
    engine = model.engine(prefill_chunk_tokens=32, depth=depth)
    right = texts(engine, PROMPTS, N_TOKENS)
    # What is taken once and kept is taken here: the streams' workspaces, the sampler's room.
    texts(engine, [*PROMPTS, GUILTY], N_TOKENS)
    engine.kv.reset_prefix_cache()
    level = settled()
    damage(monkeypatch, model)
    with ledger_room(64 * MIB):
        driver = Driver(engine)
        for rid, prompt in enumerate([*PROMPTS, GUILTY]):
            driver.submit(rid, prompt, N_TOKENS, ignore_eos=True)
        driver.run()
    monkeypatch.undo()
    driver.assert_all_free()
    assert [driver.tokens(rid) for rid in range(len(PROMPTS))] == right
    assert driver.end(len(PROMPTS)) is Flag.OOM
    assert driver.heard[CLIENT, len(PROMPTS)].code == "out_of_memory"
    assert engine.metrics.value("oom_isolated_total") == 1
    assert settled() <= level + MIB
    engine.kv.reset_prefix_cache()
    assert texts(engine, PROMPTS, N_TOKENS) == right


def test_no_memory_for_a_graph_ends_nobody(model: Loaded) -> None:
    """The step runs without one, then and later."""
    engine = model.engine()
    right = texts(engine, PROMPTS, N_TOKENS)
    runner: Any = model.runner
    runner.prepare_decode(16, 512, graphs=True)
    forward, calls = runner._graphs._forward, []

    def greedy(*arguments: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            calls.append(1)
            starve()
        forward(*arguments)

    try:
        runner._graphs._forward = greedy
        engine.kv.reset_prefix_cache()
        with ledger_room(64 * MIB):
            assert texts(engine, PROMPTS, N_TOKENS) == right
        assert calls
        assert runner.graph_counts.failures > 0
        assert runner.graph_counts.graphs == 0
        assert engine.metrics.value("oom_isolated_total") == 0
        # A change of the cache lets every bucket try again: now there is room.
        runner._graphs._forward = forward
        runner._graphs.cache_moved()
        engine.kv.reset_prefix_cache()
        assert texts(engine, PROMPTS, N_TOKENS) == right
        assert runner.graph_counts.replays > 0
    finally:
        runner._graphs = None


def test_a_pool_that_cannot_grow_leaves_no_wrong_text(tmp_path: Path) -> None:
    """KV memory runs out at half of what was promised, and takes what activations had: requests
    wait or end for want of memory, nothing else, and with memory back all is as before.
    """
    folder = write_tiny(
        tmp_path,
        "llama",
        seed=5,
        dtype="float16",
        head_dim=128,
        num_key_value_heads=8,
        num_attention_heads=8,
        max_position_embeddings=2048,
    )
    fat = load(folder, "fast", "cuda")
    prompts = [[3 + (11 * rid + i) % 250 for i in range(500)] for rid in range(12)]
    engine = fat.engine(prefill_chunk_tokens=64, max_num_seqs=12)
    right = texts(engine, prompts, N_TOKENS)
    engine.kv.reset_prefix_cache()
    engine.elastic.shrink(8)
    with ledger_room(48 * MIB):
        driver = Driver(engine)
        for rid, prompt in enumerate(prompts):
            driver.submit(rid, prompt, N_TOKENS, ignore_eos=True)
        driver.run()
        assert card_ledger(DEVICE).held <= (card_ledger(DEVICE).cap or 0)
    driver.assert_all_free()
    starved = [rid for rid in range(12) if driver.end(rid) is Flag.OOM]
    assert engine.metrics.value("oom_isolated_total") == len(starved) < 12
    for rid in set(range(12)) - set(starved):
        assert driver.tokens(rid) == right[rid]
    engine.kv.reset_prefix_cache()
    assert texts(engine, prompts, N_TOKENS) == right


def settled() -> int:
    """Bytes of tensors that somebody still holds. The KV pool is not among them: it grows."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
