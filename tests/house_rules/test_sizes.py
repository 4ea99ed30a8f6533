"""A file fits in one sitting, a function on one screen."""

from __future__ import annotations

import ast

from tests.house_rules.sources import all_python_files, cuda_files, relative, tree_of

FILE_LINES = 300
FUNCTION_LINES = 60
CUDA_LINES = 450

EXCEPTIONS: dict[str, str] = {}
"""path or path::function -> why it may be longer. Empty is the aim."""


def _line_count(path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_python_file_is_longer_than_300_lines():
    long = {
        relative(path): lines
        for path in all_python_files()
        if (lines := _line_count(path)) > FILE_LINES and relative(path) not in EXCEPTIONS
    }
    assert long == {}


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
    long = {
        relative(path): lines
        for path in cuda_files()
        if (lines := _line_count(path)) > CUDA_LINES and relative(path) not in EXCEPTIONS
    }
    assert long == {}


def test_every_exception_still_exists():
    files = {relative(path) for path in (*all_python_files(), *cuda_files())}
    assert {name for name in EXCEPTIONS if name.partition("::")[0] not in files} == set()
