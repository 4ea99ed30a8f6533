"""How many blocks of a kernel one multiprocessor holds, from registers, shared memory and threads.

The rules and limits are those of NVIDIA's CUDA C++ programming guide, "Compute capabilities" and
"Occupancy"; tests on a GPU compare with the driver's own answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.jit.cubin_cache import Resources
from kernels.jit.kernel import Variant
from kernels.jit.nvrtc import nvrtc

WARP = 32
REGISTERS = 64 * 1024
REGISTER_UNIT = 256
"""Registers are given to a warp in units of so many."""
WARPS_PER_ALLOCATION = 4
"""A multiprocessor has four parts, and a block's warps are dealt to them evenly."""
SHARED_UNIT = 128
SHARED_RESERVED = 1024
"""What the driver takes of each block's shared memory for itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one multiprocessor. shared_bytes: all of it; warps and blocks: at once."""

    warps: int
    blocks: int
    shared_bytes: int


BLOCK_SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Most shared memory of one block, in bytes."""
SHOWN = 86
"""The architecture of the page: the smallest card the project is for."""
LIMITS = {
    80: Limits(64, 32, 164 * 1024),
    86: Limits(48, 16, 100 * 1024),
    89: Limits(48, 24, 100 * 1024),
    90: Limits(64, 32, 228 * 1024),
}


def blocks_per_multiprocessor(took: Resources, threads: int, dynamic_shared: int, sm: int) -> int:
    """Blocks of `threads` that fit at once; 0 where not even one does."""
    limits = LIMITS[sm]
    warps = -(-threads // WARP)
    per_warp = -(-took.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    fitting_warps = REGISTERS // WARPS_PER_ALLOCATION // per_warp * WARPS_PER_ALLOCATION
    shared = took.shared_bytes + dynamic_shared + SHARED_RESERVED
    shared = -(-shared // SHARED_UNIT) * SHARED_UNIT
    return min(
        limits.blocks,
        limits.warps // warps,
        fitting_warps // warps,
        limits.shared_bytes // shared,
    )


def occupancy_page(variants: Sequence[Variant], sm: int = SHOWN) -> str:
    """The table of docs/kernels/occupancy.md."""
    limits = LIMITS[sm]
    version = ".".join(map(str, nvrtc().version))
    lines = (
        f"# Occupancy on sm_{sm}",
        "",
        "Written by `python scripts/write_kernel_docs.py`; a test says when a kernel is missing.",
        f"Registers and shared memory are NVRTC {version}'s; how many blocks a multiprocessor",
        f"holds at once follows from them: at most {limits.blocks} blocks, {limits.warps} warps,",
        f"{REGISTERS} registers, {limits.shared_bytes // 1024} KiB of shared memory. In brackets:",
        "the budget. A row says so if a kernel spills.",
        "",
        "| kernel | defines | threads | registers | shared KiB | blocks | warps |",
        "|---|---|---|---|---|---|---|",
        *(_row(variant, sm) for variant in variants if variant.first_sm <= sm),
    )
    return "\n".join(lines) + "\n"


def row_head(variant: Variant) -> str:
    """Which kernel a row of the page is about: its first three columns. Compiles nothing."""
    defines = " ".join(f"{name}={value}" for name, value in sorted(variant.defines.items()))
    name = f"`{variant.source.path}` {variant.entry}"
    return f"| {name} | {defines or '-'} | {variant.threads} |"


def _row(variant: Variant, sm: int) -> str:
    took = variant.kernel().resources(sm)
    blocks = blocks_per_multiprocessor(took, variant.threads, variant.shared_bytes, sm)
    shared = (took.shared_bytes + variant.shared_bytes) / 1024
    spills = f", {took.spill_bytes} B spilled" if took.spill_bytes else ""
    return (
        f"{row_head(variant)} {took.registers} ({variant.max_registers}){spills} "
        f"| {shared:.1f} ({variant.max_shared_bytes / 1024:.1f}) "
        f"| {blocks} | {blocks * -(-variant.threads // WARP)} |"
    )
