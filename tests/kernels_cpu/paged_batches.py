"""Ragged batches over a poisoned paged cache, and the angles of their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.native.layers import NativeShape

BLOCKS = 64


@dataclass(frozen=True)
class Batch:
    """Ragged sequences: new tokens, keys, blocks."""

    q_lens: list[int]
    kv_lens: list[int]
    blocks: list[list[int]]
    block_tokens: int

    @property
    def positions(self) -> list[int]:
        return [p for q, n in zip(self.q_lens, self.kv_lens, strict=True) for p in range(n - q, n)]

    @property
    def sequences(self) -> list[int]:
        return [i for i, q in enumerate(self.q_lens) for _ in range(q)]

    @property
    def slots(self) -> list[int]:
        size = self.block_tokens
        pairs = zip(self.sequences, self.positions, strict=True)
        return [self.blocks[i][p // size] * size + p % size for i, p in pairs]

    def row(self, index: int) -> Batch:
        """One row by itself, its keys as they are when it is reached."""
        i, n = self.sequences[index], self.positions[index] + 1
        return Batch([1], [n], [self.blocks[i]], self.block_tokens)


def batch_of(q_lens: list[int], kv_lens: list[int], block_tokens: int, seed: int = 0) -> Batch:
    """Blocks scattered over the pool."""
    free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    blocks = [[free.pop() for _ in range(-(-n // block_tokens))] for n in kv_lens]
    return Batch(q_lens, kv_lens, blocks, block_tokens)


def angles(count: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [count, dim] with the sign of the first half in sin."""
    turns = torch.outer(torch.arange(count).float(), 0.7 ** torch.arange(dim // 2).float())
    cos, sin = turns.cos(), turns.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def poisoned_cache(shape: NativeShape, batch: Batch, seed: int = 0) -> torch.Tensor:
    """Random where a sequence has keys already, NaN everywhere else."""
    size = shape.block_tokens
    kv = torch.full((BLOCKS, size, 2, shape.kv_heads, shape.head_dim), torch.nan)
    draw = torch.Generator().manual_seed(seed)
    for q, n, blocks in zip(batch.q_lens, batch.kv_lens, batch.blocks, strict=True):
        for p in range(n - q):
            kv[blocks[p // size], p % size] = torch.randn(kv.shape[2:], generator=draw)
    return kv
