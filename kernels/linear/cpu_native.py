"""Few rows on a CPU through our own compiled kernel: 16-bit activations, exact sums in a block.

It reads the packed weights as they are (half a byte per 4-bit code) and rounds activations to one
part in 32,767 of the largest of 32 neighbours, far below the rounding of a bf16 kernel. A row's
bits depend neither on other rows nor on the number of threads.
"""

from __future__ import annotations

import torch

from kernels.linear.weights import LinearFn, Weights
from kernels.native.layout import NativeLinear, fits
from kernels.native.library import native_library, why_not_native
from kernels.pack.packed_linear import PackedLinear
from kernels.spec.op import OpKey


class CpuNative:
    """y in fp32."""

    name = "cpu.native"

    def refuse(self, key: OpKey) -> str | None:
        if key.exact:
            return "rounds activations to 16 bits"
        if key.device != "cpu":
            return "runs on a CPU only"
        if not key.bits:
            return "multiplies packed weights only"
        if not fits(key.k, key.group):
            return f"a group of {key.group} is not made of whole blocks of 32"
        return why_not_native()

    def prepare(self, weights: Weights, dtype: torch.dtype) -> LinearFn:
        """Raises ValueError where an offset does not fit fp16."""
        library = native_library()
        assert isinstance(weights, PackedLinear)
        assert not isinstance(library, str)
        return NativeLinear(library, weights)
