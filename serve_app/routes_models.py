"""`/v1/models`, `/tokenize`, `/detokenize`: what the model is and how it reads text."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request

from serve_app.http_body import read_object
from serve_app.intake import Intake
from serve_app.protocol.bodies import parse_model
from serve_app.protocol.convert import require_ids, require_model
from serve_app.protocol.errors import ApiError
from serve_app.protocol.models import model_list
from serve_app.protocol.tokens import DetokenizeRequest, TokenizeRequest


def add_model_routes(app: FastAPI, intake: Intake) -> None:
    """All four routes."""
    max_bytes = intake.http.max_body_mb << 20

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return model_list([await intake.served()])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served = await intake.served()
        require_model(name, served)
        return served.card()

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        wanted = await read_object(request, max_bytes, partial(parse_model, TokenizeRequest))
        served = await intake.served()
        require_model(wanted.model, served)
        if (wanted.prompt is None) == (wanted.messages is None):
            raise ApiError("invalid_value", "prompt: give either prompt or messages", "prompt")
        if wanted.messages is not None:
            ids = (await intake.encode_messages(wanted.messages, served)).ids
        else:
            special = wanted.add_special_tokens is not False
            ids = tuple(await intake.encode_text(wanted.prompt or "", special))
        return {"count": len(ids), "max_model_len": served.max_model_len, "tokens": list(ids)}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        wanted = await read_object(request, max_bytes, partial(parse_model, DetokenizeRequest))
        served = await intake.served()
        require_model(wanted.model, served)
        require_ids(wanted.tokens, served.vocab_size, "tokens")
        return {"prompt": await intake.decode_ids(wanted.tokens)}
