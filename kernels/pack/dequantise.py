"""From PackedLinear back to numbers: the fp32 matrix that defines what a packed layer means.

Every backend is compared with this, so it takes no short cuts: fp32 throughout, in the order of
PackedLinear's docstring.
"""

from __future__ import annotations

import dataclasses

import torch

from kernels.pack.packed_linear import PackedLinear
from kernels.pack.w3 import pack_w3, unpack_w3
from kernels.pack.w4 import pack_w4, unpack_w4
from kernels.pack.w8 import pack_w8, unpack_w8

_UNPACK = {3: unpack_w3, 4: unpack_w4, 8: unpack_w8}
_PACK = {3: pack_w3, 4: pack_w4, 8: pack_w8}


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Integer codes [N, K] -> u8[N, ceil(K * bits / 8)]. Raises ValueError out of range."""
    return _PACK[bits](codes)


def unpack_codes(layer: PackedLinear) -> torch.Tensor:
    """The codes of a layer, i8[N, K], columns as stored (before `perm`)."""
    return _UNPACK[layer.bits](layer.qweight, layer.in_features)


def per_column(values: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """[N, G] per-group values -> fp32 [N, K], a short last group included."""
    wide = values.float().repeat_interleave(layer.group_size, dim=1)
    return wide[:, : layer.in_features]


def dequantise(layer: PackedLinear) -> torch.Tensor:
    """The fp32 weight [N, K] of y = x @ W.T, columns in the order of x (`perm` undone)."""
    weight = dequantise_stored(layer)
    if layer.perm is None:
        return weight
    restored = torch.empty_like(weight)
    restored[:, layer.perm.long()] = weight
    return restored


def dequantise_stored(layer: PackedLinear) -> torch.Tensor:
    """As dequantise(), but with columns as stored: column k multiplies x[perm[k]]."""
    codes = unpack_codes(layer).float()
    if layer.zeros is not None:
        codes -= per_column(layer.zeros, layer)
    codes *= per_column(layer.scales, layer)
    if layer.offsets is not None:
        codes += per_column(layer.offsets, layer)
    return codes


def slice_rows(layer: PackedLinear, first: int, last: int) -> PackedLinear:
    """Out-features first..last-1 as a layer of their own; views, no copies."""

    def rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[first:last]

    return dataclasses.replace(
        layer,
        qweight=layer.qweight[first:last],
        scales=layer.scales[first:last],
        offsets=rows(layer.offsets),
        zeros=rows(layer.zeros),
        bias=rows(layer.bias),
    )


def gather_rows(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
    """Dequantise only the given out-features: fp32 [len(rows), K]. An embedding lookup."""

    def pick(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.index_select(0, rows)

    picked = dataclasses.replace(
        layer,
        qweight=layer.qweight.index_select(0, rows),
        scales=layer.scales.index_select(0, rows),
        offsets=pick(layer.offsets),
        zeros=pick(layer.zeros),
        bias=None,
    )
    return dequantise(picked)
