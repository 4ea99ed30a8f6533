"""After GPTQ: better steps for the codes, better codes for the steps, in turns.

Both halves lower tr(E H E.T), E = W - W', and neither can raise it: the steps of a row are solved
by least squares over all its groups at once, the codes by coordinate descent. Knows one linear.
"""

from __future__ import annotations

import torch

from engine_actor import ops
from engine_actor.quant.gptq import BLOCK, Curvature
from engine_actor.quant.grid import Grid, Steps, grouped, half, half_scale, spread, values_of

ROWS = 1024
"""Rows solved at once: bounds the memory of [ROWS, G, G] systems."""
RIDGE = 1e-4


def objective(weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Error of each row, [N]: diag(E H E.T)."""
    miss = weight - rounded
    return ((miss @ hessian) * miss).sum(1)


def refine(
    weight: torch.Tensor,
    curvature: Curvature,
    steps: Steps,
    codes: torch.Tensor,
    grid: Grid,
    rounds: int,
) -> tuple[Steps, torch.Tensor]:
    """(steps, codes) after so many rounds of refit_steps and descend. weight, codes fp32 [N, K]."""
    for _ in range(rounds):
        steps = refit_steps(weight, curvature.hessian, steps, codes, grid)
        codes = descend(weight, curvature, steps, codes, grid)
    return steps, codes


def refit_steps(
    weight: torch.Tensor, hessian: torch.Tensor, steps: Steps, codes: torch.Tensor, grid: Grid
) -> Steps:
    """The least-squares steps of fixed codes; a row that they make no better keeps its own."""
    columns = weight.shape[1]
    width = grid.width(columns)
    scales, offsets = [], []
    for first in range(0, weight.shape[0], ROWS):
        rows = slice(first, first + ROWS)
        old = Steps(steps.scales[rows], None if steps.offsets is None else steps.offsets[rows])
        new = _solve(weight[rows], hessian, old, codes[rows], width)
        kept = _better(weight[rows], hessian, old, new, codes[rows], width)
        scales.append(kept.scales)
        offsets.append(kept.offsets)
    if steps.offsets is None:
        return Steps(torch.cat(scales), None)
    return Steps(torch.cat(scales), torch.cat([offset for offset in offsets if offset is not None]))


def _solve(
    weight: torch.Tensor, hessian: torch.Tensor, old: Steps, codes: torch.Tensor, width: int
) -> Steps:
    rows, columns = codes.shape
    n_groups = old.scales.shape[1]
    kinds = [codes] if old.offsets is None else [codes, torch.ones_like(codes)]
    size = n_groups * len(kinds)
    system = torch.empty(rows, size, size, device=codes.device)
    target = torch.empty(rows, size, device=codes.device)
    # What is left once the old steps are taken out: solving for the change keeps fp32 accurate.
    wanted = (weight - _rounded(codes, old, width)) @ hessian
    for i, left in enumerate(kinds):
        target[:, i * n_groups : (i + 1) * n_groups] = _sum_groups(left * wanted, width)
        for j in range(n_groups):
            columns_of = slice(j * width, min((j + 1) * width, columns))
            for m, right in enumerate(kinds):
                product = right[:, columns_of] @ hessian[columns_of]
                system[:, i * n_groups : (i + 1) * n_groups, m * n_groups + j] = _sum_groups(
                    left * product, width
                )
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal += RIDGE * diagonal.mean(1, keepdim=True) + 1e-12
    change, failed = torch.linalg.solve_ex(system, target)
    change[failed > 0] = 0.0
    change = torch.nan_to_num(change, nan=0.0, posinf=0.0, neginf=0.0)
    offsets = None if old.offsets is None else half(old.offsets + change[:, n_groups:])
    return Steps(half_scale(old.scales + change[:, :n_groups]), offsets)


def _sum_groups(values: torch.Tensor, width: int) -> torch.Tensor:
    """[N, K] -> [N, G]. Not index_add_: on a GPU its order, and so its bits, are chance."""
    return grouped(values, width).sum(-1)


def _better(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    old: Steps,
    new: Steps,
    codes: torch.Tensor,
    width: int,
) -> Steps:
    before = objective(weight, _rounded(codes, old, width), hessian)
    after = objective(weight, _rounded(codes, new, width), hessian)
    take = (after < before).unsqueeze(1)
    if old.offsets is None or new.offsets is None:
        return Steps(torch.where(take, new.scales, old.scales), None)
    return Steps(
        torch.where(take, new.scales, old.scales), torch.where(take, new.offsets, old.offsets)
    )


def _rounded(codes: torch.Tensor, steps: Steps, width: int) -> torch.Tensor:
    columns = codes.shape[1]
    offsets = None if steps.offsets is None else spread(steps.offsets, columns, width)
    return values_of(codes, spread(steps.scales, columns, width), offsets)


def descend(
    weight: torch.Tensor, curvature: Curvature, steps: Steps, codes: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """One sweep of coordinate descent: each code in turn is set to its best, all others fixed."""
    columns = weight.shape[1]
    width = grid.width(columns)
    order = curvature.order
    hessian = curvature.hessian[order][:, order].contiguous()
    scales, offsets = steps.per_column(columns, width)
    scales = scales.t()[order].contiguous()
    current = codes.t()[order].contiguous()
    rounded = values_of(
        current, scales, None if offsets is None else offsets.t()[order].contiguous()
    )
    # slope[k]: the pull on column k, H (w - w') for the columns as they are now.
    slope = hessian @ (weight.t()[order] - rounded)
    descend_block = _descend_block if ops.refuse_round_columns(weight) else ops.descend_columns
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        part = slice(first, last)
        limits = (grid.low, grid.high)
        moves = descend_block(slope[part], scales[part], hessian[part, part], current[part], limits)
        if last < columns:
            slope[last:].addmm_(hessian[last:, first:last], moves, alpha=-1.0)
    restored = torch.empty_like(current)
    restored[order] = current
    return restored.t().contiguous()


def _descend_block(
    slope: torch.Tensor,
    scales: torch.Tensor,
    hessian: torch.Tensor,
    codes: torch.Tensor,
    limits: tuple[int, int],
) -> torch.Tensor:
    """As ops.descend_columns, anywhere; `slope` is used up."""
    moves = torch.empty_like(slope)
    for k in range(slope.shape[0]):
        wish = slope[k] / (hessian[k, k] * scales[k])
        code = torch.round(codes[k] + wish).clamp_(*limits)
        move = (code - codes[k]).mul_(scales[k])
        codes[k] = code
        moves[k] = move
        slope[k + 1 :].addr_(hessian[k, k + 1 :], move, alpha=-1.0)
    return moves
