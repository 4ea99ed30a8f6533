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
        accepted = await self._accept(prompt, {**parameters, "stream": False})
        generation, shape = self._intake.begin(accepted)
        try:
            choices = await generation.results()
            return shape.whole(choices, generation.usage())
        finally:
            generation.close()

    async def stream(self, prompt: Any = None, **parameters: Any) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer, as dicts. Raises ApiError, also between chunks."""
        accepted = await self._accept(prompt, {**parameters, "stream": True})
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

    async def _accept(self, prompt: Any, parameters: dict[str, Any]) -> Accepted:
        if isinstance(prompt, Mapping):
            body = {**prompt, **parameters}
        else:
            body = {"prompt": prompt, **parameters}
        if not all(isinstance(name, str) for name in body):
            raise ApiError("invalid_type", "a parameter's name must be a string")
        given = {name for name in ("prompt", "messages") if body.get(name) is not None}
        if len(given) == 2:
            raise ApiError("invalid_value", "prompt and messages exclude each other", "prompt")
        endpoint: Endpoint = "chat" if "messages" in given else "completion"
        # None is as if it were not there, and each endpoint knows only its own of the two.
        body = {name: value for name, value in body.items() if value is not None}
        refuse_lone_surrogates(body)
        wanted = self._intake.parse(endpoint, body)
        if wanted.warning:
            log.warning("a Python caller's request: %s", wanted.warning)
        return await self._intake.accept(wanted)


def _chunks(events: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in events.split(b"\n\n") if event]
