"""The KV cache: one tensor per layer, grown and shrunk while the engine runs.

A layer is [n_blocks, block_tokens, 2, kv_heads, head_dim]: keys of a token beside its values,
so that writing a token or gathering a block is one copy. Knows nothing of who owns a block.
"""

from __future__ import annotations

import zlib

import torch

from engine_actor.model.config import ModelConfig

KV_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def kv_bytes_per_block(config: ModelConfig, dtype: torch.dtype, block_tokens: int) -> int:
    """Bytes of one block over all layers."""
    values = 2 * config.n_kv_heads * config.head_dim * block_tokens
    return config.n_layers * values * dtype.itemsize


class KVStore:
    """Blocks 0..n_blocks-1 of every layer. New blocks are zero, so that a masked read is finite."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, block_tokens: int, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.block_tokens = block_tokens
        self._shape = (block_tokens, 2, config.n_kv_heads, config.head_dim)
        self.layers = [
            torch.zeros(0, *self._shape, dtype=dtype, device=device) for _ in range(config.n_layers)
        ]

    @property
    def n_blocks(self) -> int:
        """Blocks there are now."""
        return self.layers[0].shape[0]

    def keys(self, layer: int) -> torch.Tensor:
        """View [n_blocks, block_tokens, kv_heads, head_dim]."""
        return self.layers[layer][:, :, 0]

    def values(self, layer: int) -> torch.Tensor:
        """View [n_blocks, block_tokens, kv_heads, head_dim]."""
        return self.layers[layer][:, :, 1]

    def resize(self, n_blocks: int) -> None:
        """Grow or shrink, keeping the content of the blocks that stay.

        Layer by layer, so that the peak is one layer above the larger of both sizes. Out of memory
        on the way, the layers are brought back to equal size and the error goes on.
        """
        if n_blocks < 0:
            raise ValueError(f"n_blocks must not be negative, got {n_blocks}")
        before = self.n_blocks
        try:
            for index in range(len(self.layers)):
                self._resize_layer(index, n_blocks)
        except (MemoryError, torch.OutOfMemoryError, RuntimeError):
            for index, layer in enumerate(self.layers):
                if layer.shape[0] > before:
                    self.layers[index] = layer[:before].clone()
            raise

    def _resize_layer(self, index: int, n_blocks: int) -> None:
        old = self.layers[index]
        if old.shape[0] == n_blocks:
            return
        # zeros, not empty: on a CPU the pages of blocks never used are then never touched.
        new = torch.zeros(n_blocks, *self._shape, dtype=old.dtype, device=old.device)
        kept = min(n_blocks, old.shape[0])
        new[:kept] = old[:kept]
        self.layers[index] = new

    def checksum(self, blocks: tuple[int, ...]) -> int:
        """CRC-32 over the bytes of the named blocks, layer by layer, in the order given."""
        total = 0
        for layer in self.layers:
            for block in blocks:
                content = layer[block].contiguous().view(torch.uint8).cpu().numpy()
                total = zlib.crc32(content.tobytes(), total)
        return total
