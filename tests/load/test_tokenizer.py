"""The tokenizer of a folder, with transformers' own as the oracle."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, processors
from transformers import PreTrainedTokenizerFast

from engine_actor.core.detok import IncrementalDetokenizer
from engine_actor.errors import CheckpointError
from engine_actor.load.tokenizer import ChatTemplateError, Tokenizer
from tests.doubles.chat_templates import CONVERSATIONS, QWEN_STYLE, TEMPLATES
from tests.doubles.tiny_tokenizers import ALL, BOS, CORPUS, EOS, IM_END, SPECIAL

_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _folder(path: Path, kind: str = "byte_level", **files: Any) -> Path:
    """A folder with tokenizer.json and the given files; a str is text, else JSON."""
    ALL[kind]().save(str(path / "tokenizer.json"))
    for name, content in {"tokenizer_config": _CONFIG, **files}.items():
        if isinstance(content, str):
            (path / "chat_template.jinja").write_text(content, encoding="utf-8")
        else:
            (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", sorted(ALL))
@pytest.mark.parametrize("extra", [{}, {"add_bos_token": True}])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_ids_and_text_equal_transformers(
    tmp_path: Path, kind: str, extra: dict[str, bool], adds_bos: bool
) -> None:
    """Same ids with and without special tokens, same text back, whatever is put in front."""
    folder = _folder(tmp_path, kind, tokenizer_config={**_CONFIG, **extra})
    if adds_bos:
        raw = Raw.from_file(str(folder / "tokenizer.json"))
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
        )
        raw.save(str(folder / "tokenizer.json"))
    ours = Tokenizer.from_folder(folder)
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in (*CORPUS, "", " ", "a  b", "<|im_start|>x<|im_end|>"):
        for special in (True, False):
            ids = ours.encode(text, special)
            assert (BOS in ids) == (special and adds_bos)
            assert ids == oracle.encode(text, add_special_tokens=special)
            for skip in (True, False):
                expected = oracle.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
                assert ours.decode(ids, skip_special=skip) == expected


@pytest.mark.parametrize("kind", sorted(ALL))
@settings(max_examples=100)
@given(text=st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=30))
def test_token_bytes_join_to_the_text(kind: str, text: str) -> None:
    """B-02: each id has its own bytes, spaces included; together they are the text."""
    tokenizer = Tokenizer(ALL[kind]())
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join([tokenizer.token_bytes(token) for token in ids]).decode()
    space = joined[: len(joined) - len(tokenizer.decode(ids, skip_special=False))]
    assert joined == space + tokenizer.decode(ids, skip_special=False)
    assert space in ("", " "), "sentencepiece kinds put one space in front"


def test_token_text_names_broken_bytes() -> None:
    """B-02: part of a character has a name of its own, and words keep their leading space."""
    byte_level, llama = (Tokenizer(ALL[kind]()) for kind in ("byte_level", "llama_like"))
    emoji = llama.encode("🙂", add_special_tokens=False)
    texts = [llama.token_text(token) for token in emoji]
    assert texts == [" ", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x99", r"bytes:\x82"]
    assert llama.token_text(llama.encode("the", False)[0]) == " the"
    assert byte_level.token_text(byte_level.encode("\n", False)[0]) == "\n"
    for tokenizer in (byte_level, llama):
        assert tokenizer.token_text(IM_END) == "<|im_end|>"
        assert tokenizer.token_bytes(10**6) == b""
        assert tokenizer.decode([10**6]) == ""


def test_a_decoder_of_another_kind_still_has_bytes() -> None:
    """An unknown decoder falls back to its own decode()."""
    raw = Raw(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert Tokenizer(raw).token_text(1) == "b"
    raw.decoder = decoders.WordPiece()
    assert Tokenizer(raw).token_text(1) == "b"
    assert Tokenizer(raw).vocab_size == 2


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({}, (EOS,)),
        ({"generation_config": {"eos_token_id": [4, 3]}, "config": {"eos_token_id": 1}}, (2, 3, 4)),
        ({"generation_config": {}, "config": {"eos_token_id": 4}}, (2, 4)),
        ({"tokenizer_config": {}, "config": {"eos_token_id": None}}, ()),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, (IM_END,)),
        ({"tokenizer_config": {}, "special_tokens_map": _CONFIG}, (EOS,)),
    ],
)
def test_every_eos_id_ends_a_text(
    tmp_path: Path, files: dict[str, Any], eos_ids: tuple[int, ...]
) -> None:
    """All ids of generation_config (else of config), and the tokenizer's own eos_token."""
    assert Tokenizer.from_folder(_folder(tmp_path, **files)).eos_ids == eos_ids


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    """A tokenizer.json saved with a training length must not cut prompts silently."""
    raw = ALL["byte_level"]()
    copy = type(raw).from_str(raw.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=50)
    copy.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a long enough text")) == "a long enough text"
    assert tokenizer.vocab_size == raw.get_vocab_size()


