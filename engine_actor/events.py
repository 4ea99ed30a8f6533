"""What the clients hear of a step, gathered per client until the loop takes it.

Knows sequences and flags; knows no wire and no sequence numbers (subscribers.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine_actor.core.sequence import FinishReason, Sequence
from engine_actor.messages import Extra, Flag, Load, Usage

_FLAGS = {
    FinishReason.STOP: Flag.STOP,
    FinishReason.LENGTH: Flag.LENGTH,
    FinishReason.CANCELLED: Flag.CANCELLED,
    FinishReason.ERROR: Flag.ERROR,
    FinishReason.OOM: Flag.OOM,
}
NO_EXTRA = Extra()
NO_LOAD = Load()


@dataclass(slots=True)
class SequenceEvent:
    """New tokens of one sequence, and its end where `flag` is not RUNNING."""

    rid: int
    tokens: tuple[int, ...] = ()
    flag: Flag = Flag.RUNNING
    extra: Extra = NO_EXTRA


@dataclass(slots=True)
class StepEvents:
    """Everything since the last take, for all clients. At most one event per sequence."""

    by_client: dict[str, list[SequenceEvent]] = field(default_factory=dict)
    kv_added: tuple[bytes, ...] = ()
    kv_evicted: tuple[bytes, ...] = ()
    load: Load = NO_LOAD


class EventLog:
    """Gathers events. Several of one sequence between two takes become one, in order."""

    def __init__(self) -> None:
        self._by_client: dict[str, dict[int, SequenceEvent]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def add(self, client: str, rid: int, tokens: tuple[int, ...], extra: Extra = NO_EXTRA) -> None:
        """New tokens, or an extra alone (prompt logprobs before the first token)."""
        event = self._event(client, rid)
        event.tokens += tokens
        if extra is not NO_EXTRA:
            event.extra = _merged(event.extra, extra)

    def flag(self, client: str, rid: int, flag: Flag) -> None:
        """A change of state without an end: REQUEUED."""
        self._event(client, rid).flag = flag

    def end(
        self,
        seq: Sequence,
        reason: FinishReason,
        code: str | None = None,
        stop_token: int | None = None,
        blocks: tuple[int, int] = (0, 0),
    ) -> None:
        """The one end of a sequence. `blocks`: needed and free, where memory was short."""
        client, rid = seq.key
        event = self._event(client, rid)
        event.flag = _FLAGS[reason]
        event.extra = replace(
            event.extra,
            usage=Usage(seq.n_prompt, seq.n_output, seq.n_cached),
            stop_token=stop_token,
            error_code=code,
            blocks_needed=blocks[0],
            blocks_free=blocks[1],
        )

    def refuse(self, client: str, rid: int, flag: Flag, code: str) -> None:
        """The end of a request that never became a sequence."""
        event = self._event(client, rid)
        event.flag = flag
        event.extra = replace(event.extra, error_code=code)

    def drop_client(self, client: str) -> None:
        """Forget what nobody will read."""
        self._by_client.pop(client, None)

    def take(self) -> dict[str, list[SequenceEvent]]:
        """Everything gathered, by client; the log is empty afterwards."""
        taken = {client: list(events.values()) for client, events in self._by_client.items()}
        self._by_client.clear()
        return taken

    def _event(self, client: str, rid: int) -> SequenceEvent:
        events = self._by_client.setdefault(client, {})
        event = events.get(rid)
        if event is None:
            event = events[rid] = SequenceEvent(rid)
        return event


def _merged(first: Extra, second: Extra) -> Extra:
    """Both extras of one sequence: logprobs follow each other, the prompt's as well."""
    if first is NO_EXTRA:
        return second
    return replace(
        first,
        logprobs=first.logprobs + second.logprobs,
        prompt_start=first.prompt_start if first.prompt_logprobs else second.prompt_start,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
    )
