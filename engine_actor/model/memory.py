"""How much memory there is, and how much of it the KV cache may take.

Caps are our own arithmetic: a WDDM driver pages rather than refuses, and a container's limit is
not the machine's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from engine_actor import ops
from engine_actor.model.card_plan import Card
from engine_actor.model.kv_store import PoolMaker
from engine_actor.model.ledger import MIB, CardLedger

LOGGER = logging.getLogger(__name__)
PAGE_MIB = 12
"""torch takes at least 11 (large_segment_size_mb), and rounds large tensors up to 2."""
CPU_SHARE = 2
"""On a CPU the KV cache takes at most one part in so many of what is free: others live here."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes: free after loading, held back, expected peak of one step, left for the KV cache."""

    free: int
    reserve: int
    activations: int
    kv: int

    def __str__(self) -> str:
        parts = (f"{name} {getattr(self, name) / MIB:.0f} MiB" for name in self.__slots__)
        return ", ".join(parts)


def plan_memory(
    device: torch.device, *, reserve: int, activations: int, budget: int | None = None
) -> MemoryPlan:
    """What the KV cache may take now that the weights are loaded. All arguments in bytes;
    `budget` caps it. May be 0.
    """
    free = free_bytes(device)
    left = max(0, free - reserve - activations)
    if device.type == "cpu":
        left //= CPU_SHARE
    return MemoryPlan(free, reserve, activations, left if budget is None else min(left, budget))


SETTLING_BYTES = 31 * MIB
"""Just below the largest allocation (32 MiB) that glibc lets its thresholds grow to."""


def settle_allocator(device: torch.device) -> None:
    """Make the C allocator keep freed memory for the next step instead of giving it back.

    glibc serves a size from fresh pages until one of that size has been freed once; a prompt's
    activations are such sizes, and faulting their pages in again at every op cost five times the
    arithmetic of the norm and the activation (docs/log.md). Nothing happens on other allocators.
    """
    if device.type == "cpu":
        torch.empty(SETTLING_BYTES, dtype=torch.uint8)


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        return card_ledger(device).free()
    return min(_available_ram(), _container_headroom())


class TorchAllocator:
    """ledger.Allocator of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = int(torch.cuda.mem_get_info(device)[1])

    def card_free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def set_limit(self, limit: int) -> None:
        # torch multiplies by the total of the properties, which may differ from the driver's.
        total = torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), self._device)


@cache
def _ledger(index: int) -> CardLedger:
    return CardLedger(TorchAllocator(torch.device("cuda", index)))


def card_ledger(device: torch.device) -> CardLedger:
    """The one of the process for this CUDA device."""
    return _ledger(device_index(device))


def device_index(device: torch.device) -> int:
    """The number of a CUDA device; of the current one where none is named."""
    return torch.cuda.current_device() if device.index is None else device.index


def _available_ram() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _container_headroom() -> int:
    """Bytes below the control group's limit; without a limit, more than any machine has."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)


def keep_in_one_piece() -> None:
    """Let torch grow one range of addresses for each stream instead of many pieces: what a long run
    has freed is free for any size. Its pages as small as it allows: the last of every stream is not
    full. To be called before a weight is loaded; a torch or a platform that cannot do it goes on as
    before.
    """
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None:
        LOGGER.info("torch %s has no switch for expandable segments", torch.__version__)
        return
    change("expandable_segments:True")
    try:
        change(f"large_segment_size_mb:{PAGE_MIB}")
    except (RuntimeError, ValueError) as error:
        LOGGER.info("torch %s keeps its pages of 20 MiB: %s", torch.__version__, error)


def card_of(device: torch.device) -> tuple[Card, int]:
    """A CUDA device as a plan sees it, and the bytes that this process has on it already. Gives
    back what torch keeps for later.
    """
    torch.cuda.empty_cache()
    ledger = card_ledger(device)
    index = device_index(device)
    granularity = 0 if ops.why_no_virtual_memory(index) else ops.CudaMemory(index).granularity
    total = int(torch.cuda.mem_get_info(device)[1])
    return Card(total, ledger.outside, granularity), ledger.held


def pool_maker(device: torch.device) -> PoolMaker | str:
    """How the KV cache gets memory at fixed addresses on a device, or why it does not."""
    if device.type != "cuda":
        return "a CPU moves it"
    index = device_index(device)
    if reason := ops.why_no_virtual_memory(index):
        return reason
    memory, ledger = ops.CudaMemory(index), card_ledger(device)

    def make(block_bytes: Sequence[int], capacity: int) -> ops.VirtualPool:
        return ops.VirtualPool(
            block_bytes, capacity, memory, ledger.before_mapping, ledger.after_unmapping
        )

    return make


def memory_status(device: torch.device) -> dict[str, int | None]:
    """What is taken on a CUDA device now, in bytes; nothing to say of a CPU."""
    if device.type != "cuda":
        return {}
    ledger = card_ledger(device)
    return {
        "limit_bytes": ledger.cap,
        "torch_bytes": ledger.held - ledger.mapped,
        "kv_mapped_bytes": ledger.mapped,
        "outside_bytes": ledger.outside,
        "free_bytes": ledger.free(),
    }
