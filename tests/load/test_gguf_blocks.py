"""Every GGUF block type against the `gguf` package's own dequantisation."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch

from engine_actor.errors import CheckpointError
from engine_actor.load.formats.gguf_blocks import (
    read_floats,
    unpack_q4_0,
    unpack_q5_0,
    unpack_q5_1,
)
from engine_actor.load.formats.gguf_super_blocks import (
    unpack_q3_k,
    unpack_q4_k,
    unpack_q5_k,
    unpack_q6_k,
)
from engine_actor.ops import PackedLinear
from tests.load.gguf_maker import random_blocks
from tests.load.oracle import dequantise

Type = gguf.GGMLQuantizationType
Unpack = Callable[[str, bytes, int, int], PackedLinear]


@pytest.mark.parametrize(
    ("kind", "unpack", "bits", "has_offsets"),
    [
        (Type.Q4_0, unpack_q4_0, 4, False),
        (Type.Q5_0, unpack_q5_0, 8, False),
        (Type.Q5_1, unpack_q5_1, 8, True),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_32_are_carried_over_without_loss(
    kind: Type, unpack: Unpack, bits: int, has_offsets: bool, seed: int
) -> None:
    raw = random_blocks(kind, (48, 96), seed)
    layer = unpack("w", raw.tobytes(), 48, 96)
    assert (layer.bits, layer.group, layer.offsets is not None) == (bits, 32, has_offsets)
    assert layer.scales.dtype == torch.float16
    assert np.array_equal(dequantise(layer), gguf.quants.dequantize(raw, kind))


def test_q4_0_golden_bytes() -> None:
    """By hand: d = -0.5, low nibbles 0..15, high nibbles 0..15; w = -0.5 * (u - 8)."""
    raw = np.array([-0.5], np.float16).tobytes() + bytes(0x11 * i for i in range(16))
    layer = unpack_q4_0("w", raw, 1, 32)
    assert bytes(layer.qweight.flatten().tolist()).hex() == "98badcfe10325476" * 2
    assert dequantise(layer)[0, :16].tolist() == [4 - 0.5 * i for i in range(16)]


def test_q5_0_golden_bytes() -> None:
    """By hand: d = 1, all nibbles 3, fifth bits of values 0 and 17 alone set."""
    fifth = (1 | 1 << 17).to_bytes(4, "little")
    raw = np.array([1.0], np.float16).tobytes() + fifth + bytes([0x33] * 16)
    expected = [-13.0] * 32
    expected[0] = expected[17] = 3.0
    assert dequantise(unpack_q5_0("w", raw, 1, 32))[0].tolist() == expected


def test_bf16_is_a_view_of_its_bytes() -> None:
    raw = bytes([0x80, 0x3F, 0x00, 0xC0])  # 1.0 and -2.0
    values = read_floats("BF16", raw, (2,))
    assert values.dtype == torch.bfloat16
    assert values.tolist() == [1.0, -2.0]


SUPER = [
    (Type.Q3_K, unpack_q3_k, 110, (108,), 3, 16),
    (Type.Q4_K, unpack_q4_k, 144, (0, 2), 4, 32),
    (Type.Q5_K, unpack_q5_k, 176, (0, 2), 8, 32),
    (Type.Q6_K, unpack_q6_k, 210, (208,), 8, 16),
]


def _super_blocks(
    size: int, scales_at: tuple[int, ...], rows: int, blocks: int, seed: int, largest: float
) -> np.ndarray:
    """Random bytes, but sane f16 scales of both signs."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in scales_at:
        values = (rng.random((rows, blocks, 1)) - 0.3) * largest
        raw[..., at : at + 2] = values.astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize(("kind", "unpack", "size", "at", "bits", "group"), SUPER)
@pytest.mark.parametrize("seed", range(3))
def test_super_blocks_keep_their_codes_and_round_their_scales_once(
    kind: Type,
    unpack: Unpack,
    size: int,
    at: tuple[int, ...],
    bits: int,
    group: int,
    seed: int,
) -> None:
    """The bound is half a unit in the last place of f16, of s * u and of the offset."""
    raw = _super_blocks(size, at, 6, 3, seed, 1e-3)
    layer = unpack("w", raw.tobytes(), 6, 768)
    assert (layer.bits, layer.group) == (bits, group)
    exact = gguf.quants.dequantize(raw, kind).astype(np.float64)
    got = dequantise(layer).astype(np.float64)

    def wide(values: torch.Tensor | None) -> np.ndarray:
        if values is None:
            return np.zeros(exact.shape)
        return np.abs(values.double().numpy()).repeat(group, 1)

    largest_code = {Type.Q3_K: 4, Type.Q4_K: 16, Type.Q5_K: 32, Type.Q6_K: 32}[kind]
    bound = 2.0**-11 * (wide(layer.scales) * largest_code + wide(layer.offsets)) + 2.0**-25
    assert (np.abs(got - exact) <= bound).all()
    assert not np.array_equal(got, exact)


@pytest.mark.parametrize(("kind", "unpack", "size", "at", "bits", "group"), SUPER)
def test_super_blocks_whose_products_are_f16_numbers_are_exact(
    kind: Type, unpack: Unpack, size: int, at: tuple[int, ...], bits: int, group: int
) -> None:
    """Scales of a power of two leave nothing to round; so do products below 2^-14."""
    raw = _super_blocks(size, at, 4, 2, 7, 1e-3).reshape(4, 2, size)
    for place in at:
        raw[..., place : place + 2] = np.frombuffer(np.float16(2.0**-8).tobytes(), np.uint8)
    layer = unpack("w", raw.tobytes(), 4, 512)
    assert (layer.bits, layer.group) == (bits, group)
    expected = gguf.quants.dequantize(raw.reshape(4, -1), kind)
    assert np.array_equal(dequantise(layer), expected)


def test_q6_k_below_the_normal_range_is_exact() -> None:
    raw = _super_blocks(210, (208,), 4, 2, 3, 4e-7)
    layer = unpack_q6_k("w", raw.tobytes(), 4, 512)
    assert float(layer.scales.abs().max()) < 2.0**-14
    assert np.array_equal(dequantise(layer), gguf.quants.dequantize(raw, Type.Q6_K))


@pytest.mark.parametrize(("kind", "unpack", "size", "at", "bits", "group"), SUPER)
@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "that is not finite"), (float("inf"), "that is not finite"), (6e4, "f16")],
)
def test_super_blocks_that_are_no_numbers_are_refused(
    kind: Type,
    unpack: Unpack,
    size: int,
    at: tuple[int, ...],
    bits: int,
    group: int,
    value: float,
    message: str,
) -> None:
    raw = _super_blocks(size, at, 2, 1, 0, 1e-3)
    raw[1, at[0] : at[0] + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    with pytest.raises(CheckpointError, match=rf"^blk\.0\.w: a .* scale .*{message}$"):
        unpack("blk.0.w", raw.tobytes(), 2, 256)
