"""A device whose streams lag: inputs that come late, last writes that come later, and one wait left
out. What the tests of the four fences have in common.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine_actor.engine import Engine
from engine_actor.work.inputs import Feed
from engine_actor.work.pair import SerialPair
from engine_actor.work.staging import Numbers, Staging
from engine_actor.work.streams import CudaStreams, StreamPair
from engine_actor.work.timing import ClockTimer, Timer
from engine_actor.work.token_buffer import TokenBuffer
from tests.engine.real_engine import Loaded, texts

DELAY = 2_000_000
"""Cycles of a delay kernel: about a millisecond, longer than the host needs for a launch."""
LONG = 8
"""So many delays where the other stream must not come first by chance."""
N_TOKENS = 10


def prompts(n: int, longest: int = 90) -> list[list[int]]:
    """n prompts of 1 to `longest` ids, the same each time."""
    draw = random.Random(23)
    return [[draw.randrange(3, 270) for _ in range(draw.randint(1, longest))] for _ in range(n)]


PROMPTS = prompts(5, longest=40)


def engine_of(loaded: Loaded, **config: Any) -> Engine:
    """Steps ahead of the host, chunks of 16 tokens."""
    return loaded.engine(**({"prefill_chunk_tokens": 16, "async_steps": True} | config))


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

    def new_timer(self) -> Timer:
        """With a wait left out a step ends before its works have: their times could not be read,
        which would end the run before it shows its tokens."""
        return super().new_timer() if self._without is None else ClockTimer()


LONGER = (1, 5, 25)
"""Times DELAY until a wait that is left out shows."""


def delay(times: int = 1) -> None:
    torch.cuda._sleep(times * DELAY)


def shows(is_wrong: Callable[[], bool], patch: pytest.MonkeyPatch) -> bool:
    """Whether something is wrong with delays as they are, or else with longer ones: a host that
    others keep busy launches so slowly that what should come late comes in time all the same."""
    for times in LONGER:
        with patch.context() as inside:
            inside.setattr("tests.engine_gpu.late_streams.DELAY", times * DELAY)
            if is_wrong():
                return True
    return False


def late_feed(feed: Feed, times: int) -> Feed:
    """Inputs that come `times` delays late on the stream that copies them; until then they are
    zeros, so that a kernel that reads them too early computes nonsense and breaks nothing."""
    assert feed.staging is not None
    assert feed.tokens is not None
    return Feed(_LateStaging(feed.staging, times), _LateTokens(feed.tokens, times))


class _LateStaging:
    def __init__(self, inner: Staging, times: int) -> None:
        self._inner = inner
        self._times = times

    def __call__(self, wide: array[int], narrow: bytearray) -> Numbers:
        first, second = self._inner(wide, narrow)
        return _late(first, self._times), _late(second, self._times)


class _LateTokens(TokenBuffer):
    def __init__(self, inner: TokenBuffer, times: int) -> None:
        self.tokens = inner.tokens
        self._times = times

    def read(self, ids: torch.Tensor, slots: torch.Tensor, all_in_flight: bool) -> torch.Tensor:
        return _late(super().read(ids, slots, all_in_flight), self._times)


_ZEROS: list[torch.Tensor] = []


def _late(made: torch.Tensor, times: int) -> torch.Tensor:
    """The same values after so many delays, in memory that is zero from long before."""
    if len(_ZEROS) == 0:
        _ZEROS.extend(torch.zeros(1 << 16, dtype=torch.int64, device="cuda") for _ in range(400))
        torch.cuda.synchronize()
    memory = _ZEROS.pop().view(made.dtype)[: made.numel()].view(made.shape)
    delay(times)
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
        delay(LONG if work == last else 1)
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
    engine = engine_of(loaded)
    device = torch.device("cuda", torch.cuda.current_device())
    api = Streams(device, without)
    pair = StreamPair(api, api.decode, api.prefill, SerialPair(device))
    engine._steps._isolation._pair = pair
    context = engine._steps._context
    # The prefill is launched last: a host that is slow to launch must not make up for its wait.
    times = LONG if without == ("prefill", "default") else 1
    object.__setattr__(context, "feed", late_feed(context.feed, times))
    begin = context.sampler.begin

    def traced(logits: Any, rows: Sequence[Any], *more: Any) -> Any:
        api.log.append(f"sample on {api.name(torch.cuda.current_stream())}")
        return begin(logits, rows, *more)

    patch.setattr(context.sampler, "begin", traced)
    last = without[1] if without is not None and without[0] == "default" else None
    with late_writes(loaded.runner, patch, last):
        found = texts(engine, PROMPTS, N_TOKENS)
    torch.cuda.synchronize()
    assert engine.metrics.value("prefill_decode_stream_overlap_steps") > 3
    return found, api.log
