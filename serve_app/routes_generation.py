"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.routing import Match, Route
from starlette.types import Scope

from engine_actor.core.metrics import Metrics
from serve_app.guard import STATE
from serve_app.http_body import read_object
from serve_app.intake import Endpoint, Intake
from serve_app.protocol.bodies import timeout_from_header
from serve_app.sse import GenerationResponse


def add_generation_routes(app: FastAPI, intake: Intake, metrics: Metrics) -> None:
    """Both endpoints. They read raw bytes: FastAPI's own parsing answers 422 in its own shape."""

    async def answer(request: Request, endpoint: Endpoint) -> GenerationResponse:
        timeout_s = timeout_from_header(request.headers.get("x-request-timeout"))
        max_bytes = intake.http.max_body_mb << 20
        parse = partial(intake.parse, endpoint)
        wanted = await read_object(request, max_bytes, parse, intake.turnstile)
        accepted = await intake.accept(wanted, timeout_s, request.scope.get(STATE, ""))
        warning = {"x-warnings": accepted.warning} if accepted.warning else {}
        return GenerationResponse(
            lambda: intake.begin(accepted), accepted.job.stream, intake.http, metrics, warning
        )

    async def completions(request: Request) -> Any:
        """Continue a prompt."""
        return await answer(request, "completion")

    async def chat_completions(request: Request) -> Any:
        """Answer a conversation, rendered by the tokenizer's own template."""
        return await answer(request, "chat")

    for path, handler in (
        ("/v1/completions", completions),
        ("/v1/chat/completions", chat_completions),
    ):
        app.router.routes.append(_PlainRoute(path, handler, methods=["POST"]))
        # For the page that describes the API; the one before it answers.
        app.add_api_route(path, handler, methods=["POST"], response_model=None)


class _PlainRoute(Route):
    """Calls its handler as it is: FastAPI's dependencies, of which there are none, cost a tenth of
    the way in."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As FastAPI's, which tells the scope (Guard counts by it)."""
        match, found = super().matches(scope)
        return match, {**found, "route": self}
