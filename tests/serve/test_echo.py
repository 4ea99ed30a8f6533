"""Where the tokens of an echoed prompt begin in it, with real tokenizers that write more than the
prompt: a bos token, a space in front, an eos token behind. F-07, F-08.
"""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import processors

from engine_actor.load.tokenizer import Tokenizer
from serve_app.echo import Echo
from serve_app.protocol.job import EncodedPrompt
from tests.doubles.tiny_tokenizers import ALL, BOS, EOS

TEXTS = ("The capital é of", " hi", "  two", "a", "你好 is", "x" * 60)


def tokenizer_of(name: str, template: str) -> Tokenizer:
    raw = RawTokenizer.from_str(ALL[name]().to_str())
    raw.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return Tokenizer(raw)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("text", TEXTS)
def test_offsets_are_those_of_the_prompts_own_text(name: str, template: str, text: str) -> None:
    tokenizer = tokenizer_of(name, template)
    ids = tokenizer.encode(text)
    entries = Echo(EncodedPrompt(tuple(ids), text), True, tokenizer).entries()
    offsets = [entry.offset for entry in entries]
    assert [entry.token for entry in entries] == ids
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    end = len(text)
    if template.endswith("</s>"):
        assert offsets[-1] == end
    own = 1 if template.startswith("<s>") else 0
    for token, offset in zip(ids[own:], offsets[own:], strict=True):
        shown = tokenizer.token_text(token)
        if shown.startswith("bytes:") or token == EOS:
            continue
        # What the tokenizer put in front is no part of the text: a space of the first token.
        assert text.startswith((shown, shown.lstrip(" ")), offset), (shown, offset)


def test_a_text_like_the_end_of_what_stands_in_front() -> None:
    tokenizer = tokenizer_of("byte_level", "<s> $A")
    ids = tokenizer.encode("s>")
    entries = Echo(EncodedPrompt(tuple(ids), "s>"), True, tokenizer).entries()
    assert [(tokenizer.token_text(e.token), e.offset) for e in entries] == [
        ("<s>", 0), ("s", 0), (">", 1),
    ]  # fmt: skip


def test_ids_are_echoed_as_they_are_written_out() -> None:
    tokenizer = tokenizer_of("byte_level", "<s> $A")
    ids = tuple(tokenizer.encode("a b"))
    echo = Echo(EncodedPrompt(ids, tokenizer.decode(ids, skip_special=False)), True, tokenizer)
    assert echo.text == "<s>a b"
    assert [entry.offset for entry in echo.entries()] == [0, 3, 4, 5][: len(ids)]
