"""The column loops on a GPU against the same loops in plain torch, and a whole conversion there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine_actor.load.progress import silent
from engine_actor.quant.convert import convert
from engine_actor.quant.gptq import Curvature, gptq
from engine_actor.quant.grid import Grid
from engine_actor.quant.refine import descend, objective, refine
from engine_actor.quant.scale_search import search_steps
from engine_actor.quant.tune import Rates, Tuning
from kernels.pack.round_columns import gptq_columns, refuse_round_columns
from tests.quant.conftest import make_job, token_rows
from tests.quant.matrices import hessian, weight

__all__ = ["make_job"]
pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def _values(codes, steps, grid):
    scales, offsets = steps.per_column(codes.shape[1], grid.width(codes.shape[1]))
    return codes * scales if offsets is None else codes * scales + offsets


@pytest.mark.parametrize("columns", [33, 128, 300])
@pytest.mark.parametrize("grid", [Grid(3, 64), Grid(4, 32, offsets=True)], ids=str)
def test_both_loops_round_as_plain_torch_does(grid, columns):
    """Sums in another order may tip a tie; what the codes are worth may not change."""
    rounded = []
    for device in (torch.device("cpu"), GPU):
        w = weight(37, columns, 1).to(device)
        curvature = Curvature.of(hessian(columns, 1).to(device))
        steps = search_steps(w, grid)
        first = gptq(w, curvature, steps, grid)
        second = descend(w, curvature, steps, first, grid)
        assert float(first.min()) >= grid.low
        assert float(second.max()) <= grid.high
        errors = [
            float(objective(w, _values(codes, steps, grid), curvature.hessian).sum())
            for codes in (first, second)
        ]
        rounded.append((first.cpu(), second.cpu(), *errors))
    (cpu_first, cpu_second, *cpu_errors), (gpu_first, gpu_second, *gpu_errors) = rounded
    assert float((cpu_first == gpu_first).float().mean()) > 0.97
    assert float((cpu_second == gpu_second).float().mean()) > 0.97
    assert gpu_errors == pytest.approx(cpu_errors, rel=0.03)


def test_a_linear_rounded_twice_has_the_same_bits():
    """A sum in an order left to chance shows only where many threads add to one number."""
    w = weight(512, 2048, 2).to(GPU)
    grid, found = Grid(3, 128), []
    for _ in range(3):
        curvature = Curvature.of(hessian(2048, 2).to(GPU))
        steps = search_steps(w, grid)
        steps, codes = refine(w, curvature, steps, gptq(w, curvature, steps, grid), grid, 2)
        found.append((steps.scales.cpu(), codes.cpu()))
    for scales, codes in found[1:]:
        assert torch.equal(scales, found[0][0])
        assert torch.equal(codes, found[0][1])


def test_a_block_that_is_too_wide_is_refused():
    wide = torch.zeros(129, 8, device=GPU)
    with pytest.raises(ValueError, match="at most 128 columns"):
        gptq_columns(wide, wide, None, torch.eye(129, device=GPU), wide, (-4, 3))
    assert refuse_round_columns(wide.double()) == "rounds fp32, not torch.float64"


def test_a_model_is_converted_and_tuned_on_a_gpu(make_job, tmp_path):
    job = make_job("qwen2", "w3", head_std=0.3)
    plain = convert(job, tmp_path / "cpu", silent)
    rates = Rates(1e-2, 1e-2, 3e-3, 3e-3)
    tuning = Tuning(token_rows(160, 32, 3), 50, batch=8, rates=rates)
    there = dataclasses.replace(job, device=GPU, tuning=tuning)
    report = convert(there, tmp_path / "gpu", silent)
    assert report.scores.untuned.kl == pytest.approx(plain.rounded.kl, rel=0.15)
    assert report.rounded.kl < 0.9 * report.scores.untuned.kl
    again = convert(there, tmp_path / "again", silent)
    name = "model.safetensors"
    assert (tmp_path / "gpu" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert again.rounded == report.rounded
