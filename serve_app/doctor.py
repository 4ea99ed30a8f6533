"""What this machine can do, what would be chosen here and why; who owns our top-level names.

Collects facts from the packages' metadata first; torch is loaded last, by the engine's own
functions. Starts nothing and changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from configs.install_plan import InstallPlan, Machine, Platform, plan_install
from configs.schema import AppArgs
from serve_app.launch.driver import nvidia_driver

Level = Literal["ok", "note", "problem"]
PYTHON = ((3, 11), (3, 14))
NEEDED = ("ray", "torch", "tokenizers", "safetensors", "pydantic", "jinja2", "huggingface_hub")
OPTIONAL = ("cupy-cuda12x", "cupy-cuda13x", "transformers", "matplotlib")
HUGGING_FACE_KERNELS = "kernels"
_MARKS = {"ok": " ", "note": "-", "problem": "!"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A `problem` keeps the server from running as configured."""

    area: str
    text: str
    level: Level = "ok"


def examine(args: AppArgs) -> list[Finding]:
    """Every finding, in the order of the report."""
    driver = nvidia_driver()
    found = [*machine_findings(), *package_findings(), *gpu_findings(driver), *name_findings()]
    if importlib.util.find_spec("torch") is not None:
        found += choice_findings(args)
    return found


def render(findings: Sequence[Finding]) -> str:
    """The report as text: areas as headings, `!` before a problem, `-` before a note."""
    lines: list[str] = []
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            lines.append(area)
        lines.append(f" {_MARKS[finding.level]} {finding.text}")
    problems = sum(finding.level == "problem" for finding in findings)
    lines.append(f"{problems} problem{'s' * (problems != 1)}")
    return "\n".join(lines)


def machine_findings() -> list[Finding]:
    """Platform, Python and cores."""
    low, high = PYTHON
    version = sys.version_info[:2]
    fits = low <= version < high
    wanted = f"needs >= {low[0]}.{low[1]}, < {high[0]}.{high[1]}"
    python = f"Python {platform.python_version()}" + ("" if fits else f"; {wanted}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        Finding("machine", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        Finding("machine", python, "ok" if fits else "problem"),
        Finding("machine", f"{cores} CPU cores for this process"),
    ]


def package_findings(version_of: Callable[[str], str | None] | None = None) -> list[Finding]:
    """What is installed, of what is needed and of what is welcome."""
    version_of = version_of or installed_version
    found = []
    for name in NEEDED:
        version = version_of(name)
        text = f"{name} {version}" if version else f"{name} is missing"
        found.append(Finding("packages", text, "ok" if version else "problem"))
    for name in OPTIONAL:
        if version := version_of(name):
            found.append(Finding("packages", f"{name} {version}"))
    return found


def gpu_findings(
    driver: str | None, version_of: Callable[[str], str | None] | None = None
) -> list[Finding]:
    """The driver, and the torch build and CuPy extra that fit it."""
    version_of = version_of or installed_version
    plan = install_plan(driver, version_of("torch"))
    found = [Finding("GPU", f"NVIDIA driver {driver}" if driver else "no NVIDIA driver found")]
    found.append(Finding("GPU", f"fitting install: {plan.why}"))
    if plan.extra is not None:
        package = f"cupy-cuda{plan.extra.removeprefix('cu')}x"
        if version_of(package) is None:
            text = f"{package} is not installed: pip install 'deepinfer-sm86[{plan.extra}]'"
            found.append(Finding("GPU", text, "note"))
    return found


def install_plan(driver: str | None, torch: str | None) -> InstallPlan:
    """The plan for this platform. A torch's CUDA is read off its version ("2.13.0+cu130")."""
    local = (torch or "").partition("+")[2]
    cuda = f"{local[2:-1]}.{local[-1]}" if local.startswith("cu") and local[2:].isdigit() else None
    known = sys.platform if sys.platform in ("linux", "win32", "darwin") else "linux"
    return plan_install(Machine(cast(Platform, known), driver, torch, cuda))


def name_findings() -> list[Finding]:
    """Who owns `kernels` and `configs`: both names are common (docs/adr/0001)."""
    root = Path(__file__).resolve().parent.parent
    return [_owner("kernels", root), _owner("configs", root)] + (
        [Finding("names", "Hugging Face's kernels is installed too; both are usable", "note")]
        if installed_version(HUGGING_FACE_KERNELS)
        else []
    )


def _owner(name: str, root: Path) -> Finding:
    spec = importlib.util.find_spec(name)
    folders = _folders(spec.submodule_search_locations if spec else None)
    if root / name in folders:
        return Finding("names", f"{name}: {root / name}")
    if name == "kernels":
        # Theirs is a regular package and is found first; our door adds our folder to its path.
        text = f"kernels: {', '.join(map(str, folders))}, ours is added by the engine's door"
        return Finding("names", text, "note")
    where = ", ".join(map(str, folders)) or "nowhere"
    return Finding("names", f"{name} is taken by {where}, ours is {root / name}", "problem")


def _folders(locations: Iterable[str] | None) -> list[Path]:
    return [Path(location).resolve() for location in locations or ()]


def choice_findings(args: AppArgs) -> list[Finding]:
    """The device and the backends that a server with this configuration would use, with reasons."""
    from configs.load import ConfigError, cache_dir
    from engine_actor import capabilities
    from engine_actor.errors import CheckpointError
    from engine_actor.load.checkpoint import context_length
    from serve_app.placement import installed_torch_cuda, place

    try:
        placement = place(args.engine, capabilities.usable_gpus(), installed_torch_cuda())
        found = [Finding("choice", f"device {placement.device}: {placement.why}")]
        found.append(Finding("choice", capabilities.describe_device(placement.device)))
        checkpoint = capabilities.checkpoint_on_disk(args.model.path, cache_dir())
    except (ConfigError, CheckpointError) as error:
        return [Finding("choice", str(error), "problem")]
    if checkpoint is None:
        text = f"model {args.model.path} is not on this machine yet; the first start fetches it"
        return [*found, Finding("choice", text, "note")]
    try:
        context = context_length(args.model, checkpoint)
        found.append(Finding("choice", f"context: {context} tokens at most"))
        lines = capabilities.describe_choices(args.engine, placement.device, checkpoint)
        found += [Finding("choice", line) for line in lines]
        if placement.device == "cuda":
            found += memory_findings(args, checkpoint.folder)
    except (ValueError, CheckpointError) as error:
        return [*found, Finding("choice", str(error), "problem")]
    return found


def memory_findings(args: AppArgs, folder: Path) -> list[Finding]:
    """The memory plan of this machine's GPU, a problem where it does not fit. Raises
    CheckpointError.
    """
    from engine_actor import capabilities

    plan = capabilities.memory_plan(args, folder, None, 0)
    lines = capabilities.render(plan).splitlines()
    level: Level = "ok" if plan.refusal is None else "problem"
    return [*(Finding("memory", line) for line in lines[:-1]), Finding("memory", lines[-1], level)]


def installed_version(name: str) -> str | None:
    """A distribution's version, None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
