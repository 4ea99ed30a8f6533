"""A verb that raises ends at most the request that is at fault; everything else goes on.

Out of memory: drop the references, retry smaller, until the guilty sequence is alone or all pass.
Any other exception: the same search, but the lone culprit is not tried again. A device error that
is not about memory is fatal: FatalDeviceError goes through.
Knows works and their verbs; who of several starved sequences must go is the scheduler's to say.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from engine_actor.core.overlap_policy import Sharing
from engine_actor.core.sequence import Key
from engine_actor.errors import FatalDeviceError
from engine_actor.work.base import Work, WorkResult, WorkState, WorkStateError
from engine_actor.work.memory_errors import is_fatal, is_out_of_memory
from engine_actor.work.pair import Launched, Pair, SerialPair
from engine_actor.work.prefill import PrefillWork

LOGGER = logging.getLogger(__name__)
LONE_TRIES = 3
"""A single row that cannot be made smaller is run this often before it counts as starved."""


@dataclass(frozen=True, slots=True)
class Casualty:
    """A sequence that failed alone. `blocks` is what its work needed."""

    key: Key
    error: BaseException
    blocks: int

    @property
    def starved(self) -> bool:
        """True where it failed for want of memory."""
        return is_out_of_memory(self.error)


@dataclass(slots=True)
class Tally:
    """What came of the works of one step."""

    results: list[WorkResult] = field(default_factory=list)
    casualties: list[Casualty] = field(default_factory=list)
    stream_overlap: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    """Launch time by kind of work, failed attempts not counted."""
    retries: int = 0
    put_off: set[Key] = field(default_factory=set)
    """Sequences whose work failed and was not tried again: the next plan takes another way."""
    rerun: set[Key] = field(default_factory=set)
    """Sequences whose result comes from a retry: what was launched behind the first attempt may
    have read something else."""


def release_cached_memory(device: torch.device) -> None:
    """Give freed memory back to the device, so that a smaller retry can have it in one piece. The
    CPU's allocator keeps nothing back."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def _lost_is_fatal() -> Iterator[None]:
    """A device that is lost says so wherever the host next asks it: at a fence, at a retry."""
    try:
        yield
    except FatalDeviceError:
        raise
    except Exception as error:
        if not is_fatal(error):
            raise
        raise FatalDeviceError(f"between the works of a step: {error}") from error


class Isolation:
    """Runs the works of one step through a pair and searches for the culprit of any failure."""

    def __init__(
        self, pair: Pair, serial: SerialPair, reclaim: Callable[[], None] = lambda: None
    ) -> None:
        self._pair = pair
        self._serial = serial
        self._reclaim = reclaim

    @classmethod
    def on(cls, device: torch.device, pair: Pair) -> Isolation:
        """For a pair on a device: retries run one after the other, with what torch keeps of freed
        memory given back first.
        """
        serial = pair if isinstance(pair, SerialPair) else SerialPair(device)
        return cls(pair, serial, partial(release_cached_memory, device))

    def launch(
        self, decode: Work | None, prefill: Work | None, sharing: Sharing | None = None
    ) -> Launched:
        """The first half of a step. What failed is FAILED and waits for finish(). Raises
        FatalDeviceError."""
        with _lost_is_fatal():
            return self._pair.launch(decode, prefill, self._attempt, sharing)

    def finish(self, launched: Launched, void: Callable[[], Set[Key]] = frozenset) -> Tally:
        """The second half, then the smaller retries of what failed in either, without the sequences
        that `void` names: nobody wants theirs any more. Raises FatalDeviceError."""
        with _lost_is_fatal():
            return self._finish(launched, void)

    def _finish(self, launched: Launched, void: Callable[[], Set[Key]]) -> Tally:
        tally = Tally(stream_overlap=launched.overlapped)
        self._pair.finish(launched, self._attempt)
        # Decode before prefill, whatever the order of finish: the retries need the memory in turn.
        for work in sorted(launched.works, key=lambda work: work.kind):
            if work.state is WorkState.DONE:
                self._count(tally, work)
                continue
            wanted = work.without(void())
            if wanted is None:
                continue
            if not wanted.can_be_retried:
                self._reclaim()
                tally.put_off.update(wanted.keys)
                continue
            if wanted is work or not self._alone(tally, wanted):
                self._smaller(tally, wanted)
        return tally

    def run(self, decode: Work | None, prefill: Work | None) -> Tally:
        """Both halves of a step, one after the other."""
        return self.finish(self.launch(decode, prefill))

    def _attempt(self, work: Work, verb: Callable[[], object]) -> bool:
        try:
            verb()
        except (WorkStateError, FatalDeviceError):
            raise
        except Exception as error:
            if is_fatal(error):
                raise FatalDeviceError(f"{work.kind} work {work.number}: {error}") from error
            if not is_out_of_memory(error):
                LOGGER.exception("%s work %d failed", work.kind, work.number)
            # The frames of the traceback hold the activations that the retry needs.
            traceback.clear_frames(error.__traceback__)
            work.fail(error.with_traceback(None))
            return False
        return True

    def _alone(self, tally: Tally, work: Work) -> bool:
        tally.retries += 1
        self._serial.finish(self._serial.launch(work, None, self._attempt), self._attempt)
        if work.state is not WorkState.DONE:
            return False
        self._count(tally, work)
        tally.rerun.update(work.keys)
        return True

    def _smaller(self, tally: Tally, failed: Work) -> None:
        """Retry the halves of a failed work, and their halves; then the single sequence."""
        self._reclaim()
        halves = failed.halves()
        for half in halves:
            if not self._alone(tally, half):
                self._smaller(tally, half)
        if halves:
            return
        if failed.error is not None and not is_out_of_memory(failed.error):
            self._give_up(tally, failed)
        elif isinstance(failed, PrefillWork):
            self._shorter(tally, failed)
        else:
            self._again(tally, failed)

    def _again(self, tally: Tally, failed: Work) -> None:
        for _ in range(LONE_TRIES - 1):
            failed = failed.again()
            if self._alone(tally, failed):
                return
            self._reclaim()
        self._give_up(tally, failed)

    def _shorter(self, tally: Tally, failed: PrefillWork) -> None:
        """One chunk in pieces. Once a size has failed the rest of the chunk stays below it."""
        (chunk,) = failed.chunks
        size, start, tries = max(1, failed.rows // 2), chunk.start, 1
        while start < chunk.end:
            piece = failed.part(start, min(chunk.end, start + size))
            if self._alone(tally, piece):
                start, tries = piece.chunks[0].end, 1
                continue
            self._reclaim()
            tries += 1
            lone = size == 1 and tries > LONE_TRIES
            if lone or (piece.error is not None and not is_out_of_memory(piece.error)):
                self._give_up(tally, failed, piece.error)
                return
            size = max(1, size // 2)

    @staticmethod
    def _give_up(tally: Tally, failed: Work, error: BaseException | None = None) -> None:
        (key,) = failed.keys
        cause = error or failed.error or RuntimeError("failed without an error")
        tally.casualties.append(Casualty(key, cause, failed.blocks_needed))

    @staticmethod
    def _count(tally: Tally, work: Work) -> None:
        if work.result is not None:
            tally.results.append(work.result)
        seconds = work.elapsed()
        if seconds is not None:
            tally.seconds[work.kind] = tally.seconds.get(work.kind, 0.0) + seconds
