"""`/v1/models`, `/tokenize`, `/detokenize`: what the model is and how it reads text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from serve_app.http_body import read_object
from serve_app.intake import Intake
from serve_app.protocol import unsupported
from serve_app.protocol.convert import require_ids, require_model
from serve_app.protocol.errors import ApiError
from serve_app.protocol.models import model_list
from serve_app.protocol.tokens import DetokenizeRequest, TokenizeRequest

B = TypeVar("B", bound=BaseModel)


def add_model_routes(app: FastAPI, intake: Intake) -> None:
    """All four routes."""
    max_bytes = intake.http.max_body_mb << 20

    async def read(
        request: Request, response: Response, kind: type[B], table: Mapping[str, tuple[Any, ...]]
    ) -> B:
        """The body as a `kind`; what is to be told of its parameters goes into the response."""
        parse = partial(intake.parse_as, kind, table)
        wanted, warning = await read_object(request, max_bytes, parse)
        if warning:
            response.headers["x-warnings"] = warning
        return wanted

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return model_list([await intake.served()])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served = await intake.served()
        require_model(name, served)
        return served.card()

    @app.post("/tokenize")
    async def tokenize(request: Request, response: Response) -> dict[str, Any]:
        wanted = await read(request, response, TokenizeRequest, unsupported.TOKENIZE)
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
    async def detokenize(request: Request, response: Response) -> dict[str, Any]:
        wanted = await read(request, response, DetokenizeRequest, unsupported.DETOKENIZE)
        served = await intake.served()
        require_model(wanted.model, served)
        require_ids(wanted.tokens, served.vocab_size, "tokens")
        return {"prompt": await intake.decode_ids(wanted.tokens)}
