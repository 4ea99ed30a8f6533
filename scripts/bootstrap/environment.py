"""Makes and keeps .venv beside pyproject.toml: one slow first time, a stamp file ever after.

Standard library only. Which torch and which CuPy fit is decided by configs.install_plan; this file
measures the machine and runs pip.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

from configs.install_plan import InstallPlan, Machine, Platform, plan_install
from serve_app.launch.driver import nvidia_driver
from serve_app.launch.processes import exclusive

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = "deepinfer-stamp.json"
OWN_PACKAGES = ("configs", "kernels", "engine_actor", "serve_app")
INHERITED = "deepinfer-inherited.pth"


class BootstrapError(Exception):
    """The environment cannot be made; the message is one line and says what to do."""


def ensure_venv(extras: Iterable[str] = ("dev",)) -> str:
    """Path of .venv's python, with the project and `extras` installed in it.

    Instant where the stamp says that nothing changed. Exits the process with one line on failure.
    """
    try:
        return _ensured(frozenset(extras))
    except BootstrapError as error:
        sys.exit(f"error: {error}")


def python_in(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def stamp_key(root: Path) -> str:
    """Changes with whatever an installation depends on: requirements, constraints, interpreter,
    and the place of the checkout, which an editable installation holds.
    """
    digest = hashlib.sha256(f"{sys.version_info[:2]} {root}".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def constraint_lines(text: str, keep_torch: str | None) -> list[str]:
    """The constraints to install under. `keep_torch`: the version of a torch that stays as it is;
    its line then replaces ours, so that no dependency can move it.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if keep_torch is None:
        return lines
    others = [line for line in lines if not re.match(r"torch\s*[=<>!~]", line)]
    return [*others, f"torch=={keep_torch}"]


def installed_torch(site: Path) -> tuple[str, str | None] | None:
    """(version, CUDA version or None) of the torch in a site-packages folder, read from its
    version file: importing it takes seconds. None without one.
    """
    try:
        text = (site / "torch" / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"""^__version__\s*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
    cuda = re.search(r"""^cuda\b[^=]*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
    return (version[1], cuda[1] if cuda else None) if version else None


def _ensured(extras: frozenset[str]) -> str:
    python = python_in(VENV)
    with exclusive(ROOT / ".venv.lock", "waiting for another script that makes .venv"):
        stamped = _read_stamp()
        key = stamp_key(ROOT)
        fresh = stamped.get("key") == key and python.exists()
        if fresh and extras <= set(stamped["extras"]):
            return str(python)
        wanted = extras | (set(stamped["extras"]) if fresh else set())
        _install(python, sorted(wanted))
        (VENV / STAMP).write_text(json.dumps({"key": key, "extras": sorted(wanted)}))
    return str(python)


def _read_stamp() -> dict[str, object]:
    try:
        stamp = json.loads((VENV / STAMP).read_text())
        return stamp if isinstance(stamp.get("extras"), list) else {}
    except (OSError, ValueError, AttributeError):
        return {}


def _install(python: Path, extras: list[str]) -> None:
    if not python.exists():
        print(f"making {VENV} (first start only)", flush=True)
        _make_venv()
    (VENV / STAMP).unlink(missing_ok=True)  # a broken installation must not look whole
    plan, torch = _plan(python)
    print(f"installing for {plan.why}", flush=True)
    constraints = VENV / "constraints.txt"
    lines = constraint_lines((ROOT / "constraints.txt").read_text(), None if plan.torch else torch)
    constraints.write_text("\n".join(lines) + "\n")
    names = [*extras, *([plan.extra] if plan.extra else [])]
    target = f"{ROOT}[{','.join(names)}]" if names else str(ROOT)
    command = [str(python), "-m", "pip", "install", "--editable", target]
    command += ["--constraint", str(constraints)]
    if plan.index:
        command += ["--extra-index-url", plan.index]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code != 0:
        # A negative code is a signal: somebody or the kernel ended pip, which then says nothing.
        raise BootstrapError(f"pip could not install the project (exit code {code}); see above")
    _compile(python)


def _make_venv() -> None:
    if importlib.util.find_spec("ensurepip") is None:
        raise BootstrapError(
            "this Python has no ensurepip (on Debian and Ubuntu: apt install python3-venv)"
        )
    shutil.rmtree(VENV, ignore_errors=True)
    venv.EnvBuilder(with_pip=True, symlinks=sys.platform != "win32").create(VENV)


def _plan(python: Path) -> tuple[InstallPlan, str | None]:
    """The plan for this machine, and the version of a torch that is there already."""
    site = _site_packages(python)
    found = installed_torch(site)
    if found is None:
        found = _inherit_torch(site)
    version, cuda = found or (None, None)
    return plan_install(Machine(_platform(), nvidia_driver(), version, cuda)), version


def _inherit_torch(site: Path) -> tuple[str, str | None] | None:
    """Make the launching interpreter's torch visible in .venv, where it has one that fits: a path
    file costs nothing, a second copy gigabytes.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).parent.parent
    found = installed_torch(source)
    if found is None or plan_install(Machine(_platform(), None, *found)).torch is not None:
        return None
    print(f"keeping torch {found[0]} of {source}", flush=True)
    (site / INHERITED).write_text(f"{source}\n")
    return found


def _site_packages(python: Path) -> Path:
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def _platform() -> Platform:
    return sys.platform if sys.platform in ("win32", "darwin") else "linux"


def _compile(python: Path) -> None:
    """Byte-code for everything, once: without it every Ray process compiles at each start, and
    `serve run` needs 45 s instead of 15.
    """
    print("compiling byte-code", flush=True)
    folders = [str(_site_packages(python)), *(str(ROOT / name) for name in OWN_PACKAGES)]
    subprocess.run([str(python), "-m", "compileall", "-qq", "-j", "0", *folders], check=False)
