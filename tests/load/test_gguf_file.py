"""A GGUF file as a checkpoint of its own: families, mixed types, its tokenizer, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from engine_actor.errors import CheckpointError
from engine_actor.load import source
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.names import gguf_name
from engine_actor.load.tokenizer import Tokenizer
from engine_actor.model.rope_config import RopeScaling, inverse_frequencies
from engine_actor.ops import DenseLinear, PackedLinear
from tests.load.gguf_maker import HEADS, HIDDEN, KV_HEADS, MERGES, TOKENS, VOCAB, write_gguf
from tests.load.oracle import dequantise

Type = gguf.GGMLQuantizationType
PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def _expected(path: Path, name: str, is_interleaved: bool) -> np.ndarray:
    """The fp32 matrix by the gguf package, q and k in Hugging Face's row order."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    at, _, leaf = name.rpartition(".")
    matrices = []
    for part in PARTS.get(leaf, (leaf,)):
        tensor = tensors[gguf_name(f"{at}.{part}" if at else part) + ".weight"]
        matrix = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if is_interleaved and part in ("q", "k"):
            heads = HEADS if part == "q" else KV_HEADS
            by_head = matrix.reshape(heads, -1, 2, matrix.shape[1])
            matrix = by_head.swapaxes(1, 2).reshape(matrix.shape)
        matrices.append(matrix)
    return np.concatenate(matrices)


def _assert_file_equals(path: Path, is_interleaved: bool) -> dict[str, Any]:
    weights = dict(open_checkpoint(path).weights())
    for name, weight in weights.items():
        value = dequantise(weight) if isinstance(weight, PackedLinear) else weight
        value = value.weight.float() if isinstance(value, DenseLinear) else value
        assert np.array_equal(np.asarray(value), _expected(path, name, is_interleaved)), name
    return weights


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_family_is_read_from_the_file_itself(tmp_path: Path, architecture: str) -> None:
    """Only the llama architecture has its q and k rows reordered."""
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture)
    weights = _assert_file_equals(path, is_interleaved=architecture == "llama")
    opened = open_checkpoint(path)
    assert opened.config.family == architecture
    assert str(opened.quantisation) == "gguf Q4_1 Q8_0: 8 x W4 group 32, 1 x W8 group 32"
    assert opened.usable_vocab_size() == VOCAB
    assert opened.eos_token_ids == {0, 2}
    bias = weights["layers.0.qkv"].bias
    if architecture == "qwen2":
        lines = [torch.linspace(-1, 1, n) for n in (HIDDEN, 32, 32)]
        assert torch.allclose(bias, torch.cat(lines), atol=1e-6)
    else:
        assert bias is None


