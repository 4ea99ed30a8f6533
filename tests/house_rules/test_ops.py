"""Every family of kernels has an obvious twin in torch, a contract, and tests that compare them."""

from __future__ import annotations

import ast

import pytest

from tests.house_rules.sources import ROOT, cuda_files, imported_modules, relative, tree_of

FAMILIES = ("linear", "attention", "kv", "elementwise", "sampling")
# Written with their first op; a folder with Python files must hold all of it.
PRESENT = [family for family in FAMILIES if list((ROOT / "kernels" / family).glob("[!_]*.py"))]


def _tests_of(family: str) -> list[str]:
    folders = [ROOT / "tests" / name for name in ("kernels_cpu", "kernels_gpu")]
    return [
        path.name
        for folder in folders
        for path in folder.rglob("test_*.py")
        if any(name.startswith(f"kernels.{family}") for name, _ in imported_modules(path))
    ]


def test_the_first_families_are_there():
    assert {"linear", "attention", "kv", "elementwise"} <= set(PRESENT)


def _twins(family: str) -> list[str]:
    """What of the family is written to be obviously right: functions named `*_reference`, and the
    batch-invariant fp32 backend."""
    found = []
    for path in (ROOT / "kernels" / family).glob("*.py"):
        names = [n.name for n in ast.walk(tree_of(path)) if isinstance(n, ast.FunctionDef)]
        found += [name for name in names if name.endswith(("_reference", "_exact"))]
    return found


@pytest.mark.parametrize("family", PRESENT)
def test_every_family_has_a_twin_in_torch(family):
    modules = {path.stem for path in (ROOT / "kernels" / family).glob("[!_]*.py")}
    # A family with op.py alone has one way to compute, plain torch: it is its own twin.
    assert modules == {"op"} or _twins(family) != []


@pytest.mark.parametrize("family", PRESENT)
def test_every_family_is_tested_against_it(family):
    assert _tests_of(family) != []


def test_every_cuda_file_has_a_python_wrapper_and_a_test():
    bare = {
        relative(path)
        for path in cuda_files()
        if not (list(path.parent.glob("cuda*.py")) or path.with_suffix(".py").exists())
        or not _tests_of(path.parent.name)
    }
    assert bare == set()
