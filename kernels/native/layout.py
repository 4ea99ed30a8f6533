"""How packed weights lie for the native kernels, and a prepared layer that multiplies.

Eight out-features form a strip. A strip is, group after group: eight f16 scales, eight f16 seconds
(not for symmetric weights), then the group's blocks of 32 columns. In a block of 4-bit codes, word
[v][lane][parity] of 16 bits holds the codes of columns 8v + 2i + parity in its nibbles i = 0..3; in
one of 8-bit codes, byte [p][lane][parity] is column 2p + parity. So one vector of 16-bit lanes
times a pair of neighbouring activations adds a pair of columns for all eight features.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.native.arena import WEIGHTS
from kernels.native.library import NativeLibrary
from kernels.pack.dequantise import unpack_codes
from kernels.pack.packed_linear import PackedLinear

BLOCK, LANES = 32, 8
SYMMETRIC, ZEROS, OFFSETS = 0, 1, 2
HALF_MAX = 65504.0


class LinearStruct(ctypes.Structure):
    """As `Linear` in linear.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("blocks_per_group", ctypes.c_int32),
        ("middle", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """One layer re-laid. `second`: zeros or offsets where the kind has them, else None."""

    strips: torch.Tensor
    bits: int
    kind: int
    blocks_per_group: int
    middle: int


def fits(k: int, group: int) -> bool:
    """Whether every block of 32 columns lies in one group."""
    return group <= 0 or group >= k or group % BLOCK == 0


def lay_out(layer: PackedLinear) -> NativeWeights:
    """Raises ValueError where an offset does not fit f16 once the codes are unsigned, OSError where
    memory is out.
    """
    bits, middle = (8, 0) if layer.bits == 8 else (4, 1 << (layer.bits - 1))
    codes = unpack_codes(layer).to(torch.int16) + middle
    n, k = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -k % BLOCK, 0, -n % LANES))
    blocks = codes.shape[1] // BLOCK
    per_group = max(1, min(blocks, layer.group_size // BLOCK)) if layer.group_size < k else blocks
    kind, values, middle = _heads(layer, middle)
    heads = torch.stack([_by_strip(v, n) for v in values], dim=2).flatten(2).view(torch.uint8)
    body = _blocks_of_4(codes) if bits == 4 else _blocks_of_8(codes)
    strips = WEIGHTS.place(_joined(heads, body, per_group))
    return NativeWeights(strips, bits, kind, per_group, middle)


def _heads(layer: PackedLinear, middle: int) -> tuple[int, list[torch.Tensor], int]:
    """Kind, the f16 [N, G] values in front of every group, and what the kernel subtracts. With
    unsigned codes u = q + middle: w = s * (u - middle), w = s * (u - (z + middle)), and
    w = s * (u - middle) + o or w = s * u + (o - s * middle), whichever offset f16 holds better: the
    second is the minimum of an imported Q4_1 block, the first any f16 offset of ours.
    """
    scales = layer.scales.half()
    if layer.zeros is not None:
        return ZEROS, [scales, (layer.zeros.float() + middle).half()], middle
    if layer.offsets is None:
        return SYMMETRIC, [scales], middle
    offsets = layer.offsets.float()
    minima = offsets - layer.scales.float() * middle
    chosen = min((minima, 0), (offsets, middle), key=lambda pair: _rounding(pair[0]))
    if not _rounding(chosen[0]) < HALF_MAX:
        raise ValueError("an offset is larger than fp16 can hold")
    return OFFSETS, [scales, chosen[0].half()], chosen[1]


def _rounding(values: torch.Tensor) -> float:
    """Largest error of values as f16; infinite where one does not fit."""
    return float((values.half().float() - values).abs().max()) if values.numel() else 0.0


def _by_strip(values: torch.Tensor, n: int) -> torch.Tensor:
    """f16 [N, G] -> [strips, G, 8]"""
    padded = torch.nn.functional.pad(values, (0, 0, 0, -n % LANES))
    return padded.view(-1, LANES, values.shape[1]).transpose(1, 2).contiguous()


def _blocks_of_4(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] of 0..15 -> u8 [strips, blocks, 128]"""
    parts = codes.view(-1, LANES, codes.shape[1] // BLOCK, 4, 4, 2).to(torch.int32)
    words = sum(parts[..., i, :] << (4 * i) for i in range(4))
    assert isinstance(words, torch.Tensor)
    # [strips, lane, block, v, parity] -> [strips, block, v, lane, parity]
    words = words.permute(0, 2, 3, 1, 4).to(torch.int16).contiguous()
    return words.flatten(2).view(torch.uint8)


def _blocks_of_8(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] of -128..127 -> u8 [strips, blocks, 256]"""
    parts = codes.to(torch.int8).view(-1, LANES, codes.shape[1] // BLOCK, 16, 2)
    return parts.permute(0, 2, 3, 1, 4).contiguous().flatten(2).view(torch.uint8)


def _joined(heads: torch.Tensor, body: torch.Tensor, per_group: int) -> torch.Tensor:
    """u8 [strips, bytes]: each group's head in front of its blocks; the last group may be short."""
    strips, blocks = body.shape[:2]
    whole = blocks // per_group
    first = body[:, : whole * per_group].reshape(strips, whole, -1)
    parts = [torch.cat((heads[:, :whole], first), dim=2).flatten(1)]
    if whole < heads.shape[1]:
        parts += [heads[:, whole], body[:, whole * per_group :].flatten(1)]
    return torch.cat(parts, dim=1)


class NativeLinear:
    """y = x @ W.T + bias, fp32 y; x [M, K] of any float dtype. Rows do not depend on each other."""

    def __init__(self, library: NativeLibrary, layer: PackedLinear) -> None:
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self._library = library
        self._weights = lay_out(layer)
        self._bias = None if layer.bias is None else layer.bias.float().contiguous()
        self._columns = None if layer.perm is None else layer.perm.to(torch.int32).contiguous()
        self.struct = LinearStruct(
            self._weights.strips.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            None if self._columns is None else self._columns.data_ptr(),
            self.out_features,
            self.in_features,
            self._weights.bits,
            self._weights.kind,
            self._weights.blocks_per_group,
            self._weights.middle,
        )
        self.address = ctypes.addressof(self.struct)
        self._call = library.linear
        self._threads = library.threads

    @property
    def permutes(self) -> bool:
        """Whether it reads its input in another order."""
        return self._columns is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float().contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self.out_features)
        if self._call(self.address, x.data_ptr(), y.data_ptr(), rows, self._threads()):
            raise MemoryError("no memory for the integers of the activations")
        return y
