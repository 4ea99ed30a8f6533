"""What every format hands over: entries that were checked on headers and can be read later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_actor.load.refusal import refusal
from engine_actor.ops import DenseLinear, PackedLinear

FLOATS = ("F32", "F16", "BF16")

Weight = torch.Tensor | DenseLinear | PackedLinear
"""A norm is a 1-D tensor, everything else a linear (the embedding too: a linear's table)."""

Loaded = Weight | dict[str, Weight]
"""One weight, or the parts of a linear that turned out not to fit into one, by canonical name."""

Read = Callable[[str], torch.Tensor]

LARGEST_GROUP = 1 << 24
"""No row is as long; a number that no index holds would fail somewhere behind the door."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One canonical weight that is known to be whole: `load` reads its `sources` and builds it.

    `bits` and `group` are 0 for a weight that is not packed; `nbytes` counts the sources. `note`
    says in a few words where the loaded form is not bit for bit what the file means.
    """

    name: str
    sources: tuple[str, ...]
    nbytes: int
    load: Callable[[Read], Loaded]
    bits: int = 0
    group: int = 0
    note: str = ""


def require_group(where: str, group: object) -> int:
    """A group as a config names it: -1 for the whole row, or how many values. Raises
    CheckpointError.
    """
    if type(group) is not int or not (group == -1 or 1 <= group <= LARGEST_GROUP):
        is_huge = isinstance(group, int) and abs(group) > 10**18
        shown = "a huge number" if is_huge else repr(group)
        raise refusal(where, f"{shown} must be -1 or at least 1, at most {LARGEST_GROUP}")
    return group


def fuse_dense(parts: list[DenseLinear]) -> DenseLinear:
    """One linear whose rows are those of `parts` in order. Biases are all there or all absent."""
    if len(parts) == 1:
        return parts[0]
    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    return DenseLinear(torch.cat([part.weight for part in parts]), bias)


def can_fuse(parts: list[PackedLinear]) -> bool:
    """Whether one PackedLinear can hold the rows of all parts: same bits, group, kind and perm."""
    kinds = {(p.bits, p.group, p.in_features, p.offsets is None, p.bias is None) for p in parts}
    has_offsets = parts[0].offsets is not None
    if len(kinds) > 1 or (has_offsets and any(part.zeros is not None for part in parts)):
        return False
    first = parts[0].perm
    return all(_same(first, part.perm) for part in parts)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def fuse_packed(parts: list[PackedLinear]) -> PackedLinear:
    """One packed linear of all rows, bit exact. The caller has asked can_fuse."""
    if len(parts) == 1:
        return parts[0]

    def stack(field: str) -> torch.Tensor | None:
        tensors = [getattr(part, field) for part in parts]
        # cat promotes f16 to f32 where one part needs the wider offsets: exact.
        return None if tensors[0] is None else torch.cat(tensors)

    qweight, scales = stack("qweight"), stack("scales")
    assert qweight is not None
    assert scales is not None
    first = parts[0]
    return PackedLinear(
        first.bits,
        first.group,
        first.in_features,
        qweight,
        scales,
        offsets=stack("offsets"),
        zeros=_stacked_zeros(parts),
        bias=stack("bias"),
        perm=first.perm,
    )


def _stacked_zeros(parts: list[PackedLinear]) -> torch.Tensor | None:
    """A part without zero points has them all at 0."""
    if all(part.zeros is None for part in parts):
        return None
    return torch.cat(
        [
            torch.zeros_like(part.scales, dtype=torch.int8) if part.zeros is None else part.zeros
            for part in parts
        ]
    )


def join(name: str, parts: dict[str, DenseLinear | PackedLinear]) -> Loaded:
    """The linear `name` out of its parts in order; the parts themselves where they are unlike."""
    packed = [part for part in parts.values() if isinstance(part, PackedLinear)]
    dense = [part for part in parts.values() if isinstance(part, DenseLinear)]
    if len(packed) == len(parts) and can_fuse(packed):
        return fuse_packed(packed)
    if len(dense) == len(parts):
        return fuse_dense(dense)
    return dict(parts)


def refuse_leftovers(names: set[str], known: set[str]) -> None:
    """Raise CheckpointError for a tensor the model would not use: half a model is no model."""
    leftovers = sorted(names - known)
    if leftovers:
        more = f" (and {len(leftovers) - 1} more)" if len(leftovers) > 1 else ""
        raise refusal(leftovers[0], f"unexpected tensor{more}: this model family does not use it")
