"""The KV cache: one tensor per layer, grown and shrunk while the engine runs.

A layer is [n_blocks, block_tokens, 2, kv_heads, head_dim]: keys of a token beside its values,
so that writing a token or gathering a block is one copy. In INT8 it is codes of that shape and
their scales (ops.Int8KV). On a GPU the layers lie at fixed addresses where the driver can map
memory under them. Knows nothing of who owns a block.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from engine_actor import ops
from engine_actor.model.config import ModelConfig
from engine_actor.model.layer_ops import LayerCache

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
    return sum(array_block_bytes(config, dtype, block_tokens))


def array_block_bytes(config: ModelConfig, dtype: torch.dtype, block_tokens: int) -> list[int]:
    """Bytes of one block of each array of the cache: the layers, then in INT8 their scales."""
    heads = 2 * config.n_kv_heads * block_tokens
    arrays = [heads * config.head_dim * dtype.itemsize] * config.n_layers
    return arrays + ([heads * SCALE_BYTES] * config.n_layers if dtype == torch.int8 else [])


PoolMaker = Callable[[Sequence[int], int], ops.VirtualPool]
"""(bytes of a block of each array, capacity in blocks) -> a pool at addresses of its own."""


class KVStore:
    """Blocks 0..n_blocks-1 of every layer. New blocks are zero, so that a masked read is finite.

    With a pool the layers stay where they are for as long as the capacity is the same, whatever
    resize() does; without one a resize copies and moves them. make_pool: a maker, or why there is
    none. block_bytes: of one block of each array.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        block_tokens: int,
        device: torch.device,
        make_pool: PoolMaker | str = "torch's allocator holds it",
    ) -> None:
        self.dtype = dtype
        self.block_tokens = block_tokens
        self._shape = (block_tokens, 2, config.n_kv_heads, config.head_dim)
        self._heads = (config.n_kv_heads, config.head_dim)
        self.device = device
        self._make_pool = make_pool
        self.block_bytes = array_block_bytes(config, dtype, block_tokens)
        self._pool: ops.VirtualPool | None = None
        self.layers: list[LayerCache] = [self._layer(0) for _ in range(config.n_layers)]

    def _layer(self, n_blocks: int) -> LayerCache:
        if self.dtype == torch.int8:
            return ops.empty_int8_kv(n_blocks, self.block_tokens, *self._heads, self.device)
        # zeros, not empty: on a CPU the pages of blocks never used are then never touched.
        return torch.zeros(n_blocks, *self._shape, dtype=self.dtype, device=self.device)

    @property
    def n_blocks(self) -> int:
        """Blocks there are now."""
        return _n_blocks(self.layers[0])

    @property
    def why_not_fixed(self) -> str | None:
        """Why a resize may move the layers; None where it never does."""
        return self._make_pool if isinstance(self._make_pool, str) else None

    @property
    def nbytes(self) -> int:
        """Memory of the device that the cache takes now, with what rounding adds."""
        if self._pool is not None:
            return self._pool.mapped_bytes
        return self.n_blocks * sum(self.block_bytes)

    def addresses(self) -> tuple[int, ...]:
        """Of every layer's tensors: a captured graph is good for one set of them."""
        return tuple(tensor.data_ptr() for layer in self.layers for tensor in _tensors(layer))

    def arrays(self) -> list[torch.Tensor]:
        """Every array of the cache, [n_blocks, ...] each, in the order of block_bytes: the layers,
        then in INT8 their scales.
        """
        return [array for kind in zip(*map(_tensors, self.layers), strict=True) for array in kind]

    def keys(self, layer: int) -> torch.Tensor:
        """View [n_blocks, block_tokens, kv_heads, head_dim], codes in INT8."""
        return _tensors(self.layers[layer])[0][:, :, 0]

    def values(self, layer: int) -> torch.Tensor:
        """View [n_blocks, block_tokens, kv_heads, head_dim], codes in INT8."""
        return _tensors(self.layers[layer])[0][:, :, 1]

    def reserve(self, capacity: int) -> None:
        """Choose addresses for up to `capacity` blocks. Where that is another capacity than before
        the cache is empty afterwards; without a pool nothing happens.
        """
        if isinstance(self._make_pool, str) or (
            self._pool is not None and self._pool.capacity == capacity
        ):
            return
        self.layers = [self._layer(0) for _ in self.layers]
        if self._pool is not None:
            self._pool.close()
        self._pool = self._make_pool(self.block_bytes, capacity)
        self._show(0)

    def resize(self, n_blocks: int) -> None:
        """Grow or shrink, keeping the content of the blocks that stay. Out of memory, everything is
        as it was and the error goes on. Raises ValueError below 0.

        Without a pool it goes layer by layer, so that the peak is one layer above the larger size.
        """
        if n_blocks < 0:
            raise ValueError(f"n_blocks must not be negative, got {n_blocks}")
        if not isinstance(self._make_pool, str):
            self._resize_pool(n_blocks)
            return
        before = self.n_blocks
        try:
            for index in range(len(self.layers)):
                self._resize_layer(index, n_blocks)
        except (MemoryError, torch.OutOfMemoryError, RuntimeError):
            for index, layer in enumerate(self.layers):
                if _n_blocks(layer) > before:
                    self.layers[index] = self._resized(layer, before)
            raise

    def _resize_pool(self, n_blocks: int) -> None:
        before = self.n_blocks
        if self._pool is None or n_blocks > self._pool.capacity:
            self._move(n_blocks)
        else:
            self._pool.resize(n_blocks)
            self._show(before)

    def _move(self, capacity: int) -> None:
        """To a larger pool that nobody has reserved: the one growth that copies."""
        assert not isinstance(self._make_pool, str)
        old, old_pool = self.layers, self._pool
        pool = self._make_pool(self.block_bytes, capacity)
        pool.resize(capacity)
        self._pool = pool
        self._show(0)
        for mine, theirs in zip(self.layers, old, strict=True):
            for into, content in zip(_tensors(mine), _tensors(theirs), strict=True):
                into[: content.shape[0]] = content
        del old, theirs, content
        if old_pool is not None:
            old_pool.close()

    def _show(self, kept: int) -> None:
        """Put tensors over the pool as it is now; blocks from `kept` on are cleared, on the current
        stream.
        """
        assert self._pool is not None
        count, n_layers = self._pool.n_blocks, len(self.layers)
        arrays = [self._pool.tensor(index) for index in range(len(self.block_bytes))]
        for array, each in zip(arrays, self.block_bytes, strict=True):
            array[kept * each :].zero_()
        tables = [array.view(self.dtype).view(count, *self._shape) for array in arrays[:n_layers]]
        if self.dtype != torch.int8:
            self.layers = list(tables)
            return
        kv_heads = self._heads[0]
        scales = [
            array.view(torch.float16).view(count, self.block_tokens, kv_heads, 2)
            for array in arrays[n_layers:]
        ]
        self.layers = [ops.Int8KV(*both) for both in zip(tables, scales, strict=True)]

    def _resize_layer(self, index: int, n_blocks: int) -> None:
        if _n_blocks(self.layers[index]) != n_blocks:
            self.layers[index] = self._resized(self.layers[index], n_blocks)

    def _resized(self, old: LayerCache, n_blocks: int) -> LayerCache:
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


def _tensors(layer: LayerCache) -> tuple[torch.Tensor, ...]:
    return (layer.codes, layer.scales) if isinstance(layer, ops.Int8KV) else (layer,)


def _n_blocks(layer: LayerCache) -> int:
    return int(_tensors(layer)[0].shape[0])
