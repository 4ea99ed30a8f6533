"""PackedLinear: the one form in which a quantised linear layer lives on disk and in memory.

Every checkpoint reader ends here; a backend may re-lay it once at load, never change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = (3, 4, 8)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Weights of y = x @ W.T + bias with W [N, K].

    bits 3, 4 or 8; group: values of K that share a scale (-1 = the whole row; the last group may
    be short); K: in-features. qweight u8[N, ceil(K * bits / 8)], a little-endian bit stream along K
    of two's-complement codes (-8..7, -4..3, -128..127). scales f16[N, G], G = ceil(K / group); may
    be negative. Dequantised in fp32:
      neither offsets nor zeros: w = s * q;  offsets f16[N, G]: w = s * q + o;
      zeros i8[N, G]: w = s * (q - z).
    offsets may be f32 where an imported Q4_1 block's minimum + 8 scales is no f16 number (about one
    block in a million): a backend rounds or keeps them by its own tolerance.
    perm i32[K]: column k of qweight multiplies x[perm[k]] (act-order checkpoints).
    """

    bits: int
    group: int
    in_features: int
    qweight: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    perm: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}, got {self.bits}")
        n, k = self.out_features, self.in_features
        groups = -(-k // self.group_size)
        expect = {"qweight": (n, -(-k * self.bits // 8)), "scales": (n, groups)}
        if self.offsets is not None and self.zeros is not None:
            raise ValueError("offsets and zeros exclude each other")
        expect |= {
            name: (n, groups) for name in ("offsets", "zeros") if getattr(self, name) is not None
        }
        for name, shape in expect.items():
            got = tuple(getattr(self, name).shape)
            if got != shape:
                raise ValueError(f"{name} must have shape {shape} for [N={n}, K={k}], got {got}")

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.qweight.shape[0])

    @property
    def group_size(self) -> int:
        """The group in values; K itself where group is -1 or more than K. A checkpoint may name any
        number, and work is done by this one.
        """
        return self.in_features if self.group == -1 else min(self.group, self.in_features)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: what one read of the layer costs."""
        tensors = (self.qweight, self.scales, self.offsets, self.zeros, self.bias, self.perm)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)
