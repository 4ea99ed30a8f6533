"""Decode steps replayed from CUDA graphs: the bits of the same steps without, whatever the batch,
its lengths and where the cache lies; a capture that fails costs nobody anything.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_actor.core.plan import DecodeSlot, PrefillChunk
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import write_tiny
from engine_actor.model import carried, graph_capture
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.runner import ModelRunner, build_runner
from engine_actor.work.inputs import build_decode, build_prefill
from tests.engine.real_engine import BLOCK, Loaded, load, texts
from tests.engine_gpu.broken_captures import failing, unrecordable

pytestmark = pytest.mark.gpu

MAX_ROWS, MAX_CONTEXT = 24, 1500
BLOCKS_EACH = -(-MAX_CONTEXT // BLOCK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, half precision, packed linears and head."""
    settings: dict[str, Any] = {"head_dim": 64, "dtype": "float16", "hidden_size": 128, "seed": 3}
    made = tmp_path_factory.mktemp("graphs")
    return write_tiny(made, "llama", packed=True, max_position_embeddings=2048, **settings)


def runner_of(folder: Path, kv_dtype: str = "auto", graphs: bool = True) -> ModelRunner:
    opened = open_checkpoint(folder)
    runner = build_runner(
        opened.config, opened.weights(), device="cuda", kv_dtype=kv_dtype, block_tokens=BLOCK
    )
    runner.prepare_decode(MAX_ROWS, MAX_CONTEXT, graphs)
    return runner


def fill(runner: ModelRunner, lengths: list[int]) -> None:
    """Prompts of the given lengths, each in blocks of its own."""
    draw = random.Random(11)
    for i, length in enumerate(lengths):
        tokens = tuple(draw.randrange(3, 270) for _ in range(length))
        chunk = PrefillChunk(("c", i), 0, length, tokens, blocks_of(i), samples=False)
        inputs = build_prefill([chunk], BLOCK, runner.device)
        runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)


def blocks_of(i: int) -> tuple[int, ...]:
    return tuple(range(i * BLOCKS_EACH, (i + 1) * BLOCKS_EACH))


def decode(runner: ModelRunner, lengths: list[int]) -> BatchInputs:
    slots = [
        DecodeSlot(("c", i), length, 5 + i, blocks_of(i), i) for i, length in enumerate(lengths)
    ]
    return build_decode(slots, BLOCK, runner.device)


def steps(runner: ModelRunner, lengths: list[int], count: int = 3) -> list[torch.Tensor]:
    """The logits of some steps that follow each other, each overwriting none of the others'."""
    made = []
    for step in range(count):
        made.append(runner.decode_logits(decode(runner, [n + step for n in lengths])).clone())
    return made


LENGTHS = {
    "one": [40],
    "below a bucket": [3, 100, 61],
    "a bucket": [17, 5, 330, 12],
    "between buckets": [7] * 9 + [200, 3, 450, 1, 1],
    "the largest": [50 + 3 * i for i in range(MAX_ROWS)],
    "over a border of contexts": [511, 20, 510],
    "the longest": [MAX_CONTEXT - 3, 900],
}


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_replay_has_the_bits_of_the_step(folder: Path, name: str, kv_dtype: str) -> None:
    lengths = LENGTHS[name]
    made = []
    for graphs in (True, False):
        runner = runner_of(folder, kv_dtype, graphs)
        runner.resize_kv(len(lengths) * BLOCKS_EACH)
        fill(runner, lengths)
        made.append(steps(runner, lengths, 4))
        counts = runner.graph_counts
        assert counts.failures == 0
        assert (counts.replays >= 1) == graphs
    for replayed, launched in zip(*made, strict=True):
        assert torch.equal(replayed, launched)