def test_mixed_types_stay_parts(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    kinds = {
        "attn_v": Type.Q5_0,
        "ffn_up": Type.Q4_0,
        "ffn_down": Type.Q5_1,
        "attn_output": Type.BF16,
    }
    write_gguf(path, kinds=kinds)
    weights = _assert_file_equals(path, is_interleaved=True)
    assert {"layers.0.q", "layers.0.k", "layers.0.v", "layers.0.gate", "layers.0.up"} <= set(
        weights
    )
    assert isinstance(weights["layers.0.o"], DenseLinear)
    assert open_checkpoint(path).quantisation.kinds[0] == (4, 32, 6)


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    inside, alone = open_checkpoint(tmp_path), open_checkpoint(tmp_path / "model.gguf")
    assert inside.fingerprint == alone.fingerprint
    assert Tokenizer.from_folder(tmp_path).vocab_size == VOCAB
    write_gguf(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files \(model\.gguf, \.\.\.\); give"):
        open_checkpoint(tmp_path)


def test_a_file_that_changes_after_the_check_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    opened = open_checkpoint(path)
    write_gguf(path, tied=False)
    with pytest.raises(CheckpointError, match=r"^model\.gguf: was changed since it was checked$"):
        next(opened.weights())


def test_llama3s_factors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    scaling = RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    pairs = [inverse_frequencies(10000.0, HIDDEN // HEADS, s) for s in (None, scaling)]
    factors = [plain / scaled for plain, scaled in zip(*pairs, strict=True)]
    write_gguf(path, rope_freqs=factors)
    assert open_checkpoint(path).config.rope_scaling == scaling
    write_gguf(path, rope_freqs=[*factors[:-1], 3.0])
    with pytest.raises(CheckpointError, match=r"^rope_freqs\.weight: its factors are not those of"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"split.count": 3}, "model.gguf: is one of 3 parts but not named so"),
        ({"llama.expert_count": 8}, "llama.expert_count: unknown key"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type: 'yarn' cannot be read"),
        ({"tokenizer.ggml.eot_token_id": VOCAB}, f"tokenizer.ggml.eot_token_id: {VOCAB} is not"),
    ],
)
def test_what_a_file_asks_for_and_we_cannot_do(
    tmp_path: Path, metadata: dict[str, int | str], message: str
) -> None:
    write_gguf(tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "model.gguf")
    assert str(caught.value).startswith(message)


TEXTS = [
    "the  thethe\n\n then 12345 it's IT'S we'll!? \t tab",
    "naïve cafe\u0301 日本語 123 🙂\r\n   x = 3.14;",
    "<|im_start|>user\nthe <|im_end|> the",
]


@pytest.mark.parametrize("text", TEXTS)
def test_qwens_splitter_is_transformers_own(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen2", pre="qwen2")
    oracle = transformers.Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(TOKENS)},
        merges=[tuple(merge.split(" ")) for merge in MERGES],
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    assert Tokenizer.from_folder(path).encode(text) == oracle.encode(text)


def test_llama3_splits_digits_by_three_and_begins_with_bos(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, pre="llama-bpe", metadata={})
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.eos_ids == (0, 2)
    words = tokenizer._raw.pre_tokenizer.pre_tokenize_str("it's 12345 the!")
    assert [word for word, _ in words] == ["it", "'s", "Ġ", "123", "45", "Ġthe", "!"]
    assert tokenizer.encode(" the") == [1, TOKENS.index("Ġthe")]
    assert tokenizer.encode(" the", add_special_tokens=False) == [TOKENS.index("Ġthe")]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize("pre", ["tekken", "llama-v9"])
def test_an_unknown_splitter_is_refused_with_the_way_out(tmp_path: Path, pre: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, pre=pre)
    with pytest.raises(CheckpointError, match=rf"^tokenizer\.ggml\.pre: '{pre}' cannot be read"):
        Tokenizer.from_folder(path)
    (tmp_path / "tokenizer.json").write_text(_one_letter())
    assert Tokenizer.from_folder(tmp_path).vocab_size == 1


def _one_letter() -> str:
    from tokenizers import Tokenizer as Raw
    from tokenizers import models

    text: str = Raw(models.BPE(vocab={"a": 0}, merges=[])).to_str()
    return text


def test_a_path_to_a_file_and_a_file_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    path = tmp_path / "model.gguf"
    write_gguf(path)
    assert source.resolve(str(path), tmp_path) == path
    asked: list[tuple[str, str]] = []

    def fetch(repo_id: str, file: str, revision: str | None) -> str:
        asked.append((repo_id, file))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert source.resolve("org/name-GGUF/some-q4_k_m.gguf", tmp_path) == path
    assert asked == [("org/name-GGUF", "some-q4_k_m.gguf")]


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("Ġthe".encode(), b"\xc4\xffthe", "tokenizer.ggml.tokens: must be texts"),
        (
            b"{{ messages[0]",
            b"{{ message\xff[0]",
            "model.gguf: tokenizer.chat_template is not UTF-8",
        ),
    ],
)
def test_bytes_that_are_no_text_are_refused(
    tmp_path: Path, good: bytes, bad: bytes, message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    content = path.read_bytes()
    assert good in content
    path.write_bytes(content.replace(good, bad))
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(path)
    assert str(caught.value) == message
