"""A stranger finds a place by its name; a name that says nothing is refused."""

from __future__ import annotations

import ast

from tests.house_rules.sources import ROOT, all_python_files, product_files, relative, tree_of

EMPTY_WORDS = ("util", "utils", "helper", "helpers", "common", "misc", "stuff", "base_manager")


def test_no_file_is_named_by_an_empty_word():
    bad = {
        relative(path)
        for path in all_python_files()
        if set(path.stem.split("_")) & set(EMPTY_WORDS) or path.parent.name in EMPTY_WORDS
    }
    assert bad == set()


def test_every_product_file_says_what_it_is():
    silent = {
        relative(path)
        for path in product_files()
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree_of(path))
    }
    assert silent == set()


def test_every_test_module_says_what_it_holds():
    silent = {
        relative(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if not ast.get_docstring(tree_of(path))
    }
    assert silent == set()
