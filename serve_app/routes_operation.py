"""Health, metrics, status and cancel: for operators and their tools."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

from engine_actor.core.metrics import Metrics
from serve_app.http_body import error_response
from serve_app.intake import Intake
from serve_app.protocol.errors import ApiError
from serve_app.public_id import parse_public_id

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def add_operation_routes(app: FastAPI, intake: Intake, metrics: Metrics) -> None:
    """All operation routes."""
    link = intake.link

    @app.get("/health/live", response_model=None)
    async def live() -> dict[str, Any]:
        """This process answers."""
        return {"status": "live"}

    async def ready() -> Response | dict[str, Any]:
        """A request would be served now: attached, not draining, and the engine answers."""
        if link.ready:
            return {"status": "ready"}
        reason = "draining" if link.draining else "the engine does not answer"
        return error_response(ApiError("unavailable", f"not ready: {reason}"))

    app.add_api_route("/health/ready", ready, methods=["GET"], response_model=None)
    app.add_api_route("/health", ready, methods=["GET"], response_model=None)

    @app.get("/metrics", response_model=None)
    async def metrics_page() -> Response:
        """The engine's metrics, where it is up, and this ingress's."""
        metrics.set("ingress_live_sequences", link.live)
        metrics.set("ingress_engine_restarts", link.restarts)
        try:
            engine = await link.metrics_text()
        except ApiError:
            engine = ""
        return PlainTextResponse(engine + metrics.text(), media_type=PROMETHEUS)

    @app.get("/v1/status", response_model=None)
    async def status() -> dict[str, Any]:
        """The engine's status() and what this ingress knows."""
        engine = await link.status()
        ingress = {
            "client": link.client,
            "live_sequences": link.live,
            "max_sequences": intake.facts.max_sequences,
            "engine_restarts": link.restarts,
            "draining": link.draining,
        }
        return {**engine, "ingress": ingress}

    @app.post("/v1/requests/{public_id}/cancel", response_model=None)
    async def cancel(public_id: str) -> dict[str, Any]:
        """End a request by the id its answer carries, whichever ingress it came through."""
        parsed = parse_public_id(public_id)
        if parsed is None or not link.cancel_public(*parsed):
            raise ApiError("request_not_found")
        return {"id": public_id, "object": "request.cancel", "status": "cancelling"}
