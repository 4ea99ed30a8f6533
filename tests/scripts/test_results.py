"""The one result form: summaries are those of the raw values, and what is missing is named."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

import results
from results import CPU_FLAGS, make_record, make_row, percentile, validate, write_record


def _record():
    row = make_row({"streams": 4}, "decode", "tokens/s", [3.0, 1.0, 2.0, 10.0], warmup=1)
    return make_record("test", {"overlap": False}, [row], ["a note"])


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.99, 5.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.5),
        ([0.0, 10.0], 0.95, 9.5),
        (list(range(101)), 0.99, 99.0),
    ],
)
def test_percentile_is_linear_between_neighbours(values, share, expected):
    assert percentile(values, share) == pytest.approx(expected)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_the_half_percentile_is_the_median(values):
    assert percentile(values, 0.5) == pytest.approx(statistics.median(values), abs=1e-6)
    assert percentile(values, 0.0) == min(values)
    assert percentile(values, 1.0) == max(values)


def test_no_values_have_no_percentile():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_a_record_is_whole_and_survives_json(tmp_path):
    write_record(_record(), tmp_path / "deep" / "r.json")
    record = json.loads((tmp_path / "deep" / "r.json").read_text())
    validate(record)
    row = record["rows"][0]
    assert (row["n"], row["median"], row["min"], row["max"]) == (4, 2.5, 1.0, 10.0)
    assert row["p95"] == pytest.approx(8.95)
    assert record["switches"] == {"overlap": False}
    assert set(record["machine"]["cpu_flags"]) <= set(CPU_FLAGS)
    assert record["machine"]["cores"] >= 1


@pytest.mark.parametrize("field", ["commit", "machine", "switches", "rows", "notes"])
def test_a_missing_field_is_named(field):
    record = _record()
    del record[field]
    with pytest.raises(ValueError, match=f"record.{field} is missing"):
        validate(record)


def test_a_summary_that_is_not_of_its_raw_values_is_refused():
    record = _record()
    record["rows"][0]["median"] = 99.0
    with pytest.raises(ValueError, match=r"rows\[0\].median is 99.0, raw gives 2.5"):
        validate(record)


def test_a_field_of_ones_own_is_refused():
    with pytest.raises(ValueError, match=r"record\.speedup is not part"):
        validate(_record() | {"speedup": 2})
    with pytest.raises(ValueError, match="rows is empty"):
        validate(_record() | {"rows": []})


def test_an_archive_knows_its_commit(tmp_path, monkeypatch):
    """`git archive` fills the placeholder in; a checkout asks git."""
    archived = tmp_path / ".git_archival.txt"
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "ARCHIVED", archived)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for text, expected in (
        (None, ("", True)),
        ("commit: $Format:%H$\n", ("", True)),
        (f"commit: {'0a' * 20}\n", ("0a" * 20, False)),
    ):
        if text is not None:
            archived.write_text(text)
        record = make_record("test", {}, [make_row({}, "m", "s", [1.0], 0)])
        assert (record["commit"], record["dirty"]) == expected
