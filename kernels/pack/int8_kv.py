"""Keys and values as signed codes with one fp16 scale per token and head: half the cache's bytes.

Codes take the place of the values, [n_blocks, block_tokens, 2, kv_heads, head_dim]; scales are
[n_blocks, block_tokens, kv_heads, 2], so that a key's and its value's are one 4-byte load. Torch
only, any device. Knows no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = 127


@dataclass(frozen=True, slots=True, eq=False)
class Int8KV:
    """One layer. codes i8[n_blocks, block_tokens, 2, kv_heads, head_dim], keys before values;
    scales f16[n_blocks, block_tokens, kv_heads, 2]. A value is code * scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        blocks, tokens, both, heads, _ = self.codes.shape
        expect, got = (blocks, tokens, heads, both), tuple(self.scales.shape)
        if got != expect:
            raise ValueError(f"scales must be {expect}, got {got}")

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.codes.numel() + 2 * self.scales.numel()

    @property
    def n_blocks(self) -> int:
        """Blocks there are."""
        return int(self.codes.shape[0])

    def resized(self, n_blocks: int) -> Int8KV:
        """A copy of so many blocks; those that are new hold zeros."""
        _, tokens, _, heads, head_dim = self.codes.shape
        grown = empty_int8_kv(n_blocks, tokens, heads, head_dim, self.codes.device)
        kept = min(n_blocks, self.n_blocks)
        grown.codes[:kept] = self.codes[:kept]
        grown.scales[:kept] = self.scales[:kept]
        return grown

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """All of it, [n_blocks, block_tokens, 2, kv_heads, head_dim]."""
        return dequantise_kv(self.codes, self.scales.transpose(-1, -2), dtype)

    def tokens(self, index: torch.Tensor | slice, dtype: torch.dtype) -> torch.Tensor:
        """The values of the slots that `index` names, block * block_tokens + offset each: [tokens,
        2, kv_heads, head_dim].
        """
        codes, scales = self.codes.flatten(0, 1), self.scales.flatten(0, 1)
        if isinstance(index, slice):
            codes, scales = codes[index], scales[index]
        else:
            codes, scales = codes.index_select(0, index), scales.index_select(0, index)
        return dequantise_kv(codes, scales.transpose(-1, -2), dtype)


def stored(kv: torch.Tensor | Int8KV) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """(numbers of a layer's cache, their scales where they are codes, bits of a number), as kernels
    take them."""
    return (kv.codes, kv.scales, 8) if isinstance(kv, Int8KV) else (kv, None, 16)


def empty_int8_kv(
    n_blocks: int, block_tokens: int, kv_heads: int, head_dim: int, device: torch.device
) -> Int8KV:
    """A cache of zeros."""
    shape = (n_blocks, block_tokens, 2, kv_heads, head_dim)
    return Int8KV(
        torch.zeros(shape, dtype=torch.int8, device=device),
        torch.zeros(n_blocks, block_tokens, kv_heads, 2, dtype=torch.float16, device=device),
    )


def quantise_kv(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., head_dim] of any float dtype -> codes i8 and scales f16 [...].

    The scale is the largest magnitude / 127 in fp32, rounded to the half that a reader will use;
    codes are value * (1 / scale), rounded to even, so the rounding of the scale costs little. A
    head of zeros, or one so small that its scale is no half, gets scale and codes 0.
    """
    wide = values.float()
    scales = (wide.abs().amax(-1) / LARGEST).to(torch.float16)
    steps = scales.float().unsqueeze(-1)
    codes = torch.where(steps > 0, wide * (1 / steps), 0.0).round().clamp(-LARGEST, LARGEST)
    return codes.to(torch.int8), scales


def dequantise_kv(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """codes * scales in fp32, rounded to `dtype`."""
    if dtype == torch.float16:
        # 8 bits times 11 are exact in fp32, so this rounds the same once, without fp32 copies.
        return codes * scales.unsqueeze(-1)
    return (codes.float() * scales.float().unsqueeze(-1)).to(dtype)
