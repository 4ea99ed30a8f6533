"""Chat messages to prompt text, through the tokenizer's own template.

Knows no HTTP. Text only: a part of any other type is refused by the place it stands at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from engine_actor.core.params import InvalidParam
from engine_actor.load.chat_template import ChatTemplateError as ChatTemplateError


class ChatTokenizer(Protocol):
    """What a chat prompt needs of a tokenizer."""

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str: ...


def chat_prompt(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The prompt text of OpenAI-shaped messages. Encode it without special tokens: the template
    writes them itself. `variables` are extra names for the template (enable_thinking, ...).

    Raises InvalidParam naming `messages` or the part of it that cannot be used, also where the
    template itself refuses (an unknown role, a wrong order of turns).
    """
    if not messages:
        raise InvalidParam("messages", "must hold at least one message")
    turns = [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]
    try:
        return tokenizer.apply_chat_template(turns, add_generation_prompt, **variables)
    except ChatTemplateError as error:
        raise InvalidParam("messages", str(error)) from None


def _turn(message: Mapping[str, Any], where: str) -> dict[str, str]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParam(f"{where}.role", "must be a non-empty string")
    # OpenAI's newer word for `system`, which is the one that templates know.
    turn = {"role": "system" if role == "developer" else role}
    if message.get("tool_calls"):
        raise InvalidParam(f"{where}.tool_calls", "tools are not supported")
    if isinstance(name := message.get("name"), str):
        turn["name"] = name
    turn["content"] = _text(message.get("content"), f"{where}.content")
    return turn


def _text(content: object, where: str) -> str:
    """A string as it is; text parts joined without anything between, as templates that walk over
    parts write them.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParam(where, "must be a string or a list of text parts")
    pieces: list[str] = []
    for index, part in enumerate(content):
        here = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidParam(f"{here}.type", f"only text parts are supported, got {kind!r}")
        if not isinstance(text := part.get("text"), str):
            raise InvalidParam(f"{here}.text", "must be a string")
        pieces.append(text)
    return "".join(pieces)
