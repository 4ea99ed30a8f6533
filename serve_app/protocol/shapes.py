"""Generated text -> OpenAI bodies and SSE events, one shape per endpoint.

An event is made from preformatted parts, because one is made for every token: about a tenth of
what a pydantic model or a whole json.dumps costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Protocol

from serve_app.protocol import chat, completions, logprobs
from serve_app.protocol.logprobs import TokenEntry
from serve_app.protocol.usage import UsageTotals

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


@dataclass(slots=True)
class ChoiceDelta:
    """What is new of one choice. `finish_reason` comes exactly once, with the last delta. Not
    frozen, since one is made for every token and freezing doubles that.
    """

    index: int
    text: str
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """One whole choice."""

    index: int
    text: str
    finish_reason: str
    entries: tuple[TokenEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body of one request says of it. `logprobs`: alternatives asked for, or None."""

    public_id: str
    created: int
    model: str
    n_choices: int
    logprobs: int | None = None
    include_usage: bool = False


class TokenNames(Protocol):
    """How tokens are printed in logprobs."""

    def token_text(self, token: int, /) -> str: ...

    def token_bytes(self, token: int, /) -> bytes: ...


class Shape(Protocol):
    """One endpoint's bodies."""

    def opening(self, usage: UsageTotals | None) -> bytes:
        """Events before any text; maybe none. `usage` only where every chunk carries it."""
        ...

    def event(self, delta: ChoiceDelta, usage: UsageTotals | None) -> bytes:
        """One SSE event. `usage` only where every chunk carries it."""
        ...

    def usage_event(self, usage: UsageTotals) -> bytes:
        """The last chunk before [DONE] where usage was asked for."""
        ...

    def whole(self, choices: Sequence[ChoiceResult], usage: UsageTotals) -> dict[str, Any]:
        """The answer that is not streamed."""
        ...


class _Chunked:
    """The parts of an event that do not change within a request."""

    def __init__(self, envelope: Envelope, object_name: str) -> None:
        self._envelope = envelope
        head = {
            "id": envelope.public_id,
            "object": object_name,
            "created": envelope.created,
            "model": envelope.model,
        }
        self._head = "data: " + _encode(head)[:-1] + ',"choices":['
        self._tail = "]" + (',"usage":null' if envelope.include_usage else "") + "}\n\n"

    def usage_event(self, usage: UsageTotals) -> bytes:
        return f'{self._head}],"usage":{_encode(usage.body())}}}\n\n'.encode()

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _logprobs_text(self, entries: Sequence[TokenEntry]) -> str:
        return "null" if self._envelope.logprobs is None else _encode(self._logprobs(entries))

    def _line(self, choice: str, usage: UsageTotals | None) -> bytes:
        tail = self._tail if usage is None else f'],"usage":{_encode(usage.body())}}}\n\n'
        return (self._head + choice + tail).encode()

    def _answer(
        self, kind: str, choices: list[dict[str, Any]], usage: UsageTotals
    ) -> dict[str, Any]:
        """The whole answer, alike at both endpoints but for its `object` and its choices."""
        return {
            "id": self._envelope.public_id,
            "object": kind,
            "created": self._envelope.created,
            "model": self._envelope.model,
            "choices": choices,
            "usage": usage.body(),
        }


class CompletionShape(_Chunked):
    """`/v1/completions`."""

    def __init__(self, envelope: Envelope, names: TokenNames) -> None:
        super().__init__(envelope, completions.OBJECT)
        self._names = names

    def opening(self, usage: UsageTotals | None) -> bytes:
        return b""

    def event(self, delta: ChoiceDelta, usage: UsageTotals | None) -> bytes:
        return self._line(
            f'{{"index":{delta.index},"text":{encode_basestring(delta.text)},'
            f'"logprobs":{self._logprobs_text(delta.entries)},'
            f'"finish_reason":{_quoted(delta.finish_reason)}}}',
            usage,
        )

    def whole(self, choices: Sequence[ChoiceResult], usage: UsageTotals) -> dict[str, Any]:
        bodies = [
            completions.choice(c.index, c.text, c.finish_reason, self._logprobs(c.entries))
            for c in choices
        ]
        return self._answer(completions.OBJECT, bodies, usage)

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        top = self._envelope.logprobs
        return None if top is None else logprobs.legacy(entries, top, self._names.token_text)


class ChatShape(_Chunked):
    """`/v1/chat/completions`."""

    def __init__(self, envelope: Envelope, names: TokenNames) -> None:
        super().__init__(envelope, chat.CHUNK_OBJECT)
        self._names = names

    def opening(self, usage: UsageTotals | None) -> bytes:
        return b"".join(
            self._line(
                f'{{"index":{index},"delta":{{"role":"assistant","content":"","refusal":null}},'
                '"logprobs":null,"finish_reason":null}',
                usage,
            )
            for index in range(self._envelope.n_choices)
        )

    def event(self, delta: ChoiceDelta, usage: UsageTotals | None) -> bytes:
        content = (
            f'{{"content":{encode_basestring(delta.text)}}}'
            if delta.text or delta.entries
            else "{}"
        )
        return self._line(
            f'{{"index":{delta.index},"delta":{content},'
            f'"logprobs":{self._logprobs_text(delta.entries)},'
            f'"finish_reason":{_quoted(delta.finish_reason)}}}',
            usage,
        )

    def whole(self, choices: Sequence[ChoiceResult], usage: UsageTotals) -> dict[str, Any]:
        bodies = [
            chat.choice(c.index, c.text, c.finish_reason, self._logprobs(c.entries))
            for c in choices
        ]
        return self._answer(chat.OBJECT, bodies, usage)

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        top = self._envelope.logprobs
        if top is None:
            return None
        return logprobs.chat(entries, top, self._names.token_text, self._names.token_bytes)


ShapeFactory = Callable[[Envelope, TokenNames], Shape]


def error_event(body: dict[str, Any]) -> bytes:
    """An error object as an SSE event; ASCII, since its text may quote anything."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _quoted(value: str | None) -> str:
    return "null" if value is None else f'"{value}"'
