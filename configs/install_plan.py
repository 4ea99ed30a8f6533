"""Which torch build and which CuPy extra fit a machine: a pure function and its table.

Knows nothing of pip, subprocesses or this machine: `scripts/bootstrap.py` measures and installs.
Standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Extra = Literal["cu12", "cu13"]
Platform = Literal["linux", "win32", "darwin"]

TORCH = "torch>=2.11,<3"
TORCH_RANGE = ((2, 11), (3, 0))
CUDA12_INDEX = "https://download.pytorch.org/whl/cu126"
CUDA13_INDEX = "https://download.pytorch.org/whl/cu130"

# NVIDIA's minimum driver for any minor release of a CUDA major (minor version compatibility).
CUDA13_DRIVER = (580,)
CUDA12_DRIVER: dict[str, tuple[int, ...]] = {"linux": (525, 60, 13), "win32": (527, 41)}


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured. `driver`: NVIDIA driver version as nvidia-smi prints it, None without
    one. `torch`: version of a torch that is already there, with its CUDA version ("13.0") or None
    for a CPU build.
    """

    platform: Platform
    driver: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None


@dataclass(frozen=True, slots=True)
class InstallPlan:
    """What to install. `torch` None: keep what is there. `index`: an extra package index for torch,
    None for the usual one. `extra`: the CuPy extra of this project, None for none. `why`: one line.
    """

    torch: str | None
    index: str | None
    extra: Extra | None
    why: str


def plan_install(machine: Machine) -> InstallPlan:
    """The build that runs on this machine; a torch that is there and fits is kept.

    Without a usable NVIDIA driver the plan is the CPU's, never an error.
    """
    cuda_major, driver_note = _usable_cuda(machine)
    if machine.torch is not None and _in_range(machine.torch):
        return _keep(machine, cuda_major, driver_note)
    note = (
        f"{driver_note}; torch {machine.torch} is outside {TORCH}" if machine.torch else driver_note
    )
    if cuda_major == 13:
        # PyPI's Linux wheels of torch carry CUDA 13; its Windows wheels carry none.
        index = CUDA13_INDEX if machine.platform == "win32" else None
        return InstallPlan(TORCH, index, "cu13", f"CUDA 13: {note}")
    if cuda_major == 12:
        return InstallPlan(TORCH, CUDA12_INDEX, "cu12", f"CUDA 12: {note}")
    return InstallPlan(TORCH, None, None, f"CPU: {note}")


def _keep(machine: Machine, cuda_major: int | None, driver_note: str) -> InstallPlan:
    """Keep the torch that is there: CuPy then follows torch's CUDA major, not the newest one."""
    if machine.torch_cuda is None:
        return InstallPlan(None, None, None, f"CPU: torch {machine.torch} is there, without CUDA")
    built_for = _version(machine.torch_cuda)[0]
    if cuda_major is None or built_for > cuda_major:
        return InstallPlan(
            None, None, None, f"CPU: torch {machine.torch} needs CUDA {built_for}; {driver_note}"
        )
    extra: Extra | None = {12: "cu12", 13: "cu13"}.get(built_for)  # type: ignore[assignment]
    return InstallPlan(None, None, extra, f"CUDA {built_for}: torch {machine.torch} is there")


def _usable_cuda(machine: Machine) -> tuple[int | None, str]:
    """The newest CUDA major this driver runs, and one line that says why."""
    if machine.platform == "darwin":
        return None, "no CUDA on macOS"
    if machine.driver is None:
        return None, "no NVIDIA driver found"
    driver = _version(machine.driver)
    if driver >= CUDA13_DRIVER:
        return 13, f"driver {machine.driver}"
    lowest = CUDA12_DRIVER[machine.platform]
    if driver >= lowest:
        return 12, f"driver {machine.driver} is below {_dotted(CUDA13_DRIVER)}"
    return None, f"driver {machine.driver} is below {_dotted(lowest)}, too old for CUDA 12"


def _in_range(torch: str) -> bool:
    low, high = TORCH_RANGE
    return low <= _version(torch) < high


def _version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.13.0+cu130" is (2, 13, 0). () for text without any."""
    match = re.match(r"\d+(?:\.\d+)*", text.strip())
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
