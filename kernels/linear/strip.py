"""The strip layout: packed weights re-laid once at load, so that a load is a tensor-core operand.

A strip is 16 out-features. Along K it is cut into blocks of 64 columns, and of each block a lane
of a warp holds 32 codes: the A fragments of four mma.m16n8k16 (kernels/include/strip.cuh reads
them). Lane l with g = l / 4 and t = l % 4 owns rows g and g + 8 and columns 16 t .. 16 t + 15 of
the block, so the activations it needs are 32 consecutive bytes. Its codes come in 16 pairs of
neighbouring columns; pair 4 j + 2 c + h is row g + 8 h, columns 16 t + 4 j + 2 c and the next:
register 2 c + h of step j. Codes are stored unsigned, q + 8 or q + 4.

W4, i32 [strips, K / 64, lane, 4]: word j holds pairs 4 j .. 4 j + 3, the r-th of them at bits 4 r
and 16 + 4 r.
W3, i32 [strips, K / 256, 3, lane, 4]: three words a block, one in each of three planes, the block
being the last index; word p holds pairs 5 p .. 5 p + 4 at bits 3 i and 16 + 3 i, and in bits 15 and
31 its share of pair 15. Exactly bits / 8 bytes a weight, all of them read by 16-byte loads.

Torch only, any device. Knows no kernel and no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.pack.dequantise import slice_rows, unpack_codes
from kernels.pack.kept_memory import keep, kept
from kernels.pack.packed_linear import PackedLinear

STRIP_ROWS = 16
BLOCK_COLUMNS = 64
STEP_COLUMNS = {4: 128, 3: 256}
"""Columns that a kernel takes at a time, by bits; K is padded to a multiple."""
GROUPS = (32, 64, 128)
"""Groups smaller than a step, which kernels know by name; larger ones must be whole steps."""
_LANES, _PAIRS, _PLANES = 32, 16, 3
_CODES_AT_ONCE = 1 << 22
"""Re-laid at a time: bounds the scratch."""
SCRATCH_BYTES = 16 * _CODES_AT_ONCE
"""Memory that to_strips() needs beside a layer and its strips, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class StripWeights:
    """w = s q + o of a layer in strips, padded; codes in the padding are 0, scales and offsets 0.

    words: i32, see above. scales, offsets: f16 [strips, G, 16]; a layer's zeros are folded into
    offsets (o = -s z). group: columns that share a scale, a divisor of the step or a multiple of
    it. in_features, out_features: before padding. perm i64[K]: column k multiplies x[perm[k]].
    """

    bits: int
    group: int
    out_features: int
    in_features: int
    words: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    bias: torch.Tensor | None
    perm: torch.Tensor | None

    @property
    def strips(self) -> int:
        """N / 16, rounded up."""
        return int(self.words.shape[0])

    @property
    def steps(self) -> int:
        """Padded K in steps."""
        return self.padded_columns // STEP_COLUMNS[self.bits]

    @property
    def padded_columns(self) -> int:
        """K rounded up to whole steps."""
        return padded_columns(self.bits, self.in_features)

    @property
    def nbytes(self) -> int:
        """Bytes a kernel reads of the weights."""
        tensors = (self.words, self.scales, self.offsets)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def refuse_strips(bits: int, group: int, k: int) -> str | None:
    """Why weights of K = k in groups of `group` columns have no strip layout, else None."""
    if bits not in STEP_COLUMNS:
        return f"holds 3 or 4 bits, not {bits or 'dense weights'}"
    step = STEP_COLUMNS[bits]
    if group in GROUPS or group >= k or group % step == 0:
        return None
    return f"group {group} is none of {GROUPS}, no multiple of {step} and smaller than K = {k}"


