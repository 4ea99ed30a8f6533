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
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import write_tiny
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.runner import ModelRunner, build_runner
from engine_actor.work.inputs import build_prefill
from tests.engine.real_engine import BLOCK, Loaded, load, texts
from tests.engine_gpu.broken_captures import failing, unrecordable

pytestmark = pytest.mark.gpu

MOST, CONTEXT = 512, 1500
EACH = -(-CONTEXT // BLOCK)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"dtype": "float16"},
    "qwen2": {"dtype": "bfloat16"},
    "mistral": {"dtype": "float16", "sliding_window": 50},
}


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


class Unrecorded:
    """A capture whose replay launches everything anew."""

    nbytes = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


def runner_of(folder: Path, kv_dtype: str = "auto") -> ModelRunner:
    opened = open_checkpoint(folder)
    return build_runner(
        opened.config, opened.weights(), device="cuda", kv_dtype=kv_dtype, block_tokens=BLOCK
    )


def prepared(folder: Path) -> Loaded:
    loaded = load(folder, "fast", "cuda")
    loaded.runner.prepare_prefill(MOST, CONTEXT)
    return loaded


def chunk(key: int, start: int, end: int, wanted: bool = True) -> PrefillChunk:
    """Of sequence `key`, whose tokens are its own and whose blocks lie backwards."""
    draw = random.Random(key)
    tokens = tuple(draw.randrange(3, 270) for _ in range(end))[start:]
    blocks = tuple(range(key * EACH + EACH - 1, key * EACH - 1, -1))[: -(-end // BLOCK)]
    return PrefillChunk(("c", key), start, end, tokens, blocks, wanted)


def inputs_of(runner: ModelRunner, chunks: list[PrefillChunk]) -> BatchInputs:
    return build_prefill(chunks, BLOCK, runner.device)


BATCHES = {
    "one": [chunk(0, 0, 30)],
    "a whole bucket": [chunk(0, 0, 64)],
    "of another length": [chunk(1, 0, 41)],
    "cached keys": [chunk(1, 41, 90)],
    "many cached keys": [chunk(2, 0, 500), chunk(1, 90, 91)],
    "the longest": [chunk(2, 500, 1000, wanted=False)],
    "beyond the fewest keys": [chunk(2, 1000, 1200)],
    "three, the last unfinished": [chunk(3, 0, 7), chunk(4, 0, 90), chunk(5, 0, 33, wanted=False)],
    "the second wanted": [chunk(6, 0, 20, wanted=False), chunk(7, 0, 21)],
    "nobody": [chunk(6, 20, 40, wanted=False)],
    "all places": [chunk(8 + i, 0, 3 + i) for i in range(8)],
    "no room": [chunk(0, 0, 520)],
}


def run_all(runner: ModelRunner, times: int = 3) -> dict[str, list[torch.Tensor]]:
    """Each batch some times in a row: by its launches, then replayed."""
    made: dict[str, list[torch.Tensor]] = {}
    for name, chunks in BATCHES.items():
        inputs = inputs_of(runner, chunks)
        for _ in range(times):
            logits = runner.prefill_logits(inputs)
            assert (logits is None) == (not any(each.samples for each in chunks)), name
            if logits is not None:
                made.setdefault(name, []).append(logits.clone())
    return made


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_has_the_bits_of_the_first_run_and_the_plain_logits(
    folder: Callable[[str], Path], family: str, kv_dtype: str
) -> None:
    """bf16 keeps eight bits of a number, so its logits differ by more."""
    plain, staged = (runner_of(folder(family), kv_dtype) for _ in range(2))
    staged.prepare_prefill(MOST, CONTEXT)
    for runner in (plain, staged):
        runner.resize_kv(16 * EACH)
    wanted, made = run_all(plain), run_all(staged)
    assert staged.prefill_graph_counts.replays >= 2 * (len(BATCHES) - 1)
    assert staged.prefill_graph_counts.failures == 0
    for name, (first, *others) in made.items():
        assert all(torch.equal(first, other) for other in others), name
        allowed = 0.5 if family == "qwen2" or kv_dtype == "int8" else 0.1
        torch.testing.assert_close(first, wanted[name][0], atol=allowed, rtol=0.02, msg=name)


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
