"""OpKey and OpSpec: what a backend is asked about, and what every backend must agree with.

Knows no backend and no tensor layout beyond names; tests, benches and the doctor read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OpKey:
    """One question to a backend: can you do this?

    op: the op's name. device: torch device type ("cpu", "cuda"). dtype: the activations' dtype
    as torch prints it without the module ("float32", "bfloat16"). m, n, k: rows of activations,
    out- and in-features; 0 where the op has no such axis or it is not known yet.
    bits: of the weight codes, 0 for dense weights. group: values per scale, 0 for dense.
    exact: True where the result must not depend on the other rows of the batch.
    affine: what a group adds to its codes: "" (w = s q), "offsets" or "zeros". perm: whether the
    columns are stored in another order than that of x. sm: 86 for compute capability 8.6, 0 where
    it is not a GPU or not asked.
    """

    op: str
    device: str
    dtype: str
    m: int = 0
    n: int = 0
    k: int = 0
    bits: int = 0
    group: int = 0
    exact: bool = False
    affine: str = ""
    perm: bool = False
    sm: int = 0


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The contract of one op.

    axes: one line per axis letter. reference: the torch twin, any device, obvious rather than fast.
    tolerance: per activation dtype, the largest difference from the reference relative to the
    largest reference value. bytes_of, flops_of: what a call must move and compute at the least, by
    its key; None where nobody has asked yet.
    """

    name: str
    axes: tuple[tuple[str, str], ...]
    reference: Callable[..., Any]
    tolerance: tuple[tuple[str, float], ...]
    bytes_of: Callable[[OpKey], int] | None = None
    flops_of: Callable[[OpKey], int] | None = None

    def allowed(self, dtype: str) -> float:
        """The tolerance for activations of `dtype`. Raises KeyError where none was agreed."""
        return dict(self.tolerance)[dtype]
