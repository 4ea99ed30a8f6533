"""Generation for Python callers (a Serve handle, a script): bodies in, bodies out, as over HTTP.

`generate` gives the very body that HTTP would answer with, `stream` the chunks. Errors are
ApiError, which crosses a process whole.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from serve_app.intake import Accepted, Endpoint, Intake
from serve_app.protocol.bodies import refuse_lone_surrogates
from serve_app.protocol.bounds import PLAIN
from serve_app.protocol.errors import ApiError

log = logging.getLogger("ray.serve")


class PythonFace:
    """The Python door beside the HTTP one; both share the intake and everything behind it."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def generate(self, prompt: Any = None, **parameters: Any) -> dict[str, Any]:
        """A whole answer: `generate("text", max_tokens=8)`, `generate(messages=[...])`, or a whole
        request body as one mapping. Raises ApiError.
        """
        accepted = await self._accept(prompt, parameters, stream=False)
        generation, shape = self._intake.begin(accepted)
        try:
            choices = await generation.results()
            return shape.whole(choices, generation.usage())
        finally:
            generation.close()

    async def stream(self, prompt: Any = None, **parameters: Any) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer, as dicts. Raises ApiError, also between chunks."""
        accepted = await self._accept(prompt, parameters, stream=True)
        generation, shape = self._intake.begin(accepted)
        try:
            first = True
            async with aclosing(generation.deltas()) as batches:
                async for deltas in batches:
                    usage = generation.usage() if generation.job.continuous_usage else None
                    events = shape.opening(usage) if first else b""
                    events += b"".join(shape.event(delta, usage) for delta in deltas)
                    first = False
                    for chunk in _chunks(events):
                        yield chunk
            if generation.job.include_usage:
                for chunk in _chunks(shape.usage_event(generation.usage())):
                    yield chunk
        finally:
            generation.close()

    async def _accept(self, prompt: Any, parameters: dict[str, Any], stream: bool) -> Accepted:
        if isinstance(prompt, Mapping):
            body = {**prompt, **parameters}
        else:
            body = {"prompt": prompt, **parameters}
        if not all(isinstance(name, str) for name in body):
            raise ApiError("invalid_type", "a parameter's name must be a string")
        if body.get("stream") not in (None, stream):
            why = "stream: generate gives whole answers, stream gives streams"
            raise ApiError("invalid_value", why, "stream")
        given = {name for name in ("prompt", "messages") if body.get(name) is not None}
        if len(given) == 2:
            raise ApiError("invalid_value", "prompt and messages exclude each other", "prompt")
        endpoint: Endpoint = "chat" if "messages" in given else "completion"
        # None is as if it were not there, and each endpoint knows only its own of the two.
        body = {name: value for name, value in body.items() if value is not None}
        body = {**as_in_json(body), "stream": stream}
        refuse_lone_surrogates(body)
        wanted = self._intake.parse(endpoint, body)
        if wanted.warning:
            log.warning("a Python caller's request: %s", wanted.warning)
        return await self._intake.accept(wanted)


def as_in_json(body: dict[str, Any]) -> dict[str, Any]:
    """The same with a list for each tuple and text for each integer key, as a client that writes
    JSON would send it. What holds itself goes on doing so. Raises ApiError.
    """
    made: dict[int, Any] = {}

    def of(value: Any) -> Any:
        if not isinstance(value, (list, tuple, dict)):
            return value
        if id(value) in made:
            return made[id(value)]
        if isinstance(value, dict):
            pairs: dict[Any, Any] = {}
            made[id(value)] = pairs
            pairs.update(
                (str(key) if type(key) is int else key, of(one)) for key, one in value.items()
            )
            return pairs
        items: list[Any] = []
        made[id(value)] = items
        # Most are ids, many thousands of them: looked at in C.
        items.extend(value if set(map(type, value)) <= PLAIN else map(of, value))
        return items

    try:
        return {name: of(value) for name, value in body.items()}
    except RecursionError:
        raise ApiError("invalid_value", "The body is nested too deeply") from None


def _chunks(events: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in events.split(b"\n\n") if event]
