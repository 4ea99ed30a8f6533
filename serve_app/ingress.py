"""The HTTP API as an ASGI app, without Ray: what Serve wraps and what tests call in process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from configs.schema import HttpConfig
from engine_actor.core.metrics import Metrics
from serve_app import __version__
from serve_app.engine_link import EngineLink
from serve_app.engine_links import EngineLinks
from serve_app.guard import Guard
from serve_app.http_body import error_response
from serve_app.ingress_metrics import ingress_metrics
from serve_app.intake import Facts, Intake, ServingTokenizer
from serve_app.openapi import openapi_page
from serve_app.protocol.errors import ApiError
from serve_app.routes_generation import add_generation_routes
from serve_app.routes_models import add_model_routes
from serve_app.routes_operation import add_operation_routes

_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def build_api(
    links: EngineLink | EngineLinks,
    tokenizer: ServingTokenizer,
    facts: Facts | None = None,
    http: HttpConfig | None = None,
    metrics: Metrics | None = None,
    run_link: bool = False,
    adds_id: bool = True,
) -> FastAPI:
    """The whole API over one engine link, or several. With `run_link` they live as long as the app
    does (ASGI lifespan), else the caller starts and stops them. adds_id: as Guard's.
    """
    if isinstance(links, EngineLink):
        links = EngineLinks(links)
    metrics = metrics or ingress_metrics()
    intake = Intake(links, tokenizer, facts or Facts(), http or HttpConfig())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if run_link:
            links.start()
        try:
            yield
        finally:
            if run_link:
                await links.stop()

    app = FastAPI(
        title="DeepInfer-SM86", version=__version__, redirect_slashes=False, lifespan=lifespan
    )
    app.state.intake = intake
    add_generation_routes(app, intake, metrics)
    add_model_routes(app, intake)
    add_operation_routes(app, intake, metrics)
    app.openapi = lambda: openapi_page(app)  # type: ignore[method-assign]
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Guard, metrics=metrics, adds_id=adds_id)
    return app


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error.before_first_byte())


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself raises, in OpenAI's shape, its Allow header kept."""
    assert isinstance(error, HTTPException)
    code = _OF_STATUS.get(error.status_code)
    if code is None:
        code = "internal_error" if error.status_code >= 500 else "invalid_value"
    if code in ("not_found", "method_not_allowed"):
        method, path = request.method[:16], request.url.path[:256]
        verb = "no such route" if code == "not_found" else "method not allowed"
        response = error_response(ApiError(code, f"{verb}: {method} {path}"))
    else:
        response = error_response(ApiError(code))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response
