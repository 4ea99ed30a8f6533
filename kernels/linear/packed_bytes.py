"""A packed layer as the kernels that read the bytes on disk want it: nothing re-laid.

Shared by the seed's kernels and by the dequantising one. Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.pack.packed_linear import PackedLinear
from kernels.spec.op import OpKey

EIGHT = 8
"""Kernels take columns by eights: four bytes of W4, three of W3."""
AFFINE = {"": 0, "offsets": 1, "zeros": 2}
"""The define AFFINE of kernels/include/packed_group.cuh."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBytes:
    """codes u8[N, bytes], scales f16[N, G], shifts None, f16 or i8[N, G], bias f16[N] or None,
    perm i64[K] or None; all on one device.
    """

    bits: int
    n: int
    k: int
    group: int
    affine: int
    codes: torch.Tensor
    scales: torch.Tensor
    shifts: torch.Tensor | None
    bias: torch.Tensor | None
    perm: torch.Tensor | None

    @property
    def is_whole(self) -> bool:
        """K is a multiple of eight: no column, and no byte, needs a check."""
        return self.k % EIGHT == 0

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """x with its columns in stored order, contiguous."""
        return x.contiguous() if self.perm is None else x.index_select(-1, self.perm)


def packed_bytes(layer: PackedLinear) -> PackedBytes:
    """The same tensors, contiguous; f32 offsets are rounded to f16. Raises ValueError where one is
    too large for it.
    """
    affine = "offsets" if layer.offsets is not None else "zeros" if layer.zeros is not None else ""
    shifts = layer.zeros if layer.offsets is None else layer.offsets.half()
    if layer.offsets is not None and not bool(torch.isfinite(layer.offsets.half()).all()):
        raise ValueError("an offset does not fit fp16")
    return PackedBytes(
        layer.bits,
        layer.out_features,
        layer.in_features,
        layer.group_size,
        AFFINE[affine],
        layer.qweight.contiguous(),
        layer.scales.half().contiguous(),
        None if shifts is None else shifts.contiguous(),
        None if layer.bias is None else layer.bias.half().contiguous(),
        None if layer.perm is None else layer.perm.long(),
    )


def refuse_bytes(
    key: OpKey, dtypes: tuple[str, ...] = ("float16",), widths: tuple[int, ...] = (3, 4)
) -> str | None:
    """What keeps any kernel on the bytes on disk from doing `key`."""
    if key.exact:
        return "fp16 activations, batch-dependent sums"
    if key.device != "cuda":
        return "runs on a GPU only"
    if key.dtype not in dtypes:
        return f"multiplies {' or '.join(dtypes)} activations, not {key.dtype}"
    if key.bits not in widths:
        held = " or ".join(map(str, widths))
        return f"holds {held} bits, not {key.bits or 'dense weights'}"
    if key.group % EIGHT and key.group < key.k:
        return f"group {key.group} is no multiple of {EIGHT}"
    return None
