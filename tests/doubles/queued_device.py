"""A device that runs behind the host: what it is given waits in a queue until it gets to it.

QueuedRunner is a HashRunner whose forward passes, samples, copies of inputs and KV growth are tasks
of one DeviceQueue, in the order of their launch, as on the streams of a GPU after the joins. What a
task makes is a tensor that holds nonsense until the task has run, so a host that reads it early, or
an input buffer that is filled again too soon, changes the text. The queue advances when the host
waits for a fence, and by as many tasks as `pace` says whenever it is given one. Copies of blocks to
the host and back have a queue of their own, which gets on when the first waits for it.

    runner = QueuedRunner(pace=lambda: 0)                 # as late as the fences allow
    engine = queued_engine(runner, max_num_seqs=8)        # pipeline depth 1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine_actor.core.block_copies import BlockCopy
from engine_actor.core.plan import SampledToken
from engine_actor.engine import Engine
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.pending_sample import PendingSample
from engine_actor.model.runner_protocol import BlockStore
from engine_actor.model.sampler import Sampler, SampleRow
from engine_actor.work.host_copies import Copies, DirectCopies, StreamCopies
from engine_actor.work.inputs import Feed
from engine_actor.work.pair import Attempt, Launched, SerialPair
from engine_actor.work.staging import PinnedStaging
from engine_actor.work.token_buffer import TokenBuffer
from tests.doubles.scripted_runner import HashRunner, make_engine

CPU = torch.device("cpu")
_NONSENSE = -(2**40)
N_SLOTS = 64


class DeviceQueue:
    """Tasks that were launched and have not run."""

    def __init__(self, pace: Callable[[], int] = lambda: 0) -> None:
        self._tasks: deque[Callable[[], object]] = deque()
        self._pace = pace
        self.given = 0
        self.done = 0
        self.eager = False

    def put(self, task: Callable[[], object]) -> None:
        """Launch a task; the device may get on with some of the older ones meanwhile."""
        self._tasks.append(task)
        self.given += 1
        self.run_to(self.given if self.eager else min(self.given, self.done + self._pace()))

    def run_to(self, mark: int) -> None:
        """Let the device get to where `given` was `mark`."""
        while self.done < mark:
            self.done += 1
            self._tasks.popleft()()

    def fence(self) -> QueueFence:
        """This point of the queue."""
        return QueueFence(self, self.given)


class QueueFence:
    """The host's wait for a point of the queue."""

    def __init__(self, queue: DeviceQueue, mark: int) -> None:
        self._queue = queue
        self._mark = mark

    def synchronize(self) -> None:
        self._queue.run_to(self._mark)

    def query(self) -> bool:
        """Whether the device has come here by itself."""
        return self._queue.done >= self._mark


class QueuedStreams:
    """CopyStreams of two queues: the works' and the copies'. `without`: a wait that is left out, as
    (waiter, awaited).
    """

    def __init__(
        self,
        works: DeviceQueue,
        copies: DeviceQueue,
        without: tuple[str, str] | None = None,
    ) -> None:
        self.queues = {"works": works, "copies": copies}
        self.log: list[str] = []
        self._without = without
        self._entered = ["works"]

    def current(self) -> str:
        return self._entered[-1]

    def wait(self, waiter: str, awaited: str) -> None:
        self.log.append(f"{waiter} wait for {awaited}")
        if (waiter, awaited) != self._without:
            queue = self.queues[awaited]
            mark = queue.given
            self.queues[waiter].put(lambda: queue.run_to(mark))

    def record(self, stream: str) -> QueueFence:
        return self.queues[stream].fence()

    @contextmanager
    def entered(self, stream: str) -> Iterator[None]:
        self._entered.append(stream)
        yield
        self._entered.pop()


class QueuedBlocks:
    """Slots on the host whose copies wait in the queue of the stream they are put on."""

    def __init__(self, inner: BlockStore, streams: QueuedStreams) -> None:
        self._inner = inner
        self._streams = streams
        self.nbytes = inner.nbytes
        self.reason = inner.reason

    def copy(self, part: Sequence[BlockCopy]) -> None:
        self._streams.queues[self._streams.current()].put(lambda: self._inner.copy(part))


