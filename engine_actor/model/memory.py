"""How much memory there is, and how much of it the KV cache may take.

Caps are our own arithmetic: a WDDM driver pages rather than refuses, and a container's limit is
not the machine's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

MIB = 1 << 20
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
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available_ram(), _container_headroom())


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
