"""The real demo: weights equal to the file they come from, tokens equal to llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.formats.gguf import GgufFile
from engine_actor.ops import PackedLinear
from tests.load.oracle import dequantise
from tests.load.token_snippets import snippets

HEADS, KV_HEADS = 9, 3


def test_what_it_says_of_itself(demo_folder: Path) -> None:
    opened = open_checkpoint(demo_folder)
    config = opened.config
    assert (config.n_layers, config.hidden, config.intermediate) == (30, 576, 1536)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (HEADS, KV_HEADS, 64)
    assert (config.vocab_size, opened.usable_vocab_size()) == (49152, 49152)
    assert config.tie_embeddings
    assert (config.rope_theta, config.rms_eps) == (100000.0, 1e-5)
    assert (opened.max_model_len, opened.eos_token_ids) == (8192, {2})
    assert str(opened.quantisation) == "packed: 120 x W4 group 32, 1 x W8 group 32"
    assert 96_000_000 < opened.nbytes < 97_000_000


class _Original:
    """The GGUF file, dequantised by the gguf package."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)

    def __call__(self, name: str) -> np.ndarray:
        tensor = self._file.need(name + ".weight")
        raw = np.frombuffer(self._file.read(tensor.name), np.uint8)
        kind = gguf.GGMLQuantizationType[tensor.type]
        if tensor.type == "F32":
            return raw.view("<f4").reshape(tensor.shape)
        return gguf.quants.dequantize(raw.reshape(tensor.shape[0], -1), kind)

    def hub_rows(self, name: str, heads: int) -> np.ndarray:
        """q or k with llama.cpp's row pairs put back into halves."""
        rows = self(name)
        by_head = rows.reshape(heads, -1, rows.shape[1])
        return np.concatenate([by_head[:, 0::2], by_head[:, 1::2]], axis=1).reshape(rows.shape)

    def expected(self, name: str) -> np.ndarray:
        """The fp32 matrix or vector that our canonical name must hold."""
        if not name.startswith("layers."):
            return self({"embed": "token_embd", "norm": "output_norm"}[name])
        _, layer, leaf = name.split(".")
        at = f"blk.{layer}."
        if leaf == "qkv":
            q, k = self.hub_rows(at + "attn_q", HEADS), self.hub_rows(at + "attn_k", KV_HEADS)
            return np.concatenate([q, k, self(at + "attn_v")])
        if leaf == "gate_up":
            return np.concatenate([self(at + "ffn_gate"), self(at + "ffn_up")])
        plain = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "o": "attn_output"}
        return self(at + plain.get(leaf, f"ffn_{leaf}"))


def test_no_weight_differs_from_the_file(demo_folder: Path, demo_gguf: Path) -> None:
    """max |difference| is 0 over all 134,515,008 weights."""
    original, count = _Original(demo_gguf), 0
    for name, weight in open_checkpoint(demo_folder).weights():
        expected = original.expected(name)
        if isinstance(weight, PackedLinear):
            assert np.array_equal(dequantise(weight), expected), name
        else:
            assert isinstance(weight, torch.Tensor)
            assert np.array_equal(weight.numpy(), expected), name
        count += expected.size
    assert count == 134_515_008


def test_only_two_layers_need_wide_offsets(demo_folder: Path) -> None:
    wide = [
        name
        for name, weight in open_checkpoint(demo_folder).weights()
        if isinstance(weight, PackedLinear)
        and weight.offsets is not None
        and weight.offsets.dtype == torch.float32
    ]
    assert wide == ["layers.1.down", "layers.15.gate_up"]


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_folder / "tokenizer.json"))


def test_tokens_equal_llama_cpp(tokenizer: Tokenizer, project_root: Path) -> None:
    """349 snippets of prose, numbers, code, scripts, emoji and control tokens."""
    golden = json.loads((project_root / "tests/golden/smollm2_tokens.json").read_text())["tokens"]
    texts = snippets()
    assert len(texts) == len(golden) > 300
    for text, expected in zip(texts, golden, strict=True):
        assert tokenizer.encode(text).ids == expected, text


def test_decoding_gives_the_text_back(tokenizer: Tokenizer) -> None:
    for text in snippets():
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token_and_the_space_stays_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("The year 1984").tokens == ["The", "Ġyear", "Ġ", "1", "9", "8", "4"]


def test_special_tokens_and_template(demo_folder: Path, tokenizer: Tokenizer) -> None:
    config = json.loads((demo_folder / "tokenizer_config.json").read_text())
    ids = {kind: tokenizer.token_to_id(config[f"{kind}_token"]) for kind in ("bos", "eos", "pad")}
    assert ids == {"bos": 1, "eos": 2, "pad": 2}
    generation = json.loads((demo_folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.decode([2]) == ""
    template = (demo_folder / "chat_template.jinja").read_text()
    assert template.startswith("{% for message in messages %}")
    assert "<|im_start|>assistant" in template
