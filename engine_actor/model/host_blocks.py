"""Slots in the host's memory, one KV block each, and the copies between them and the cache.

For a GPU the memory is page-locked, all of it once and for good. Knows bytes; who says what to copy
and when it is safe is work/host_copies.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from configs.schema import EngineConfig
from engine_actor import ops
from engine_actor.core.block_copies import BlockCopy
from engine_actor.core.budget import blocks_for_bytes
from engine_actor.errors import CheckpointError
from engine_actor.model.kv_store import KVStore
from engine_actor.model.ledger import MIB
from engine_actor.model.memory import device_index, free_bytes


def host_budget(config: EngineConfig) -> int:
    """Bytes that the host may keep; none without a prefix cache, whose blocks they would be."""
    return config.kv.host_budget_mb * MIB if config.kv.prefix_cache else 0


def require_host_memory(config: EngineConfig) -> None:
    """Raises CheckpointError where the budget is more than the host's memory that is free now."""
    budget, free = host_budget(config), free_bytes(torch.device("cpu"))
    if budget > free:
        asked = f"kv.host_budget_mb: {budget // MIB} MiB are asked for"
        raise CheckpointError(f"{asked}, {free // MIB} MiB of the host's memory are free")


def host_slots(config: EngineConfig, block_bytes: int) -> int:
    """Blocks that the host keeps under a configuration. Raises CheckpointError where the budget is
    less than one.
    """
    budget = host_budget(config)
    if not budget:
        return 0
    try:
        return blocks_for_bytes(budget, block_bytes)
    except ValueError as error:
        raise CheckpointError(f"kv.host_budget_mb: {error}") from None


class HostBlocks:
    """`n_slots` blocks of `kv` on the host. Raises CheckpointError where so much memory cannot be
    had. `reason`: why it copies without a kernel of its own, None where it has one.
    """

    def __init__(self, kv: KVStore, n_slots: int) -> None:
        self._kv = kv
        self._offsets = [0, *accumulate(kv.block_bytes)]
        self.nbytes = n_slots * self._offsets[-1]
        self._memory, host = _allocated(self.nbytes, kv.device)
        self._slots = host.view(n_slots, self._offsets[-1])
        self.reason = _why_no_kernel(kv)
        self._locked = ops.page_locked(kv.device)
        if self.reason is None:
            # Not in the step that first evicts a block.
            ops.load_copy_kernel()

    @torch.inference_mode()
    def copy(self, part: Sequence[BlockCopy]) -> None:
        """Put copies that go one way, no block and no slot twice, on the current stream."""
        moves = [(copy.block, copy.slot) for copy in part]
        arrays, to_host = self._kv.arrays(), part[0].to_host
        if self.reason is not None:
            ops.copy_blocks_plainly(moves, arrays, self._slots, to_host)
            return
        addresses = [array.data_ptr() for array in arrays]
        places = np.array([*addresses, *self._offsets], dtype=np.int64)
        pairs = np.array(moves, dtype=np.int32)
        # The kernel reads the lists where they are.
        lease = self._locked.lease(places.nbytes + pairs.nbytes)
        lease.memory.numpy()[: places.nbytes] = places.view(np.uint8)
        lease.memory.numpy()[places.nbytes :] = pairs.reshape(-1).view(np.uint8)
        wide = lease.memory[: places.nbytes].view(torch.int64)
        narrow = lease.memory[places.nbytes :].view(torch.int32).view(-1, 2)
        n_arrays = len(arrays)
        ops.copy_blocks(narrow, wide[:n_arrays], wide[n_arrays:], self._slots, to_host)
        lease.note()


def _why_no_kernel(kv: KVStore) -> str | None:
    if kv.device.type != "cuda":
        return "not on a GPU"
    return ops.why_no_jit() or ops.refuse_copy_kernel(kv.block_bytes)


def _allocated(nbytes: int, device: torch.device) -> tuple[object, torch.Tensor]:
    """(what owns the memory, u8[nbytes])."""
    try:
        if device.type != "cuda":
            memory = torch.empty(nbytes, dtype=torch.uint8)
            return memory, memory
        pinned = ops.PinnedBytes(nbytes, device_index(device))
    except (ops.LaunchError, RuntimeError, MemoryError) as error:
        mib = nbytes // MIB
        raise CheckpointError(f"kv.host_budget_mb: no {mib} MiB on the host: {error}") from None
    return pinned, pinned.tensor
