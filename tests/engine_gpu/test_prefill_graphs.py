"""Small forwards of prompts replayed from CUDA graphs: the bits of their first run, the logits of
the plain forward, whatever the batch; beside decodes as well. A capture that fails costs nobody
anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_actor import ops
from engine_actor.core.plan import OverlapMode, PrefillChunk
from engine_actor.load.tiny import write_tiny
from tests.engine.real_engine import Loaded, load, texts
from tests.engine_gpu.broken_captures import failing, unrecordable
from tests.engine_gpu.prompt_batches import (
    BATCHES,
    BURST,
    BURSTS,
    CONTEXT,
    EACH,
    FAMILIES,
    MOST,
    Unrecorded,
    inputs_of,
    run_all,
    runner_of,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in made:
            shape: dict[str, Any] = {"head_dim": 64, "hidden_size": 128, "seed": 3}
            shape |= FAMILIES[family] | {"max_position_embeddings": 2048}
            made[family] = tmp_path_factory.mktemp(family)
            write_tiny(made[family], family, packed=True, **shape)
        return made[family]

    return folder_of


def prepared(folder: Path) -> Loaded:
    loaded = load(folder, "fast", "cuda")
    loaded.runner.prepare_prefill(MOST, CONTEXT)
    return loaded


@pytest.mark.parametrize(
    ("most", "batches", "eager"), [(MOST, BATCHES, 1), (BURST, BURSTS, 2)], ids=["small", "bursts"]
)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_has_the_bits_of_the_first_run_and_the_plain_logits(
    folder: Callable[[str], Path],
    family: str,
    kv_dtype: str,
    most: int,
    batches: dict[str, list[PrefillChunk]],
    eager: int,
) -> None:
    """bf16 keeps eight bits of a number, so its logits differ by more. eager: batches without a
    bucket."""
    plain, staged = (runner_of(folder(family), kv_dtype) for _ in range(2))
    staged.prepare_prefill(most, CONTEXT)
    for runner in (plain, staged):
        runner.resize_kv(16 * EACH)
    wanted, made = (run_all(runner, batches=batches) for runner in (plain, staged))
    counts = staged.prefill_graph_counts
    assert counts.replays >= 2 * (len(batches) - eager)
    assert (counts.failures, counts.unbucketed) == (0, 3 * eager)
    for name, (first, *others) in made.items():
        assert all(torch.equal(first, other) for other in others), name
        allowed = 0.5 if family == "qwen2" or kv_dtype == "int8" else 0.1
        torch.testing.assert_close(first, wanted[name][0], atol=allowed, rtol=0.02, msg=name)


def test_a_burst_has_the_bits_of_its_graph_whatever_ran_before(
    folder: Callable[[str], Path],
) -> None:
    """Captured at the start from padding alone, the largest first, as an engine does."""
    runner, twin = (runner_of(folder("llama")) for _ in range(2))
    for made in (runner, twin):
        made.prepare_prefill(BURST, CONTEXT)
        made.resize_kv(16 * EACH)
    twin._prefill_graphs._graphs._capture = Unrecorded()  # type: ignore[union-attr]
    runner.warm_prefill()
    captured = runner.prefill_graph_counts.graphs
    wanted = run_all(twin, 1, BURSTS)
    for _ in range(2):
        for name, (logits,) in run_all(runner, 1, BURSTS).items():
            assert torch.equal(logits, wanted[name][0]), name
    assert captured == runner.prefill_graph_counts.graphs == len(runner._prefill_graphs.buckets)  # type: ignore[union-attr]


def test_padding_writes_no_kv(folder: Callable[[str], Path]) -> None:
    runner = prepared(folder("llama")).runner
    runner.resize_kv(16 * EACH)
    run_all(runner)
    kept = tuple(range(16 * EACH))
    before = runner.kv_checksum(kept)
    runner.warm_prefill()
    assert runner.kv_checksum(kept) == before
    run_all(runner, 1)
    assert runner.kv_checksum(kept) == before, "the same prompts wrote something else"


def test_the_cache_moves_between_prompts(folder: Callable[[str], Path]) -> None:
    runner, twin = prepared(folder("llama")).runner, prepared(folder("llama")).runner
    twin.resize_kv(16 * EACH)
    runner.resize_kv(16 * EACH)
    wanted = run_all(twin, 1)
    run_all(runner, 1)
    runner.resize_kv(40 * EACH)
    keep = torch.randn(1 << 20, device="cuda")  # takes what the old cache left
    for name, (logits,) in run_all(runner, 1).items():
        assert torch.equal(logits, wanted[name][0]), name
    del keep


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_graphs_outlive_the_growth_of_a_cache_that_stays(
    folder: Callable[[str], Path], kv_dtype: str
) -> None:
    """Blocks that were not there yet as they were captured are read like all others, by a gather
    that does not know how many there are."""
    runner, twin = (runner_of(folder("llama"), kv_dtype) for _ in range(2))
    for made in (runner, twin):
        made.prepare_prefill(MOST, CONTEXT)
    twin.resize_kv(16 * EACH)
    wanted = run_all(twin, 1)
    runner.reserve_kv(16 * EACH)
    runner.resize_kv(1)
    runner.warm_prefill()
    counts = runner.prefill_graph_counts
    captured = counts.graphs
    assert captured == counts.eager > 10
    runner.resize_kv(16 * EACH)
    for name, (logits,) in run_all(runner, 1).items():
        assert torch.equal(logits, wanted[name][0]), name
    if runner.kv.why_not_fixed is None:
        assert (counts.dropped, counts.graphs, counts.eager) == (0, captured, captured)


def crowd(count: int = 20) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, 270) for _ in range(draw.randint(1, 120))] for _ in range(count)]


@pytest.mark.parametrize("mode", [OverlapMode.SERIAL, OverlapMode.TWO_STREAMS])
def test_texts_beside_decodes(folder: Callable[[str], Path], mode: OverlapMode) -> None:
    """Decode steps and prompts from graphs at the same time: the tokens of both by their launches,
    in the same shapes."""
    made = []
    for graphs in (True, False):
        loaded = prepared(folder("llama"))
        if not graphs:
            staged: Any = loaded.runner._prefill_graphs
            staged._graphs._capture = Unrecorded()
        loaded.runner.prepare_decode(16, CONTEXT, graphs)
        engine = loaded.engine(max_num_seqs=16, prefill_chunk_tokens=64, overlap_mode=mode.value)
        for _ in range(2):
            made.append(texts(engine, crowd(), 40))
            engine.kv.reset_prefix_cache()
        assert loaded.runner.prefill_graph_counts.replays > 10
    assert made[0] == made[1] == made[2] == made[3]


def test_a_limited_card_gets_no_graph(folder: Callable[[str], Path]) -> None:
    runner = prepared(folder("llama")).runner
    runner.resize_kv(16 * EACH)
    inputs = inputs_of(runner, BATCHES["one"])
    with ops.limit_multiprocessors(20):
        runner.prefill_logits(inputs)
    counts = runner.prefill_graph_counts
    assert (counts.eager, counts.replays) == (0, 0)
    runner.prefill_logits(inputs)
    assert counts.graphs == 1


@pytest.mark.parametrize(
    "error", [lambda: torch.OutOfMemoryError("no memory"), unrecordable], ids=["oom", "forbidden"]
)
def test_a_capture_that_fails_costs_nobody_anything(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]
) -> None:
    wanted = prepared(folder("llama")).runner
    wanted.resize_kv(16 * EACH)
    right = run_all(wanted, 1)
    monkeypatch.setattr("engine_actor.model.forward.CudaCapture", failing(error))
    runner = prepared(folder("llama")).runner
    runner.resize_kv(16 * EACH)
    for name, found in run_all(runner, 2).items():
        assert all(torch.equal(logits, right[name][0]) for logits in found), name
    counts = runner.prefill_graph_counts
    assert counts.failures > 3
    assert (counts.graphs, counts.replays) == (0, 0)
    assert len(torch.randn(3, device="cuda").unique()) == 3, "torch draws as before"


def test_no_memory_for_a_graph(folder: Callable[[str], Path]) -> None:
    """A true refusal of the allocator, in the middle of a capture."""
    runner, twin = prepared(folder("llama")).runner, prepared(folder("llama")).runner
    for each in (runner, twin):
        each.resize_kv(16 * EACH)
    wanted = run_all(twin, 1)
    inputs = {name: inputs_of(runner, chunks) for name, chunks in BATCHES.items()}
    graphs: Any = runner._prefill_graphs
    graphs._graphs._capture, kept = Unrecorded(), graphs._graphs._capture
    run_all(runner, 1)
    graphs._graphs._capture = kept
    graphs._graphs._replays.clear()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        for name, batch in inputs.items():
            logits = runner.prefill_logits(batch)
            if logits is not None:
                assert torch.equal(logits, wanted[name][0]), name
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_models_without_kernels_have_no_buckets(tmp_path: Path) -> None:
    made = write_tiny(tmp_path, "llama", head_dim=16, dtype="float32", seed=3)
    runner = load(made, "fast", "cuda").runner
    runner.prepare_prefill(MOST, CONTEXT)
    assert runner.prefill_graph_counts.reason == "the general ops plan every step anew"
