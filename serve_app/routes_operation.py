"""Health, metrics, status and cancel: for operators and their tools."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

from engine_actor.core.metrics import Metrics
from serve_app.engine_link import EngineLink
from serve_app.http_body import error_response
from serve_app.intake import Intake
from serve_app.metrics_page import metrics_of
from serve_app.protocol.errors import ApiError

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def add_operation_routes(app: FastAPI, intake: Intake, metrics: Metrics) -> None:
    """All operation routes."""
    links = intake.links

    @app.get("/health/live", response_model=None)
    async def live() -> dict[str, Any]:
        """This process answers."""
        return {"status": "live"}

    async def ready() -> Response | dict[str, Any]:
        """A request would be served now."""
        reason = await _why_not_ready(links.pick())
        if reason is None:
            return {"status": "ready"}
        return error_response(ApiError("unavailable", f"not ready: {reason}"))

    app.add_api_route("/health/ready", ready, methods=["GET"], response_model=None)
    app.add_api_route("/health", ready, methods=["GET"], response_model=None)

    @app.get("/metrics", response_model=None)
    async def metrics_page() -> Response:
        """The metrics of every engine that is up, and this ingress's."""
        metrics.set("ingress_live_sequences", links.live)
        metrics.set("ingress_engine_restarts", links.restarts)
        page = await metrics_of(links, metrics.text())
        return PlainTextResponse(page, media_type=PROMETHEUS)

    @app.get("/v1/status", response_model=None)
    async def status() -> dict[str, Any]:
        """The engine's status() and what this ingress knows."""
        link = links.pick()
        engine = await link.status()
        ingress = {
            "client": links.home.client,
            "live_sequences": links.live,
            "max_sequences": intake.facts.max_sequences,
            "engine_restarts": links.restarts,
            "carrier": link.carrier,
            "draining": links.draining,
        }
        return {**engine, "ingress": ingress}

    @app.post("/v1/requests/{public_id}/cancel", response_model=None)
    async def cancel(public_id: str) -> dict[str, Any]:
        """End a request by the id its answer carries, whichever ingress or engine it runs on."""
        await links.cancel(public_id)
        return {"id": public_id, "object": "request.cancel", "status": "cancelling"}


async def _why_not_ready(link: EngineLink) -> str | None:
    """None where we are attached, nobody drains, and the engine's own thread answers between two of
    its steps. An answered beat alone would not show a thread that is stuck.
    """
    silent = "the engine does not answer"
    if link.draining:
        return "draining"
    if not link.ready:
        return silent
    try:
        status = await link.status()
    except ApiError:
        return silent
    return "draining" if status.get("draining") else None
