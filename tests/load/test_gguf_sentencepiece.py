"""Sentencepiece vocabularies of GGUF files, against its rule written out: join what scores highest.

The same code was once held against the sentencepiece library itself on 3000 lines: all equal but
the one that spells a control token, which is that token here as in transformers.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.errors import CheckpointError
from engine_actor.load.tokenizer import Tokenizer

SPACE = "\u2581"
WORDS = "th he the in ▁t ▁the ▁th er ▁a re ▁▁ ▁▁▁▁ he▁ ll el hell hello ▁hello lo".split(" ")
LETTERS = [SPACE, *"abehilnortw,.é"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *WORDS, *LETTERS]
TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(WORDS) + len(LETTERS))]
SCORES = [0.0] * 259 + [float(-rank) for rank in range(len(WORDS) + len(LETTERS))]


def _write(path: Path, **changes: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores(changes.get("scores", SCORES))
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if changes.get("unknown", True):
        writer.add_unk_token_id(0)
    if "bos" in changes:
        writer.add_add_bos_token(bool(changes["bos"]))
    if "prefix" in changes:
        writer.add_add_space_prefix(bool(changes["prefix"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(_write(tmp_path_factory.mktemp("sp") / "model.gguf"))


def _by_the_rule(text: str) -> list[int]:
    pieces = list(SPACE + text.replace(" ", SPACE)) if text else []
    rows = zip(TOKENS, SCORES, TYPES, strict=True)
    normal = {token: score for token, score, kind in rows if kind == 1}
    while True:
        scored = [
            (normal[a + b], -at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in normal
        ]
        if not scored:
            break
        at = -max(scored)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids: list[int] = []
    for piece in pieces:
        if piece in normal:
            ids.append(TOKENS.index(piece))
        else:
            ids += [3 + value for value in piece.encode()]
    return ids


@given(text=st.text(alphabet=" " * 3 + "abehilnortw,.é日🙂\n", max_size=30))
def test_every_text_is_joined_by_score(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == [1, *_by_the_rule(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)[1:]]
    assert b"".join(pieces) == (b" " if text else b"") + text.encode()


def test_golden_text(tokenizer: Tokenizer) -> None:
    assert [TOKENS[token] for token in tokenizer.encode("the hello")] == ["<s>", "▁the", "▁hello"]
    spelt = [TOKENS[token] for token in tokenizer.encode("日")]
    assert spelt == ["<s>", "▁", "<0xE6>", "<0x97>", "<0xA5>"]
    assert tokenizer.eos_ids == (2,)


def test_bos_and_the_leading_space_as_the_file_says(tmp_path: Path) -> None:
    plain = Tokenizer.from_folder(_write(tmp_path / "model.gguf", bos=False, prefix=False))
    assert [TOKENS[token] for token in plain.encode("the in")] == ["the", "▁", "in"]
    assert plain.decode(plain.encode(" the")) == " the"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": SCORES[1:]}, "tokenizer.ggml.scores: must have one number per token"),
        ({"unknown": False}, "tokenizer.ggml.tokens: has no unknown token"),
    ],
)
def test_a_vocabulary_that_is_not_whole(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = _write(tmp_path / "model.gguf", **changes)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(path)
    assert str(caught.value).startswith(message)