def padded_columns(bits: int, k: int) -> int:
    """K rounded up to whole steps."""
    step = STEP_COLUMNS[bits]
    return -(-k // step) * step


def strip_bytes(bits: int, group: int, rows: int, k: int) -> tuple[int, int]:
    """Bytes of words and of scales of a layer in strips; offsets, where it has any, take as much
    as the scales.
    """
    strips, columns = -(-rows // STRIP_ROWS), padded_columns(bits, k)
    groups = 1 if group >= k else -(-columns // group)
    return strips * STRIP_ROWS * columns * bits // 8, strips * STRIP_ROWS * groups * 2


def to_strips(layer: PackedLinear) -> StripWeights:
    """Re-lay a layer. Raises ValueError where refuse_strips() has a reason, or where a folded zero
    or an offset does not fit fp16.
    """
    reason = refuse_strips(layer.bits, layer.group_size, layer.in_features)
    if reason is not None:
        raise ValueError(reason)
    columns = padded_columns(layer.bits, layer.in_features)
    group = columns if layer.group_size >= layer.in_features else layer.group_size
    groups = -(-columns // group)
    offsets = _offsets(layer)
    return StripWeights(
        layer.bits,
        group,
        layer.out_features,
        layer.in_features,
        _words(layer, columns),
        keep(_in_strips(layer.scales.half(), groups)),
        None if offsets is None else keep(_in_strips(offsets, groups)),
        None if layer.bias is None else keep(layer.bias.half()).contiguous(),
        None if layer.perm is None else keep(layer.perm.long()),
    )


def interleave_halves(layer: PackedLinear) -> PackedLinear:
    """Rows reordered so that every strip holds 8 rows of the first half of N and, 8 further down,
    their partners of the second: a fused gate and up, whose product a kernel can then form where
    it adds up. Raises ValueError unless N is a multiple of 16.
    """
    rows = layer.out_features
    if rows % STRIP_ROWS:
        raise ValueError(f"gate and up have {rows} rows together, not a multiple of {STRIP_ROWS}")
    order = torch.arange(rows, device=layer.qweight.device)
    order = order.view(2, -1, STRIP_ROWS // 2).transpose(0, 1).reshape(-1)

    def picked(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.index_select(0, order)

    return PackedLinear(
        layer.bits,
        layer.group,
        layer.in_features,
        layer.qweight.index_select(0, order),
        layer.scales.index_select(0, order),
        picked(layer.offsets),
        picked(layer.zeros),
        picked(layer.bias),
        layer.perm,
    )


def from_strips(weights: StripWeights) -> torch.Tensor:
    """The codes again, i8 [strips * 16, padded K]: what to_strips() lost is nothing."""
    pairs = (_pairs_of_w4 if weights.bits == 4 else _pairs_of_w3)(weights.words)
    strips, blocks = pairs.shape[:2]
    # strip, block, g, t, j, c, h, element -> strip, h, g, block, t, j, c, element
    spread = pairs.view(strips, blocks, 8, 4, 4, 2, 2, 2).permute(0, 6, 2, 1, 3, 4, 5, 7)
    unsigned = spread.reshape(strips * STRIP_ROWS, blocks * BLOCK_COLUMNS)
    return (unsigned - (1 << (weights.bits - 1))).to(torch.int8)


def _words(layer: PackedLinear, columns: int) -> torch.Tensor:
    """Part by part into one tensor: a card that is nearly full has no room for the parts beside
    it.
    """
    strips = -(-layer.out_features // STRIP_ROWS)
    blocks = columns // BLOCK_COLUMNS
    shape = (blocks,) if layer.bits == 4 else (blocks // 4, _PLANES)
    device = layer.qweight.device
    with kept():
        words = torch.empty(strips, *shape, _LANES, 4, dtype=torch.int32, device=device)
    first = 0
    for part in _parts(layer, columns):
        relaid = _relay(part, columns)
        words[first : first + relaid.shape[0]] = relaid
        first += relaid.shape[0]
    return words


def _parts(layer: PackedLinear, columns: int) -> Iterator[PackedLinear]:
    rows = max(1, _CODES_AT_ONCE // (columns * STRIP_ROWS)) * STRIP_ROWS
    for first in range(0, layer.out_features, rows):
        yield slice_rows(layer, first, first + rows)


def _relay(layer: PackedLinear, columns: int) -> torch.Tensor:
    codes = unpack_codes(layer)
    rows = -layer.out_features % STRIP_ROWS
    codes = torch.nn.functional.pad(codes, (0, columns - layer.in_features, 0, rows))
    unsigned = codes.to(torch.int32) + (1 << (layer.bits - 1))
    strips, blocks = unsigned.shape[0] // STRIP_ROWS, columns // BLOCK_COLUMNS
    # strip, h, g, block, t, j, c, element -> strip, block, g, t, j, c, h, element
    spread = unsigned.view(strips, 2, 8, blocks, 4, 4, 2, 2).permute(0, 3, 2, 4, 5, 6, 1, 7)
    pairs = spread.reshape(strips, blocks, _LANES, _PAIRS, 2)
    return _w4_of_pairs(pairs) if layer.bits == 4 else _w3_of_pairs(pairs)


def _w4_of_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """[strips, blocks, lane, 16, 2] -> [strips, blocks, lane, 4]."""
    shifts = _shifts(4, 4, pairs.device)
    words = pairs.view(*pairs.shape[:3], 4, 4, 2) << shifts
    return words.sum((-2, -1), dtype=torch.int32)


def _pairs_of_w4(words: torch.Tensor) -> torch.Tensor:
    shifts = _shifts(4, 4, words.device)
    return ((words[..., None, None] >> shifts) & 0xF).flatten(-3, -2)


def _w3_of_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """[strips, blocks, lane, 16, 2] -> [strips, blocks / 4, plane, lane, 4]."""
    planes = []
    for plane in range(_PLANES):
        five = pairs[..., 5 * plane : 5 * plane + 5, :] << _shifts(3, 5, pairs.device)
        spare = ((pairs[..., 15, :] >> plane) & 1) << _spare_shifts(pairs.device)
        planes.append(five.sum((-2, -1), dtype=torch.int32) + spare.sum(-1, dtype=torch.int32))
    words = torch.stack(planes, dim=2)
    return words.unflatten(1, (-1, 4)).permute(0, 1, 3, 4, 2).contiguous()


def _pairs_of_w3(words: torch.Tensor) -> torch.Tensor:
    by_block = words.permute(0, 1, 4, 3, 2).flatten(1, 2)  # strips, blocks, lane, plane
    five = ((by_block[..., None, None] >> _shifts(3, 5, words.device)) & 7).flatten(-3, -2)
    bits = (by_block[..., None] >> _spare_shifts(words.device)) & 1
    weight = torch.tensor([1, 2, 4], dtype=torch.int32, device=words.device)
    last = (bits * weight[:, None]).sum(-2, keepdim=True, dtype=torch.int32)
    return torch.cat((five, last), dim=-2)


def _shifts(bits: int, count: int, device: torch.device) -> torch.Tensor:
    """i32 [count, 2]: where the two elements of pair i lie in a word."""
    low = torch.arange(count, dtype=torch.int32, device=device) * bits
    return torch.stack((low, low + 16), dim=-1)


def _spare_shifts(device: torch.device) -> torch.Tensor:
    return torch.tensor([15, 31], dtype=torch.int32, device=device)


def _offsets(layer: PackedLinear) -> torch.Tensor | None:
    """f16 [N, G], or None for a symmetric layer."""
    if layer.zeros is not None:
        exact = -layer.scales.float() * layer.zeros.float()
    elif layer.offsets is not None:
        exact = layer.offsets.float()
    else:
        return None
    rounded = exact.half()
    if not bool(torch.isfinite(rounded).all()):
        raise ValueError("an offset, or a zero times its scale, does not fit fp16")
    return rounded


def _in_strips(values: torch.Tensor, groups: int) -> torch.Tensor:
    """[N, G] -> [strips, groups, 16], padded with zeros."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, groups - columns, 0, -rows % STRIP_ROWS))
    return padded.view(-1, STRIP_ROWS, groups).transpose(1, 2).contiguous()
