"""`/v1/chat/completions`: the request, the response, the chunk."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.protocol.errors import UNSUPPORTED
from serve_app.protocol.fields import SharedRequest

OBJECT = "chat.completion"
CHUNK_OBJECT = "chat.completion.chunk"
MAX_MESSAGES = 4096
OTHER_PARTS = ("image_url", "input_audio", "file", "refusal", "video_url", "audio_url")
"""Types of content that others take."""


class TextPart(BaseModel):
    """One text part of a message; images and sound are refused by the type."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn. Content as a string or as text parts."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_known(cls, message: Any) -> Any:
        """By its name, before the types would complain of a string that is none."""
        if isinstance(message, dict):
            unserved = _unserved(message)
            if unserved:
                raise PydanticCustomError(UNSUPPORTED, f"{unserved} not supported by this server")
        return message

    @property
    def n_characters(self) -> int:
        """Characters of all its text."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(part.text) for part in self.content)


def _unserved(message: dict[str, Any]) -> str | None:
    """What OpenAI's messages may hold and ours may not."""
    if message.get("role") in ("tool", "function"):
        return "messages of tools are"
    for name in ("tool_calls", "function_call", "audio", "prefix", "partial"):
        if message.get(name):
            return f"{name} in a message is"
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") in OTHER_PARTS:
            return f"content of type {part['type']} is"
    return None


class ChatRequest(SharedRequest):
    """OpenAI's chat request, without tools."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)


def choice(
    index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    """One choice of a whole answer."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
