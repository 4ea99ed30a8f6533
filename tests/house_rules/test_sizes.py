"""A file fits in one sitting, a function on one screen."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.house_rules.sources import all_python_files, cuda_files, relative, tree_of

FILE_LINES = 300
FUNCTION_LINES = 60
CUDA_LINES = 450

EXCEPTIONS: dict[str, str] = {}
"""path or path::function -> why it may be longer. Empty is the aim."""


def _longer_than(limit: int, paths: list[Path]) -> dict[str, int]:
    """Lines of each file above the limit that is no exception."""
    counts = {relative(path): len(path.read_text("utf-8").splitlines()) for path in paths}
    return {name: n for name, n in counts.items() if n > limit and name not in EXCEPTIONS}


def test_no_python_file_is_longer_than_300_lines():
    assert _longer_than(FILE_LINES, all_python_files()) == {}


def test_no_function_is_longer_than_60_lines():
    long = {}
    for path in all_python_files():
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name, lines = f"{relative(path)}::{node.name}", node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES and name not in EXCEPTIONS:
                long[name] = lines
    assert long == {}


def test_no_cuda_file_is_longer_than_450_lines():
    assert _longer_than(CUDA_LINES, cuda_files()) == {}


def test_every_exception_still_exists():
    files = {relative(path) for path in (*all_python_files(), *cuda_files())}
    assert {name for name in EXCEPTIONS if name.partition("::")[0] not in files} == set()
