"""Whether shipped kernels keep their budgets, and which of them to look at on which card.

Every variant is held to its budget on sm_86. Elsewhere the hungriest of each entry stand for all:
compiling the whole matrix takes four times as long and has never said anything else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kernels.jit.kernel import Variant
from kernels.jit.occupancy import BLOCK_SHARED, SHOWN, blocks_per_multiprocessor
from kernels.jit.shipped import ARCHITECTURES

Check = tuple[Variant, int]
"""A variant on an architecture."""


def home(variant: Variant) -> int:
    """The architecture on which the register budget counts: sm_86, or the first it is for."""
    return max(SHOWN, variant.first_sm)


def over_budget(variant: Variant, sm: int) -> str | None:
    """What the variant takes too much of on sm_<sm>, None where it keeps its budget."""
    took = variant.kernel().resources(sm)
    shared = took.shared_bytes + variant.shared_bytes
    if took.spill_bytes > variant.spill_bytes:
        return f"spills {took.spill_bytes} bytes"
    if shared > min(variant.max_shared_bytes, BLOCK_SHARED[sm]):
        return f"takes {shared} bytes of shared memory"
    if sm == home(variant) and took.registers > variant.max_registers:
        return f"takes {took.registers} registers"
    if not blocks_per_multiprocessor(took, variant.threads, variant.shared_bytes, sm):
        return f"no block of {variant.threads} threads fits"
    return None


def hungriest(variants: Sequence[Variant]) -> list[Variant]:
    """Of each entry, the variant with most registers and the one with most shared memory."""
    entries: dict[tuple[str, str], list[Variant]] = defaultdict(list)
    for variant in variants:
        entries[variant.source.path, variant.entry].append(variant)
    found = []
    for alike in entries.values():
        most_registers = max(alike, key=lambda v: v.kernel().resources(home(v)).registers)
        most_shared = max(alike, key=lambda v: v.shared_bytes)
        found += [most_registers] + ([most_shared] if most_shared is not most_registers else [])
    return found


def other_checks(variants: Sequence[Variant]) -> list[Check]:
    """The hungriest variants on every architecture but their home."""
    return [
        (variant, sm)
        for variant in hungriest(variants)
        for sm in ARCHITECTURES
        if sm >= variant.first_sm and sm != home(variant)
    ]


def all_checks(variants: Sequence[Variant]) -> list[Check]:
    """The whole matrix."""
    return [(v, sm) for v in variants for sm in ARCHITECTURES if sm >= v.first_sm]
