"""GPTQ: round the columns one by one, and let the columns still to come make up for each error.

Frantar et al. 2023 (arXiv 2210.17323). Columns go in order of falling curvature (act-order) while
the groups stay those of the original order with steps chosen beforehand (static groups), so the
packed layout needs no permutation. Knows one linear: its weight and its Hessian.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_actor import ops
from engine_actor.quant.grid import Grid, Steps, values_of

BLOCK = 128
"""Columns between two updates of the rest: one product is far cheaper than its columns."""
LEAF = 128
"""Size at which a triangular matrix is inverted directly."""
DAMP = 0.01
"""Share of the Hessian's mean diagonal that is added to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Curvature:
    """A Hessian ready for GPTQ, shared by every linear that has the same input.

    hessian: fp32 [K, K], damped, dead inputs (never active) with 1 on the diagonal. order: i64 [K],
    columns by falling diagonal. inverse_root: upper U [K, K] with U.T @ U = inverse of the ordered
    hessian. dead: bool [K].
    """

    hessian: torch.Tensor
    order: torch.Tensor
    inverse_root: torch.Tensor
    dead: torch.Tensor

    @staticmethod
    def of(hessian: torch.Tensor, damp: float = DAMP, act_order: bool = True) -> Curvature:
        """hessian [K, K], the mean of x x.T (any positive factor). It is damped in place.

        A Hessian that is still singular to fp32 is damped tenfold until it is not; ValueError where
        it holds NaN or infinity.
        """
        diagonal = hessian.diagonal()
        if not bool(torch.isfinite(diagonal).all()):
            raise ValueError("the inputs of this linear are not finite")
        dead = diagonal <= 0
        diagonal[dead] = 1.0
        alive = diagonal[~dead]
        mean = float(alive.mean()) if alive.numel() else 1.0
        plain = torch.arange(len(diagonal), device=hessian.device)
        order = torch.argsort(diagonal, descending=True, stable=True) if act_order else plain
        diagonal += damp * mean
        for _ in range(6):
            root = _inverse_root(hessian, order)
            if root is not None:
                return Curvature(hessian, order, root, dead)
            damp *= 10
            diagonal += damp * mean
        raise ValueError("the inputs of this linear have no usable Hessian")

    def importance(self) -> torch.Tensor:
        """[K]: what a rounding error of each column costs once the later columns made up for it,
        1 / U[k, k]^2. The weights for a scale search before gptq().
        """
        values = torch.empty_like(self.inverse_root.diagonal())
        values[self.order] = self.inverse_root.diagonal().square().reciprocal()
        return values / values.mean()


def _inverse_root(hessian: torch.Tensor, order: torch.Tensor) -> torch.Tensor | None:
    """Upper U with U.T @ U = the ordered inverse, None where fp32 finds the Hessian singular.

    From behind: H = R @ R.T with R upper is an ordinary Cholesky factor read backwards, and U is
    R's inverse. Against factor, inverse and factor again that is a third of the time on a CPU, and
    the condition number is never squared. At most two matrices of this size beside the given one:
    at 7B each is 1.4 GiB.
    """
    backwards = order.flip(0)
    ordered = hessian[backwards][:, backwards]
    lower, failed = torch.linalg.cholesky_ex(ordered)
    del ordered
    if int(failed):
        return None
    upper = lower.flip(0, 1)
    del lower
    upper = upper.contiguous()  # LAPACK's and cuSOLVER's factors lie column by column
    _invert_upper(upper)
    return upper if bool(torch.isfinite(upper.diagonal()).all()) else None


def _invert_upper(matrix: torch.Tensor) -> None:
    """Invert an upper triangular matrix in place, by halves: nearly all of it is products."""
    size = matrix.shape[0]
    if size <= LEAF:
        unit = torch.eye(size, device=matrix.device, dtype=matrix.dtype)
        matrix.copy_(torch.linalg.solve_triangular(matrix, unit, upper=True))
        return
    half = size // 2
    first, last, corner = matrix[:half, :half], matrix[half:, half:], matrix[:half, half:]
    _invert_upper(first)
    _invert_upper(last)
    corner.copy_((first @ corner).neg_() @ last)


def gptq(weight: torch.Tensor, curvature: Curvature, steps: Steps, grid: Grid) -> torch.Tensor:
    """Codes fp32 [N, K] of weight fp32 [N, K] on the given steps."""
    columns = weight.shape[1]
    order, root = curvature.order, curvature.inverse_root
    scales, offsets = steps.per_column(columns, grid.width(columns))
    # Columns are rows here: each step then reads and writes consecutive memory.
    rest = weight.t()[order].contiguous()
    rest[curvature.dead[order]] = 0.0
    scales = scales.t()[order].contiguous()
    offsets = None if offsets is None else offsets.t()[order].contiguous()
    codes = torch.empty_like(rest)
    round_block = _round_block if ops.refuse_round_columns(weight) else ops.gptq_columns
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        part = slice(first, last)
        errors = round_block(
            rest[part],
            scales[part],
            None if offsets is None else offsets[part],
            root[part, part],
            codes[part],
            (grid.low, grid.high),
        )
        if last < columns:
            rest[last:].addmm_(root[first:last, last:].t(), errors, alpha=-1.0)
    restored = torch.empty_like(codes)
    restored[order] = codes
    return restored.t().contiguous()


def _round_block(
    rest: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    root: torch.Tensor,
    codes: torch.Tensor,
    limits: tuple[int, int],
) -> torch.Tensor:
    """As ops.gptq_columns, anywhere; `rest` is used up."""
    errors = torch.empty_like(rest)
    for k in range(rest.shape[0]):
        offset = None if offsets is None else offsets[k]
        shifted = rest[k] if offset is None else rest[k] - offset
        code = torch.round(shifted / scales[k]).clamp_(*limits)
        codes[k] = code
        error = (rest[k] - values_of(code, scales[k], offset)).div_(root[k, k])
        errors[k] = error
        rest[k + 1 :].addr_(root[k, k + 1 :], error, alpha=-1.0)
    return errors
