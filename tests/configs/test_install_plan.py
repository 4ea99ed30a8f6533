"""Driver version, platform and an existing torch -> torch build and CuPy extra, as one table."""

from __future__ import annotations

import pytest

from configs.install_plan import CUDA12_INDEX, CUDA13_INDEX, TORCH, Machine, plan_install

TABLE = [
    # platform, driver, torch there, its CUDA -> torch to install, index, extra
    ("linux", None, None, None, TORCH, None, None),
    ("linux", "595.71.05", None, None, TORCH, None, "cu13"),
    ("linux", "580", None, None, TORCH, None, "cu13"),
    ("linux", "580.65.06", None, None, TORCH, None, "cu13"),
    ("linux", "579.99", None, None, TORCH, CUDA12_INDEX, "cu12"),
    ("linux", "535.104.05", None, None, TORCH, CUDA12_INDEX, "cu12"),
    ("linux", "525.60.13", None, None, TORCH, CUDA12_INDEX, "cu12"),
    ("linux", "525.60.11", None, None, TORCH, None, None),
    ("linux", "470.256.02", None, None, TORCH, None, None),
    ("win32", "581.08", None, None, TORCH, CUDA13_INDEX, "cu13"),
    ("win32", "566.36", None, None, TORCH, CUDA12_INDEX, "cu12"),
    ("win32", "527.41", None, None, TORCH, CUDA12_INDEX, "cu12"),
    ("win32", "526.98", None, None, TORCH, None, None),
    ("darwin", None, None, None, TORCH, None, None),
    # a torch that is there is kept; CuPy follows its CUDA
    ("linux", "595.71.05", "2.13.0+cu130", "13.0", None, None, "cu13"),
    ("linux", "595.71.05", "2.13.0+cu126", "12.6", None, None, "cu12"),
    ("linux", "535.104.05", "2.13.0+cu126", "12.6", None, None, "cu12"),
    ("linux", "535.104.05", "2.13.0+cu130", "13.0", None, None, None),
    ("linux", "595.71.05", "2.13.0+cpu", None, None, None, None),
    ("linux", None, "2.13.0+cu130", "13.0", None, None, None),
    ("linux", "470.256.02", "2.13.0+cu126", "12.6", None, None, None),
    ("darwin", None, "2.13.0", None, None, None, None),
    ("linux", None, "2.11.0", None, None, None, None),
    # one that we cannot use is replaced
    ("linux", "595.71.05", "2.10.0+cu128", "12.8", TORCH, None, "cu13"),
    ("linux", None, "2.5.1", None, TORCH, None, None),
    ("linux", None, "3.0.0", None, TORCH, None, None),
]


@pytest.mark.parametrize(
    ("platform", "driver", "torch", "torch_cuda", "install", "index", "extra"), TABLE
)
def test_plan_fits_the_machine(platform, driver, torch, torch_cuda, install, index, extra):
    plan = plan_install(Machine(platform, driver, torch, torch_cuda))
    assert (plan.torch, plan.index, plan.extra) == (install, index, extra)
    assert plan.why


def test_the_reason_names_the_driver_and_the_bound():
    plan = plan_install(Machine("linux", "470.256.02"))
    assert plan.why == "CPU: driver 470.256.02 is below 525.60.13, too old for CUDA 12"


def test_the_reason_names_a_torch_that_is_replaced():
    plan = plan_install(Machine("linux", None, "2.5.1"))
    assert plan.why == "CPU: no NVIDIA driver found; torch 2.5.1 is outside torch>=2.11,<3"


def test_the_requirement_is_the_one_of_the_package(project_root):
    assert f'"{TORCH}",' in (project_root / "pyproject.toml").read_text(encoding="utf-8")
