"""One linear from numbers to codes by a method. Knows no layer, no text, no file."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_actor.ops import PackedLinear, pack_codes
from engine_actor.quant.calibrate import InputMoments
from engine_actor.quant.gptq import gptq
from engine_actor.quant.grid import Grid, Steps, codes_of, half_scale, values_of
from engine_actor.quant.recipe import Method
from engine_actor.quant.refine import objective, refine
from engine_actor.quant.scale_search import absmax_steps, search_steps
from engine_actor.quant.stream import Dense

TABLE_ROWS = 4096
"""Rows of an embedding that are rounded at once."""
TABLE_SHRINKS = (1.0, 0.97, 0.94, 0.91, 0.88)


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """A linear in both forms: packed on the CPU, and the numbers it stands for, on its device.

    error: see relative_error.
    """

    packed: PackedLinear
    dense: Dense
    error: float


def round_linear(dense: Dense, grid: Grid, method: Method, moments: InputMoments | None) -> Rounded:
    """Codes and steps of one linear. `moments` of its inputs where the method needs them; they are
    used up. ValueError where the inputs are not finite.
    """
    weight = dense.weight
    if method.rounding == "nearest" or moments is None:
        steps = _nearest_steps(weight, grid, method, moments)
        scale, offset = steps.per_column(weight.shape[1], grid.width(weight.shape[1]))
        hessian = None if moments is None else moments.hessian()
        return _packed(dense, steps, codes_of(weight, scale, offset, grid), grid, hessian)
    activation = moments.mean_square().clone()
    curvature = moments.curvature(method.damp)
    if method.search == "none":
        steps = absmax_steps(weight, grid)
    else:
        by = {"activation": activation, "curvature": curvature.importance(), "mse": None}
        steps = search_steps(weight, grid, by[method.search])
    codes = gptq(weight, curvature, steps, grid)
    steps, codes = refine(weight, curvature, steps, codes, grid, method.rounds)
    return _packed(dense, steps, codes, grid, curvature.hessian)


def _nearest_steps(
    weight: torch.Tensor, grid: Grid, method: Method, moments: InputMoments | None
) -> Steps:
    if method.search == "none":
        return absmax_steps(weight, grid)
    if method.search == "mse" or moments is None:
        return search_steps(weight, grid)
    return search_steps(weight, grid, moments.mean_square())


def _packed(
    dense: Dense, steps: Steps, codes: torch.Tensor, grid: Grid, hessian: torch.Tensor | None
) -> Rounded:
    columns = codes.shape[1]
    scale, offset = steps.per_column(columns, grid.width(columns))
    rounded = values_of(codes, scale, offset)
    packed = PackedLinear(
        grid.bits,
        grid.group,
        columns,
        pack_codes(codes.to(torch.int8), grid.bits).cpu(),
        steps.scales.to(torch.float16).cpu(),
        offsets=None if steps.offsets is None else steps.offsets.to(torch.float16).cpu(),
        bias=None if dense.bias is None else dense.bias.cpu(),
    )
    return Rounded(
        packed, Dense(rounded, dense.bias), relative_error(dense.weight, rounded, hessian)
    )


def relative_error(
    weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor | None
) -> float:
    """Energy of the error in a linear's output over the output's own; without a Hessian of the
    weights themselves.
    """
    miss = weight - rounded
    if hessian is None:
        return float(miss.square().sum() / weight.square().sum().clamp_min(1e-30))
    error = objective(weight, rounded, hessian).sum()
    whole = objective(weight, torch.zeros_like(weight), hessian).sum()
    return float(error / whole.clamp_min(1e-30))


def round_table(
    table: torch.Tensor, grid: Grid, device: torch.device | None = None
) -> PackedLinear:
    """An embedding or a head [vocab, hidden] of any float dtype, rows apart, nearest codes.

    Rows of padding (all zero) become zeros. A chunk of rows is in memory as fp32 at once, on
    `device`, by default the table's; the result is on the CPU. ValueError where a number is not
    finite.
    """
    qweight, scales, offsets = [], [], []
    for rows in table.split(TABLE_ROWS):
        weight = rows.to(device=device or rows.device, dtype=torch.float32)
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("holds NaN or infinity, nothing can be made of it")
        steps = (_row_steps if grid.bits == 8 else search_steps)(weight, grid)
        scale, offset = steps.per_column(weight.shape[1], grid.width(weight.shape[1]))
        codes = codes_of(weight, scale, offset, grid).to(torch.int8)
        qweight.append(pack_codes(codes, grid.bits).cpu())
        scales.append(steps.scales.to(torch.float16).cpu())
        if steps.offsets is not None:
            offsets.append(steps.offsets.to(torch.float16).cpu())
    return PackedLinear(
        grid.bits,
        grid.group,
        table.shape[1],
        torch.cat(qweight),
        torch.cat(scales),
        offsets=torch.cat(offsets) if offsets else None,
    )


def _row_steps(weight: torch.Tensor, grid: Grid) -> Steps:
    """At 8 bits the best scale is a little below the one that clips nothing; a short search."""
    widest = absmax_steps(weight, grid)
    best, least = widest.scales, torch.full_like(widest.scales, torch.inf)
    for share in TABLE_SHRINKS:
        scales = half_scale(widest.scales * share)
        scale, _ = Steps(scales, None).per_column(weight.shape[1], grid.width(weight.shape[1]))
        miss = values_of(codes_of(weight, scale, None, grid), scale, None) - weight
        width = grid.width(weight.shape[1])
        error = torch.nn.functional.pad(miss.square(), (0, -weight.shape[1] % width))
        error = error.view(weight.shape[0], -1, width).sum(-1)
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    return Steps(best, None)
