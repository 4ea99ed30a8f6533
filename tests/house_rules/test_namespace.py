"""`kernels` is a namespace shared with Hugging Face's distribution of that name (docs/adr/0001)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest

from tests.house_rules.sources import ROOT

HUGGING_FACE_MODULES = frozenset(
    "archs backends benchmark benchmarks cli compat deps hf_hub importer install layer load "
    "locking resolver status validate variants verify".split()
)
"""Modules of the `kernels` distribution 0.17.2."""


def _parts_of_ours() -> set[str]:
    """Names directly under kernels/ that Python would import."""
    return {
        path.stem
        for path in (ROOT / "kernels").iterdir()
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
    }


def _installed_modules() -> set[str]:
    """Modules of an installed Hugging Face `kernels`, empty where there is none."""
    try:
        files = importlib.metadata.files("kernels") or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    parts = (file.parts for file in files)
    return {p[1].removesuffix(".py") for p in parts if len(p) > 1 and p[0] == "kernels"}


def test_kernels_has_no_init():
    """With one, transformers fails to import wherever Hugging Face's kernels is installed."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_no_name_of_ours_is_a_module_of_hugging_face_kernels():
    assert _parts_of_ours() & (HUGGING_FACE_MODULES | _installed_modules()) == set()


def test_every_part_of_kernels_is_a_regular_package():
    """Namespace finding would install an empty folder too; a part is a package with a docstring."""
    bare = {
        path.name
        for path in (ROOT / "kernels").iterdir()
        if path.is_dir() and list(path.glob("*.py")) and not (path / "__init__.py").exists()
    }
    assert bare == set()


def test_configs_is_a_regular_package():
    """A user's own `configs/` folder without __init__ then never shadows ours."""
    assert (ROOT / "configs" / "__init__.py").exists()


def test_tests_and_scripts_are_never_installed():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("include = "))
    assert line == 'include = ["serve_app*", "engine_actor*", "kernels*", "configs*"]'


USE_BOTH = """
from engine_actor import _mount
_mount.mount()
_mount.mount()
import kernels, kernels.layer, kernels.spec.op
print(kernels.CUDAProperties, kernels.layer.NAME, kernels.spec.op.OpSpec.__name__)
print(len(list(kernels.__path__)))
"""


@pytest.mark.parametrize("order", ["theirs first", "ours first"])
def test_both_kernels_can_be_used(tmp_path, order):
    """Theirs is a regular package and wins the name wherever it is on the path."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("CUDAProperties = 'theirs'\n")
    (package / "layer.py").write_text("NAME = 'their layer'\n")
    folders = [str(tmp_path), str(ROOT)]
    path = os.pathsep.join(folders if order == "theirs first" else reversed(folders))
    done = subprocess.run(
        [sys.executable, "-P", "-c", USE_BOTH],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["theirs their layer OpSpec", "2"], done.stderr
