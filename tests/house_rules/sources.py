"""Where the project's own files are, and what they import, read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("serve_app", "engine_actor", "kernels", "configs")
SCRIPTS_WITHOUT_SUFFIX = ("check", "serve", "test")


def product_files() -> list[Path]:
    """Every Python file that is installed."""
    return sorted(path for top in PRODUCT for path in (ROOT / top).rglob("*.py"))


def all_python_files() -> list[Path]:
    """Product, tests and scripts."""
    scripts = [ROOT / "scripts" / name for name in SCRIPTS_WITHOUT_SUFFIX]
    return sorted(
        [
            *product_files(),
            *(ROOT / "tests").rglob("*.py"),
            *(ROOT / "scripts").rglob("*.py"),
            *(path for path in scripts if path.exists()),
        ]
    )


def cuda_files() -> list[Path]:
    """Every CUDA source."""
    return sorted((ROOT / "kernels").rglob("*.cu"))


def relative(path: Path) -> str:
    """The path as the rules write it."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """The file's syntax tree, parsed once a run."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything the file imports, at the top or inside a function.

    `from a import b` counts as a.b as well, so that `from torch import cuda` is seen.
    """
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value, node.lineno


def _is_dynamic_import(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return bool(call.args) and name in {"import_module", "__import__"}


def attribute_uses(path: Path, owner: str, names: frozenset[str]) -> Iterator[tuple[str, int]]:
    """(owner.name, line) of each `owner.name` read in the file, name among `names`."""
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == owner
            and node.attr in names
        ):
            yield f"{owner}.{node.attr}", node.lineno
