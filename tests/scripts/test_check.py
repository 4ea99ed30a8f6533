"""scripts/check finds its tools also where .venv only shares another interpreter's packages."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
import venv
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def _script() -> ModuleType:
    loader = SourceFileLoader("check_script", str(ROOT / "scripts" / "check"))
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("check_script", loader)
    )
    loader.exec_module(module)
    return module


def test_every_tool_runs_from_shared_packages(tmp_path):
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {"PATH": os.defpath, "HOME": str(tmp_path)}
    for name, command in _script().commands(str(python), fix=False):
        tool = command[: command.index("-m") + 2] if "-m" in command else command
        done = subprocess.run(
            [*tool, "--help"], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (name, done.stderr)
        assert "usage" in done.stdout.lower(), name