class QueuedRunner(HashRunner):
    """The hooks are called when a pass is launched: a tensor cannot be looked at there."""

    def __init__(self, pace: Callable[[], int] = lambda: 0, **more: Any) -> None:
        super().__init__(**more)
        self.queue = DeviceQueue(pace)
        self.copy_queue = DeviceQueue(pace)
        self._hidden_device = HashRunner(**more)

    def embed(self, inputs: BatchInputs) -> torch.Tensor:
        self.launches += 1
        return self._later((len(inputs.ids), 2), lambda: self._hidden_device.embed(inputs))

    def run_layers(
        self, hidden: torch.Tensor, inputs: BatchInputs, first: int, last: int
    ) -> torch.Tensor:
        if first == 0:
            self.before_layers(inputs)
        return self._later(
            tuple(hidden.shape),
            lambda: self._hidden_device.run_layers(hidden, inputs, first, last),
        )

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.before_logits(len(rows))
        shape = (len(rows), self.vocab_size)
        return self._later(
            shape, lambda: self._hidden_device.logits(hidden, rows), dtype=torch.float32
        )

    def resize_kv(self, n_blocks: int) -> None:
        if self.max_blocks is not None and n_blocks > self.max_blocks:
            raise MemoryError(f"no memory for {n_blocks} blocks")
        self.queue.put(lambda: self._hidden_device.resize_kv(n_blocks))

    def _later(
        self,
        shape: tuple[int, ...],
        compute: Callable[[], torch.Tensor],
        dtype: torch.dtype = torch.int64,
    ) -> torch.Tensor:
        out = torch.full(shape, _NONSENSE, dtype=dtype)
        self.queue.put(lambda: out.copy_(compute()))
        return self._track(out)


class QueuedSampler(Sampler):
    """Samples when the device gets to it."""

    def __init__(self, queue: DeviceQueue, vocab_size: int, base_seed: int) -> None:
        super().__init__(vocab_size, base_seed)
        self._queue = queue

    def begin(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        token_buffer: torch.Tensor | None = None,
        slots: Sequence[int] = (),
    ) -> PendingSample:
        for row in rows:
            history = len(row.prompt_ids) + len(row.output_ids)
            assert history in (0, row.position), "a token that a penalty reads is not known yet"
        pending = _Pending()
        first_half = super().begin
        self._queue.put(
            lambda: setattr(pending, "made", first_half(logits, rows, token_buffer, slots))
        )
        return pending


class _Pending:
    made: PendingSample | None = None

    def result(self) -> list[SampledToken]:
        assert self.made is not None, "the host reads tokens that are not there yet"
        return self.made.result()


class _QueuedTokens(TokenBuffer):
    def __init__(self, queue: DeviceQueue) -> None:
        super().__init__(CPU, N_SLOTS)
        self._queue = queue

    def read(self, ids: torch.Tensor, slots: torch.Tensor, all_in_flight: bool) -> torch.Tensor:
        out = torch.full((len(ids),), _NONSENSE)
        first_half = super().read
        self._queue.put(lambda: out.copy_(first_half(ids, slots, all_in_flight)))
        return out


class _QueuedStaging(PinnedStaging):
    def __init__(self, queue: DeviceQueue) -> None:
        super().__init__(CPU, queue.fence, pin=False)
        self._queue = queue

    def _send(self, staged: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(staged, 0xEE)
        self._queue.put(lambda: out.copy_(staged))
        return out


class _QueuedPair(SerialPair):
    def __init__(self, queue: DeviceQueue) -> None:
        super().__init__(CPU)
        self._queue = queue

    def fence(self) -> QueueFence:
        return self._queue.fence()

    def finish(self, launched: Launched, attempt: Attempt) -> None:
        """What a finish computes on the device it reads at once, which waits for it."""
        self._queue.eager = True
        super().finish(launched, attempt)
        self._queue.eager = False


def queued_copies(
    runner: QueuedRunner, n_slots: int, without: tuple[str, str] | None = None
) -> Copies:
    """Copies on the device of `runner`, with one wait left out where `without` names it."""
    if not n_slots:
        return DirectCopies(None)
    streams = QueuedStreams(runner.queue, runner.copy_queue, without)
    blocks = QueuedBlocks(runner._hidden_device.host_blocks(n_slots), streams)
    return StreamCopies(blocks, streams, "copies")


def queued_engine(
    runner: QueuedRunner,
    depth: int = 1,
    host_slots: int = 0,
    few_blocks: int = 0,
    without: tuple[str, str] | None = None,
    **settings: Any,
) -> Engine:
    """An engine on the device of `runner`; `settings` as make_engine's."""
    engine = make_engine(
        runner,
        host_slots=host_slots,
        copies=queued_copies(runner, host_slots, without),
        pair=_QueuedPair(runner.queue),
        depth=depth,
        sampler=QueuedSampler(runner.queue, runner.vocab_size, base_seed=7),
        **settings,
    )
    engine.kv.copies.few = few_blocks
    tokens = _QueuedTokens(runner.queue) if depth else None
    feed = Feed(_QueuedStaging(runner.queue), tokens)
    object.__setattr__(engine._steps._context, "feed", feed)
    return engine
