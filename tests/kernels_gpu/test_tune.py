"""Tuning on a real card: the times are times, and the table is one the dispatcher reads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from kernels.linear.cuda import BACKENDS
from kernels.linear.row_policy import MOST_ROWS
from kernels.linear.tune import Shape, tune_this_card
from kernels.spec.device import card_name, compute_capability
from kernels.spec.tuned import tuned_tables

pytestmark = pytest.mark.gpu


def test_a_small_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows cover every number of rows once; the file is the first table of this card."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("kernels.linear.tune.TUNED_ROWS", (1, 16, 511))
    path, rows = tune_this_card([Shape(256, 512, 4, 128)], lambda *step: None)
    assert rows[0].m[0] == 1
    assert rows[-1].m[1] == MOST_ROWS - 1
    assert all(later.m[0] == row.m[1] + 1 for row, later in itertools.pairwise(rows))
    assert {row.backend for row in rows} <= {backend.name for backend in BACKENDS}
    sm = compute_capability(torch.device("cuda"))
    mine, _ = tuned_tables(sm, card_name())
    assert mine.source == str(path)
    assert mine.rows == tuple(rows)
