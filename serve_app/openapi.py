"""The OpenAPI page: FastAPI's, plus the request bodies, which our routes read themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_app.protocol.chat import ChatRequest
from serve_app.protocol.completions import CompletionRequest
from serve_app.protocol.tokens import DetokenizeRequest, TokenizeRequest

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_REFERENCE = "#/components/schemas/{model}"


def openapi_page(app: FastAPI) -> dict[str, Any]:
    """The page, made once."""
    if app.openapi_schema is None:
        page = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = models_json_schema(
            [(model, "validation") for model in _BODIES.values()], ref_template=_REFERENCE
        )
        known = page.setdefault("components", {}).setdefault("schemas", {})
        known.update(schemas["$defs"])
        for path, model in _BODIES.items():
            reference = {"$ref": _REFERENCE.format(model=model.__name__)}
            page["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": reference}},
            }
        app.openapi_schema = page
    return app.openapi_schema
