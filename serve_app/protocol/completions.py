"""`/v1/completions`: the request, the response, the chunk."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from serve_app.protocol.fields import MAX_CHOICES, SharedRequest

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16
OBJECT = "text_completion"

PromptItem = str | tuple[int, ...]


class CompletionRequest(SharedRequest):
    """OpenAI's completion request; `prompt` in all four forms."""

    prompt: str | list[Any]
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)

    @field_validator("prompt")
    @classmethod
    def _one_of_four_forms(cls, prompt: str | list[Any]) -> str | list[Any]:
        split_prompt(prompt)
        return prompt

    def prompts(self) -> tuple[PromptItem, ...]:
        """The prompts in order, each a text or a tuple of ids."""
        return split_prompt(self.prompt)


def split_prompt(prompt: str | list[Any]) -> tuple[PromptItem, ...]:
    """A string, a list of strings, ids, or a list of id lists -> prompts. Raises ValueError."""
    if isinstance(prompt, str):
        return (_require_text(prompt),)
    if not prompt:
        raise ValueError("must not be empty")
    first = type(prompt[0])
    if first is int:
        return (_require_ids(prompt),)
    if len(prompt) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts, got {len(prompt)}")
    if first is str and all(type(item) is str for item in prompt):
        return tuple(_require_text(item) for item in prompt)
    if first is list and all(type(item) is list for item in prompt):
        return tuple(_require_ids(item) for item in prompt)
    raise ValueError("must be a string, a list of strings, token ids, or a list of id lists")


def _require_text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _require_ids(ids: list[Any]) -> tuple[int, ...]:
    if not ids:
        raise ValueError("must not be empty")
    if set(map(type, ids)) != {int}:  # in C: a prompt may have a hundred thousand
        raise ValueError("token ids must all be integers")
    return tuple(ids)


def choice(
    index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    """One choice, of an answer or of a chunk."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
