"""Messages to prompt text: content in both shapes, refusals by place, the template's own word."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actor.core.params import InvalidParam
from engine_actor.load.chat_template import ChatTemplate
from engine_actor.load.tokenizer import Tokenizer
from serve_app.chat import chat_prompt
from tests.doubles.chat_templates import CONVERSATIONS, QWEN_STYLE, SMOLLM_STYLE
from tests.doubles.tiny_tokenizers import byte_level


def _tokenizer(source: str | None = QWEN_STYLE) -> Tokenizer:
    template = None if source is None else ChatTemplate(source, {})
    return Tokenizer(byte_level(), chat_template=template)


def test_prompt_text() -> None:
    """The whole text, word for word; the prompt ends where the answer begins."""
    assert chat_prompt(_tokenizer(SMOLLM_STYLE), CONVERSATIONS[0]) == (
        "<|im_start|>system\nYou are kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat_prompt(_tokenizer(), CONVERSATIONS[0], enable_thinking=False).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert not chat_prompt(_tokenizer(), CONVERSATIONS[0], False).endswith("assistant\n")


def test_text_parts_and_the_newer_word_for_system() -> None:
    """A list of text parts is the same as their text; `developer` is `system`."""
    plain = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "ab"},
    ]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"], "name": "n"},
    ]
    assert chat_prompt(_tokenizer(), parts) == chat_prompt(_tokenizer(), plain)


@pytest.mark.parametrize(
    ("message", "name", "words"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[1].content[0].type",
            "image_url",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "string"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0].type", "text parts"),
        ({"role": "user", "content": None}, "messages[1].content", "text parts"),
        ({"role": "user"}, "messages[1].content", "text parts"),
        ({"content": "x"}, "messages[1].role", "string"),
        ({"role": "", "content": "x"}, "messages[1].role", "string"),
        ({"role": "robot", "content": "x"}, "messages", "Unexpected message role: robot"),
        ({"role": "system", "content": "x"}, "messages", "at the beginning"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{}]},
            "messages[1].tool_calls",
            "not supported",
        ),
    ],
)
def test_what_cannot_be_used_is_named(message: dict[str, Any], name: str, words: str) -> None:
    """Images, wrong types, unknown roles and a wrong order: a named parameter, never a crash."""
    with pytest.raises(InvalidParam, match=words) as refusal:
        chat_prompt(_tokenizer(), [{"role": "user", "content": "a"}, message])
    assert refusal.value.name == name


def test_no_messages_and_no_template() -> None:
    """An empty list, and a model that is not made for chat."""
    with pytest.raises(InvalidParam, match="at least one message"):
        chat_prompt(_tokenizer(), [])
    with pytest.raises(InvalidParam, match="no chat template"):
        chat_prompt(_tokenizer(None), CONVERSATIONS[0])
