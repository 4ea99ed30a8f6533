"""Our GGUF reader against the `gguf` package: the same bytes, the same fp32 matrices, no loss."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine_actor.errors import CheckpointError
from engine_actor.load.formats.gguf import GgufFile
from engine_actor.load.formats.gguf_blocks import unpack_q4_1, unpack_q8_0
from engine_actor.load.gguf_config import hub_config
from engine_actor.load.gguf_model import canonical_weights
from engine_actor.model.config import ModelConfig
from engine_actor.ops import DenseLinear, PackedLinear
from tests.load.gguf_maker import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    Q4_1,
    Q8_0,
    VOCAB,
    random_blocks,
    write_gguf,
)
from tests.load.oracle import dequantise


@pytest.mark.parametrize("seed", range(5))
def test_q4_1_is_carried_over_without_loss(seed: int) -> None:
    raw = random_blocks(Q4_1, (48, 96), seed)
    layer = unpack_q4_1("w", raw.tobytes(), 48, 96)
    assert (layer.bits, layer.group, layer.scales.dtype) == (4, 32, torch.float16)
    assert np.array_equal(dequantise(layer), gguf.quants.dequantize(raw, Q4_1))


@pytest.mark.parametrize("seed", range(3))
def test_q8_0_is_carried_over_without_loss(seed: int) -> None:
    raw = random_blocks(Q8_0, (48, 96), seed)
    layer = unpack_q8_0("w", raw.tobytes(), 48, 96)
    assert (layer.bits, layer.group, layer.offsets) == (8, 32, None)
    assert np.array_equal(dequantise(layer), gguf.quants.dequantize(raw, Q8_0))


def _block(scale: float, minimum: float, codes: list[int]) -> bytes:
    nibbles = bytes(low | high << 4 for low, high in zip(codes[:16], codes[16:], strict=True))
    return np.array([scale, minimum], np.float16).tobytes() + nibbles


def test_q4_1_golden_bytes() -> None:
    """u = 0..15, 0..15 are codes -8..7 twice: bytes 98 BA DC FE 10 32 54 76, by hand."""
    layer = unpack_q4_1("w", _block(0.5, -4.0, [*range(16)] * 2), 1, 32)
    assert bytes(layer.qweight.flatten().tolist()).hex() == "98badcfe10325476" * 2
    assert layer.scales.tolist() == [[0.5]]
    assert layer.offsets is not None
    assert layer.offsets.tolist() == [[0.0]]


def test_a_skewed_block_gets_wider_offsets() -> None:
    """Numbers out of the demo file: 8 * 0.1810 - 0.1226 is no f16 number."""
    raw = _block(0.1810302734375, -0.12255859375, [*range(16)] * 2)
    layer = unpack_q4_1("w", raw, 1, 32)
    assert layer.offsets is not None
    assert layer.offsets.dtype == torch.float32
    expected = gguf.quants.dequantize(np.frombuffer(raw, np.uint8).reshape(1, 20), Q4_1)
    assert np.array_equal(dequantise(layer), expected)


@pytest.mark.parametrize(
    ("scale", "minimum", "message"),
    [
        (60000.0, 6e-8, "too far apart to carry over exactly"),
        (float("inf"), 0.0, "not finite"),
        (1.0, float("nan"), "not finite"),
    ],
)
def test_a_block_that_cannot_be_exact_is_refused(
    scale: float, minimum: float, message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"^blk\.0\.w: .*{message}$"):
        unpack_q4_1("blk.0.w", _block(scale, minimum, [0] * 32), 1, 32)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    write_gguf(path)
    return path


def test_header_as_the_gguf_package_reads_it(small: Path) -> None:
    reader = gguf.GGUFReader(small)
    with GgufFile(small) as file:
        assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            ours = file.tensors[tensor.name]
            assert ours.type == tensor.tensor_type.name
            assert ours.shape == tuple(int(n) for n in reversed(tensor.shape))
            assert file.read(tensor.name) == tensor.data.tobytes()
        for key, field in reader.fields.items():
            if not key.startswith("GGUF."):
                assert file.metadata[key] == field.contents()


def _hub_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's own permutation, undone: row pairs (2i, 2i+1) go to halves i and i + D/2."""
    by_head = rows.reshape(heads, -1, rows.shape[1])
    return np.concatenate([by_head[:, 0::2], by_head[:, 1::2]], axis=1).reshape(rows.shape)


def test_canonical_weights_equal_the_dequantised_file(small: Path) -> None:
    dense = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        for t in gguf.GGUFReader(small).tensors
    }
    with GgufFile(small) as file:
        config = ModelConfig.from_hf(hub_config(file), None)
        weights = dict(canonical_weights(file, config))
    assert (config.n_layers, config.n_kv_heads, config.tie_embeddings) == (2, 2, True)
    assert "head" not in weights
    for name, got in weights.items():
        value = dequantise(got) if isinstance(got, PackedLinear) else got
        assert np.array_equal(np.asarray(value), _expected(name, dense)), name


def _expected(name: str, dense: dict[str, np.ndarray]) -> np.ndarray:
    top = {"embed": "token_embd.weight", "norm": "output_norm.weight"}
    if name in top:
        return dense[top[name]]
    _, layer, leaf = name.split(".")
    at = f"blk.{layer}."
    match leaf:
        case "qkv":
            q = _hub_order(dense[at + "attn_q.weight"], HEADS)
            k = _hub_order(dense[at + "attn_k.weight"], KV_HEADS)
            return np.concatenate([q, k, dense[at + "attn_v.weight"]])
        case "gate_up":
            return np.concatenate([dense[at + "ffn_gate.weight"], dense[at + "ffn_up.weight"]])
    names = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "o": "attn_output"}
    return dense[f"{at}{names.get(leaf, 'ffn_' + leaf)}.weight"]


def test_an_untied_f16_head_stays_dense(tmp_path: Path) -> None:
    path = tmp_path / "untied.gguf"
    write_gguf(path, tied=False)
    with GgufFile(path) as file:
        config = ModelConfig.from_hf(hub_config(file), None)
        head = dict(canonical_weights(file, config))["head"]
    assert not config.tie_embeddings
    assert isinstance(head, DenseLinear)
    assert torch.equal(head.weight, torch.ones(VOCAB, HIDDEN, dtype=torch.float16))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, architecture="gemma")
    with GgufFile(path) as file, pytest.raises(CheckpointError) as caught:
        hub_config(file)
    assert str(caught.value) == (
        "general.architecture: 'gemma' cannot be read (supported: 'llama', 'qwen2', 'qwen3')"
    )
