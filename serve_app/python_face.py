"""Generation for Python callers (a Serve handle, a script): bodies in, bodies out, as over HTTP.

`generate` gives the very body that HTTP would answer with, `stream` the chunks. Errors are
ApiError, which crosses a process whole.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from serve_app.intake import Accepted, Endpoint, Intake
from serve_app.protocol.bodies import refuse_lone_surrogates
from serve_app.protocol.errors import ApiError


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
            opening = shape.opening()
            async with aclosing(generation.deltas()) as batches:
                async for deltas in batches:
                    usage = generation.usage() if generation.job.continuous_usage else None
                    events = opening + b"".join(shape.event(delta, usage) for delta in deltas)
                    opening = b""
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
        elif prompt is None:
            body = parameters
        else:
            body = {"prompt": prompt, **parameters}
        if "messages" in body and "prompt" in body:
            raise ApiError("invalid_value", "prompt and messages exclude each other", "prompt")
        refuse_lone_surrogates(body)
        endpoint: Endpoint = "chat" if "messages" in body else "completion"
        return await self._intake.accept(self._intake.parse(endpoint, body))


def _chunks(events: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in events.split(b"\n\n") if event]
