"""`/tokenize` and `/detokenize`: the requests, in the shape other servers made usual."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from serve_app.protocol.chat import MAX_MESSAGES, Message

MAX_TEXT = 1 << 20
"""Characters of one text to count. It takes a core for seconds, and a thread that others wait for.
"""


class TokenizeRequest(BaseModel):
    """Either a text or messages."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = None
    prompt: str | None = Field(None, max_length=MAX_TEXT)
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = None
    tokens: list[Any]

    @field_validator("tokens")
    @classmethod
    def _ids(cls, tokens: list[Any]) -> list[Any]:
        if not all(type(token) is int for token in tokens):
            raise ValueError("token ids must all be integers")
        return tokens
