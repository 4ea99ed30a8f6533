"""What the documents point at exists: test ids, result files, sibling documents."""

from __future__ import annotations

import ast
import json
import re

import pytest

from engine_actor.core.metric_table import ENGINE_METRICS
from results import validate
from serve_app.ingress_metrics import INGRESS_METRICS
from tests.house_rules.sources import ROOT, tree_of

SEED_MAP = ROOT / "docs" / "seed_map.md"
ROW = re.compile(r"^\| (S-\d+) \|", re.MULTILINE)
NODE_ID = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def _tests_of(path: str) -> set[str]:
    """Every `function` and `Class::method` of a test file."""
    names = set()
    for node in tree_of(ROOT / path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            # A state machine or a TestCase is collected under a module-level name of its own.
            names |= {f"{node.name}::{part.name}" for part in ast.walk(node) if _is_function(part)}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def test_the_seed_map_has_every_row_once():
    rows = ROW.findall(SEED_MAP.read_text(encoding="utf-8"))
    assert rows == [f"S-{number:02d}" for number in range(1, 122)]


def test_every_test_named_in_the_seed_map_exists():
    named = NODE_ID.findall(SEED_MAP.read_text(encoding="utf-8"))
    assert named
    missing = {
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or name not in _tests_of(path)
    }
    assert missing == set()


def test_every_row_that_is_done_names_its_proof():
    done = [
        line
        for line in SEED_MAP.read_text(encoding="utf-8").splitlines()
        if ROW.match(line) and "| done |" in line
    ]
    assert done
    assert [line for line in done if not NODE_ID.search(line)] == []


def test_every_result_file_has_the_one_form():
    for path in sorted((ROOT / "docs" / "results").glob("*.json")):
        try:
            validate(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            pytest.fail(f"{path.name}: {error}")


def test_every_metric_is_documented():
    page = (ROOT / "docs" / "usage" / "metrics.md").read_text(encoding="utf-8")
    rows = {
        f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.help}."
        for metric in (*ENGINE_METRICS, *INGRESS_METRICS)
    }
    assert {row for row in rows if row not in page} == set()


def test_every_link_between_our_documents_leads_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    dead = {
        f"{page.relative_to(ROOT)} -> {target}"
        for page in pages
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    }
    assert dead == set()
