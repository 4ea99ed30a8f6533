"""Steps launched ahead of the host on a real device: the synchronising twin's tokens, a launch that
waits for nothing, and each of the four waits between the streams proved to be needed.

decisions.md section 3; rows S-52 to S-54 of the seed, bug case B-35.
"""

from __future__ import annotations

import random
import warnings
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_actor.core.plan import StepPlan
from engine_actor.core.sequence import Key
from engine_actor.engine import Engine
from engine_actor.load.tiny import write_tiny
from engine_actor.messages import Cancel, Evict, Flag
from engine_actor.work.inputs import Feed
from engine_actor.work.staging import Numbers, Staging
from engine_actor.work.step import OpenStep
from engine_actor.work.streams import CudaStreams, SerialPair, StreamPair
from engine_actor.work.token_buffer import TokenBuffer
from tests.engine.driver import CLIENT, Driver
from tests.engine.real_engine import Loaded, load, texts

pytestmark = pytest.mark.gpu

CHUNK = 16
DELAY = 2_000_000
"""Cycles of a delay kernel: about a millisecond, longer than the host needs for a launch."""
RUNS = 20
WAITS = (
    ("decode", "default"),
    ("prefill", "default"),
    ("default", "prefill"),
    ("default", "decode"),
)


def engine_of(loaded: Loaded, ahead: bool, **config: Any) -> Engine:
    settings = {"prefill_chunk_tokens": CHUNK, "async_steps": ahead}
    return loaded.engine(**(settings | config))


def prompts(n: int, longest: int = 90) -> list[list[int]]:
    draw = random.Random(23)
    return [[draw.randrange(3, 270) for _ in range(draw.randint(1, longest))] for _ in range(n)]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"temperature": 0.7, "seed": 3, "presence_penalty": 0.8, "repetition_penalty": 1.2},
        {"logprobs": 2, "min_tokens": 8},
    ],
)
@pytest.mark.parametrize("kv_blocks", [600, 40])
def test_the_synchronising_twins_tokens_in_any_crowd(
    on_gpu: Loaded, sampling: dict[str, Any], kv_blocks: int
) -> None:
    """40 blocks hold only a part of the crowd at once, so that some are preempted."""
    crowd = prompts(16)
    twin, ahead = (
        texts(engine_of(on_gpu, each, kv_blocks=kv_blocks), crowd, 24, **sampling)
        for each in (False, True)
    )
    assert ahead == twin


