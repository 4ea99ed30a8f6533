"""The KV cache: one tensor per layer, grown and shrunk while the engine runs.

A layer is [n_blocks, block_tokens, 2, kv_heads, head_dim]: keys of a token beside its values,
so that writing a token or gathering a block is one copy. In INT8 it is codes of that shape and
their scales (ops.Int8KV). Knows nothing of who owns a block.
"""

from __future__ import annotations

import zlib

import torch

from engine_actor import ops
from engine_actor.model.config import ModelConfig

KV_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}
SCALE_BYTES = 2
"""Of an INT8 cache's scale, one for each token and head of keys and of values."""


def kv_bytes_per_block(config: ModelConfig, dtype: torch.dtype, block_tokens: int) -> int:
    """Bytes of one block over all layers."""
    heads = 2 * config.n_kv_heads * block_tokens
    head = config.head_dim * dtype.itemsize + (SCALE_BYTES if dtype == torch.int8 else 0)
    return config.n_layers * heads * head


class KVStore:
    """Blocks 0..n_blocks-1 of every layer. New blocks are zero, so that a masked read is finite."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, block_tokens: int, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.block_tokens = block_tokens
        self._shape = (block_tokens, 2, config.n_kv_heads, config.head_dim)
        self._heads = (config.n_kv_heads, config.head_dim)
        self._device = device
        self.layers: list[ops.LayerCache] = [self._layer(0) for _ in range(config.n_layers)]

    def _layer(self, n_blocks: int) -> ops.LayerCache:
        if self.dtype == torch.int8:
            return ops.empty_int8_kv(n_blocks, self.block_tokens, *self._heads, self._device)
        # zeros, not empty: on a CPU the pages of blocks never used are then never touched.
        return torch.zeros(n_blocks, *self._shape, dtype=self.dtype, device=self._device)

    @property
    def n_blocks(self) -> int:
        """Blocks there are now."""
        return _n_blocks(self.layers[0])

    def keys(self, layer: int) -> torch.Tensor:
        """View [n_blocks, block_tokens, kv_heads, head_dim], codes in INT8."""
        return _tensors(self.layers[layer])[0][:, :, 0]

    def values(self, layer: int) -> torch.Tensor:
        """View [n_blocks, block_tokens, kv_heads, head_dim], codes in INT8."""
        return _tensors(self.layers[layer])[0][:, :, 1]

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
                if _n_blocks(layer) > before:
                    self.layers[index] = self._resized(layer, before)
            raise

    def _resize_layer(self, index: int, n_blocks: int) -> None:
        if _n_blocks(self.layers[index]) != n_blocks:
            self.layers[index] = self._resized(self.layers[index], n_blocks)

    def _resized(self, old: ops.LayerCache, n_blocks: int) -> ops.LayerCache:
        if isinstance(old, ops.Int8KV):
            return old.resized(n_blocks)
        new = self._layer(n_blocks)
        kept = min(n_blocks, old.shape[0])
        new[:kept] = old[:kept]
        return new

    def checksum(self, blocks: tuple[int, ...]) -> int:
        """CRC-32 over the bytes of the named blocks, layer by layer, in the order given."""
        total = 0
        for layer in self.layers:
            for block in blocks:
                for tensor in _tensors(layer):
                    content = tensor[block].contiguous().view(torch.uint8).cpu().numpy()
                    total = zlib.crc32(content.tobytes(), total)
        return total


def _tensors(layer: ops.LayerCache) -> tuple[torch.Tensor, ...]:
    return (layer.codes, layer.scales) if isinstance(layer, ops.Int8KV) else (layer,)


def _n_blocks(layer: ops.LayerCache) -> int:
    return int(_tensors(layer)[0].shape[0])