def test_buckets_agree_with_the_plain_forward(folder: Path) -> None:
    """Padding and staging add nothing: other splits of the same sums at most."""
    lengths = LENGTHS["between buckets"]
    runner = runner_of(folder)
    runner.resize_kv(len(lengths) * BLOCKS_EACH)
    fill(runner, lengths)
    inputs = decode(runner, lengths)
    plain = runner.logits(
        runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers), inputs.logit_rows
    )
    for _ in range(2):
        close = runner.decode_logits(inputs)
        torch.testing.assert_close(close, plain, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_that_carry_the_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The same step with a launch for every norm, of a model whose widths allow both."""
    settings: dict[str, Any] = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 192}
    settings |= {"max_position_embeddings": 2048, "dtype": dtype, "seed": 3}
    write_tiny(tmp_path, "qwen2", packed=True, **settings)
    lengths = LENGTHS["between buckets"]
    logits = []
    for carries in (True, False):
        monkeypatch.setattr(carried, "CARRY_NORMS", carries)
        runner = load(tmp_path, "fast", "cuda").runner
        runner.prepare_decode(MAX_ROWS, MAX_CONTEXT, True)
        runner.resize_kv(len(lengths) * BLOCKS_EACH)
        fill(runner, lengths)
        logits.append(steps(runner, lengths, 2)[-1])
        assert any(runner._decoder._carried.values()) == carries
    torch.testing.assert_close(*logits, atol=0.2, rtol=0.02)


def test_padding_writes_no_kv(folder: Path) -> None:
    runner = runner_of(folder)
    runner.resize_kv(4 * BLOCKS_EACH)
    fill(runner, [30, 20, 10])
    others = tuple(range(3 * BLOCKS_EACH, 4 * BLOCKS_EACH))
    before = runner.kv_checksum(others), runner.kv_checksum((0,))
    steps(runner, [30, 20, 10])
    runner.warm_decode()
    assert (runner.kv_checksum(others), runner.kv_checksum((0,))) == before


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_cache_grows_between_steps(folder: Path, kv_dtype: str) -> None:
    """Where it moves, graphs are captured anew; where it stays, they go on."""
    lengths = [300, 20, 100]
    made = []
    for graphs in (True, False):
        runner = runner_of(folder, kv_dtype, graphs)
        runner.resize_kv(3 * BLOCKS_EACH)
        fill(runner, lengths)
        logits = steps(runner, lengths)
        runner.resize_kv(7 * BLOCKS_EACH)
        keep = torch.randn(1 << 20, device="cuda")  # takes what the old cache left
        logits += steps(runner, [n + 3 for n in lengths])
        runner.resize_kv(3 * BLOCKS_EACH)
        logits += steps(runner, [n + 6 for n in lengths])
        del keep
        made.append(logits)
    for replayed, launched in zip(*made, strict=True):
        assert torch.equal(replayed, launched)


def crowd(count: int = 13) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, 270) for _ in range(draw.randint(1, 120))] for _ in range(count)]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 4}])
def test_texts_with_and_without_graphs(folder: Path, sampling: dict[str, Any]) -> None:
    made = []
    for graphs in (True, False):
        loaded = load(folder, "fast", "cuda")
        loaded.runner.prepare_decode(MAX_ROWS, MAX_CONTEXT, graphs)
        engine = loaded.engine(max_num_seqs=16, prefill_chunk_tokens=64)
        made.append(texts(engine, crowd(), 40, **sampling))
        assert (loaded.runner.graph_counts.replays > 10) == graphs
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "error", [lambda: torch.OutOfMemoryError("no memory"), unrecordable], ids=["oom", "forbidden"]
)
def test_a_capture_that_fails_costs_nobody_anything(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]
) -> None:
    loaded = load(folder, "fast", "cuda")
    loaded.runner.prepare_decode(MAX_ROWS, MAX_CONTEXT, False)
    wanted = texts(loaded.engine(max_num_seqs=16), crowd(), 12)
    monkeypatch.setattr("engine_actor.model.forward.CudaCapture", failing(error))
    loaded.runner.prepare_decode(MAX_ROWS, MAX_CONTEXT, True)
    assert texts(loaded.engine(max_num_seqs=16), crowd(), 12) == wanted
    counts = loaded.runner.graph_counts
    assert counts.failures > 0
    assert counts.graphs == 0
    monkeypatch.undo()
    loaded.runner.prepare_decode(MAX_ROWS, MAX_CONTEXT, True)
    assert texts(loaded.engine(max_num_seqs=16), crowd(), 12) == wanted
    assert loaded.runner.graph_counts.replays > 0


def test_no_garbage_is_collected_in_a_capture() -> None:
    """A pool of KV that dies in a cycle is unmapped by the collector: not in the middle of it."""
    numbers, seen = torch.zeros(4, device="cuda"), []

    def run() -> None:
        seen.append(gc.isenabled())
        numbers.add_(1)

    capture = graph_capture.CudaCapture(numbers.device)
    replay = capture(run)
    with pytest.raises(ZeroDivisionError):
        capture(lambda: run() or 1 / 0)
    assert seen == [False, False]
    assert gc.isenabled()
    replay()
    assert numbers.tolist() == [1, 1, 1, 1]


def test_no_memory_for_a_graph(folder: Path) -> None:
    """A true refusal of the allocator, in the middle of a capture."""
    runner = runner_of(folder)
    lengths = [30, 20, 10]
    runner.resize_kv(3 * BLOCKS_EACH)
    fill(runner, lengths)
    twin = runner_of(folder, graphs=False)
    twin.resize_kv(3 * BLOCKS_EACH)
    fill(twin, lengths)
    wanted = steps(twin, lengths)
    runner.decode_logits(decode(runner, lengths[:1]))  # has its graph
    steps(twin, lengths)
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        made = steps(runner, lengths)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for replayed, launched in zip(made, wanted, strict=True):
        assert torch.equal(replayed, launched)


def test_models_without_kernels_have_no_buckets(tmp_path: Path) -> None:
    made = write_tiny(tmp_path, "llama", head_dim=16, dtype="float32", seed=3)
    loaded: Loaded = load(made, "fast", "cuda")
    loaded.runner.prepare_decode(MAX_ROWS, MAX_CONTEXT, True)
    assert loaded.runner.graph_counts.reason == "the general ops plan every step anew"
    exact = dataclasses.replace(loaded, runner=load(made, "exact", "cuda").runner)
    assert len(texts(exact.engine(), crowd(2), 3)) == 2