def test_cancels_and_evictions_cost_the_others_nothing(on_gpu: Loaded) -> None:
    crowd = prompts(12)
    right = texts(engine_of(on_gpu, ahead=False), crowd, 20)
    engine = engine_of(on_gpu, ahead=True)
    assert engine.depth == 1
    driver = Driver(engine)
    for rid, prompt in enumerate(crowd):
        driver.submit(rid, prompt, 20, ignore_eos=True)
        driver.submit(100 + rid, prompt[::-1], 64, ignore_eos=True)

    def disturb(step: int) -> None:
        if step % 7 == 3:
            engine.cancel(CLIENT, Cancel(100 + step // 7))
        if step % 11 == 5:
            engine.evict(CLIENT, Evict(step // 11, requeue=True))

    driver.run(disturb)
    driver.assert_all_free()
    assert [driver.tokens(rid) for rid in range(len(crowd))] == right
    assert driver.end(100) is Flag.CANCELLED


@pytest.mark.parametrize("kernels", [False, True])
def test_a_launch_waits_for_nothing(on_gpu: Loaded, tmp_path: Path, kernels: bool) -> None:
    """Once everything is compiled, no step of a crowd makes the host wait as it is launched: with
    the general ops, and with the kernels and graphs of a layer."""
    loaded = on_gpu
    if kernels:
        shape: dict[str, Any] = {"head_dim": 64, "dtype": "float16", "hidden_size": 128}
        loaded = load(write_tiny(tmp_path, "llama", seed=3, packed=True, **shape), "fast", "cuda")
        loaded.runner.prepare_decode(16, 256, graphs=True)
    engine = engine_of(loaded, ahead=True)
    assert texts(engine, prompts(8), 12)
    launch = engine._steps.launch
    said: set[str] = set()

    def watched(plan: StepPlan, void: frozenset[Key] = frozenset()) -> OpenStep:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                return launch(plan, void)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            kinds = f"{bool(plan.prefill)} chunks, {bool(plan.decode)} rows"
            said.update(f"{kinds}: {w.filename}:{w.lineno}" for w in caught)

    engine._steps.launch = watched  # type: ignore[method-assign]
    engine.kv.reset_prefix_cache()
    assert texts(engine, prompts(8), 12)
    assert said == set()


class Streams(CudaStreams):
    """The device's streams by name, with what waited for what, and one wait left out."""

    def __init__(self, device: torch.device, without: tuple[str, str] | None = None) -> None:
        super().__init__(device)
        self.decode, self.prefill = self.new_stream(True), self.new_stream(False)
        self._without = without
        self.log: list[str] = []

    def name(self, stream: torch.cuda.Stream) -> str:
        return {self.decode: "decode", self.prefill: "prefill"}.get(stream, "default")

    def wait(self, waiter: torch.cuda.Stream, awaited: torch.cuda.Stream) -> None:
        pair = self.name(waiter), self.name(awaited)
        self.log.append("{} waits for {}".format(*pair))
        if pair != self._without:
            super().wait(waiter, awaited)


def delay(times: int = 1) -> None:
    torch.cuda._sleep(times * DELAY)


def late_feed(feed: Feed) -> Feed:
    """Inputs that come late on the stream that copies them; until then they are zeros, so that a
    kernel that reads them too early computes nonsense and breaks nothing."""
    assert feed.staging is not None
    assert feed.tokens is not None
    return Feed(_LateStaging(feed.staging), _LateTokens(feed.tokens))


class _LateStaging:
    def __init__(self, inner: Staging) -> None:
        self._inner = inner

    def __call__(self, wide: array[int], narrow: bytearray) -> Numbers:
        return tuple(map(_late, self._inner(wide, narrow)))  # type: ignore[return-value]


class _LateTokens(TokenBuffer):
    def __init__(self, inner: TokenBuffer) -> None:
        self.tokens = inner.tokens

    def read(self, ids: torch.Tensor, slots: torch.Tensor, all_in_flight: bool) -> torch.Tensor:
        return _late(super().read(ids, slots, all_in_flight))


_ZEROS: list[torch.Tensor] = []


def _late(made: torch.Tensor) -> torch.Tensor:
    """The same values after a delay, in memory that is zero from long before."""
    if len(_ZEROS) == 0:
        _ZEROS.extend(torch.zeros(1 << 16, dtype=torch.int64, device="cuda") for _ in range(400))
        torch.cuda.synchronize()
    memory = _ZEROS.pop().view(made.dtype)[: made.numel()].view(made.shape)
    delay()
    return memory.copy_(made)


@contextmanager
def late_writes(runner: Any, patch: pytest.MonkeyPatch, last: str | None) -> Iterator[None]:
    """The last write of either work, its logits, comes a delay after everything else of it, that of
    the work `last` long after the other's; the zeros of new KV come late as well."""
    resize, decode, head = runner.resize_kv, runner.decode_logits, runner.logits

    def late_resize(n_blocks: int) -> None:
        delay()
        resize(n_blocks)

    def late_logits(made: torch.Tensor, work: str) -> torch.Tensor:
        memory = _ZEROS.pop().view(torch.float32)[: made.numel()].view(made.shape)
        delay(8 if work == last else 1)
        return memory.copy_(made)

    def late_decode(inputs: Any) -> torch.Tensor:
        with patch.context() as plain:
            plain.setattr(runner, "logits", head)
            return late_logits(decode(inputs), "decode")

    def late_prefill(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return late_logits(head(hidden, rows), "prefill")

    with patch.context() as inside:
        inside.setattr(runner, "resize_kv", late_resize)
        inside.setattr(runner, "decode_logits", late_decode)
        inside.setattr(runner, "logits", late_prefill)
        yield


def played(
    loaded: Loaded, without: tuple[str, str] | None, patch: pytest.MonkeyPatch
) -> tuple[list[list[int]], list[str]]:
    """The texts of streams that decode while prompts come in beside them, and the order of waits
    and samples."""
    _ZEROS.clear()
    engine = engine_of(loaded, ahead=True, cuda_graphs=False)
    device = torch.device("cuda", torch.cuda.current_device())
    api = Streams(device, without)
    pair = StreamPair(api, api.decode, api.prefill, SerialPair(device))
    engine._steps._isolation._pair = pair
    context = engine._steps._context
    object.__setattr__(context, "feed", late_feed(context.feed))
    begin = context.sampler.begin

    def traced(logits: Any, rows: Sequence[Any], *more: Any) -> Any:
        api.log.append(f"sample on {api.name(torch.cuda.current_stream())}")
        return begin(logits, rows, *more)

    patch.setattr(context.sampler, "begin", traced)
    last = without[1] if without is not None and without[0] == "default" else None
    with late_writes(loaded.runner, patch, last):
        found = texts(engine, PROMPTS, 10)
    torch.cuda.synchronize()
    assert engine.metrics.value("prefill_decode_stream_overlap_steps") > 3
    return found, api.log


PROMPTS = prompts(5, longest=40)


@pytest.fixture(scope="module")
def right(on_gpu: Loaded) -> list[list[int]]:
    twin = engine_of(on_gpu, False, enable_prefill_decode_overlap=False, cuda_graphs=False)
    return texts(twin, PROMPTS, 10)


@pytest.mark.parametrize("run", range(RUNS))
def test_late_streams_give_the_serial_tokens(
    on_gpu: Loaded, right: list[list[int]], run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, log = played(on_gpu, None, monkeypatch)
    assert found == right
    joined = ["default waits for prefill", "default waits for decode"]
    for index, entry in enumerate(log):
        if entry == "decode waits for default":
            after = log[index : index + 4]
            assert after == [entry, "prefill waits for default", *joined]
            assert log[index + 4 : index + 5] in ([], ["sample on default"])
    assert {entry for entry in log if entry.startswith("sample")} == {"sample on default"}


@pytest.mark.parametrize("run", range(RUNS))
@pytest.mark.parametrize("without", WAITS, ids=lambda pair: "-".join(pair))
def test_without_any_one_wait_the_tokens_are_wrong(
    on_gpu: Loaded,
    right: list[list[int]],
    without: tuple[str, str],
    run: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fences proved: what the test above shows would not hold without it."""
    assert played(on_gpu, without, monkeypatch)[0] != right