def test_lone_surrogates_are_refused() -> None:
    """Half a surrogate pair is no text: a clear error, not a crash inside the tokenizer."""
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        Tokenizer(ALL["byte_level"]()).encode("ab\ud83d")


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("generation", [True, False])
def test_chat_text_equals_transformers(
    tmp_path: Path, name: str, messages: list[dict[str, Any]], generation: bool
) -> None:
    """ChatML of two styles and Llama 3's: same text, and messages are never run as a template."""
    folder = _folder(tmp_path, template=TEMPLATES[name])
    ours = Tokenizer.from_folder(folder).apply_chat_template(messages, generation)
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = oracle.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation
    )
    assert ours == expected
    assert messages[-1]["content"].strip() in ours


def test_template_variables_reach_the_template(tmp_path: Path) -> None:
    """Extra names (enable_thinking, tools) as Hugging Face's templates read them."""
    folder = _folder(tmp_path, template=QWEN_STYLE)
    tokenizer, oracle = (
        Tokenizer.from_folder(folder),
        PreTrainedTokenizerFast.from_pretrained(folder),
    )
    for variables in (
        {"enable_thinking": False},
        {"tools": [{"type": "function", "function": {"name": "<é>", "parameters": {}}}]},
    ):
        ours = tokenizer.apply_chat_template(CONVERSATIONS[0], **variables)
        assert ours == oracle.apply_chat_template(
            CONVERSATIONS[0], tokenize=False, add_generation_prompt=True, **variables
        )


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    """The file wins over the config; of several named templates the default one is taken."""
    named = [{"name": "x", "template": "X"}, {"name": "default", "template": "D"}]
    for template, expected in (("C", "C"), (named, "D")):
        folder = _folder(tmp_path, tokenizer_config={"chat_template": template})
        assert Tokenizer.from_folder(folder).apply_chat_template([]) == expected
    _folder(tmp_path, tokenizer_config={"chat_template": "C"}, template="F")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([]) == "F"


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    """raise_exception, an error inside, an attack on the sandbox and no template at all."""
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, template=QWEN_STYLE))
    with pytest.raises(ChatTemplateError, match="Unexpected message role: robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}])
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ):
        (tmp_path / "chat_template.jinja").write_text(source)
        with pytest.raises(ChatTemplateError):
            Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer(ALL["byte_level"]()).apply_chat_template([])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "tokenizer.json: not found"),
        ("tokenizer.json", "{}", "tokenizer.json: cannot be read"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json: must hold a JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id: '2' is not"),
        ("config.json", '{"eos_token_id": [1, -1]}', "eos_token_id"),
        ("chat_template.jinja", "{% if %}", "chat_template: line 1"),
    ],
)
def test_bad_files_are_refused_in_one_line(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    """What is missing or broken is named, in one line."""
    folder = _folder(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(CheckpointError) as refusal:
        Tokenizer.from_folder(folder)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_the_demo_model_decodes_token_by_token(demo_folder: Path) -> None:
    """B-04: 500 random texts and 200 random id lists of the real SmolLM2 tokenizer."""
    tokenizer = Tokenizer.from_folder(demo_folder)
    oracle = PreTrainedTokenizerFast.from_pretrained(demo_folder)
    draw = random.Random(4)
    words = [word for line in CORPUS for word in line.split(" ")]
    lists = [[draw.randrange(tokenizer.vocab_size) for _ in range(30)] for _ in range(200)]
    for _ in range(500):
        text = draw.choice(["", " ", "\n"]).join(draw.choices(words, k=draw.randrange(12)))
        lists.append(tokenizer.encode(text))
        assert lists[-1] == oracle.encode(text)
        assert tokenizer.decode(lists[-1]) == text
    for ids in lists:
        stream = IncrementalDetokenizer(tokenizer.decode)
        streamed = "".join([stream.add([token]) for token in ids])
        assert (streamed + stream.flush()).rstrip("\ufffd") == tokenizer.decode(ids).rstrip(
            "\ufffd"
        )
    assert tokenizer.eos_ids == (2,)
    messages = CONVERSATIONS[2]
    assert tokenizer.apply_chat_template(messages) == oracle.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_special_tokens_are_named(tmp_path: Path) -> None:
    """The texts a template may write."""
    tokenizer = Tokenizer.from_folder(_folder(tmp_path))
    assert tokenizer.special_tokens == _CONFIG
    assert tokenizer.encode("".join(SPECIAL), False) == [0, BOS, EOS, 3, IM_END]
