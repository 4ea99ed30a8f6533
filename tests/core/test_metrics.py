"""The metrics registry and its Prometheus text."""

from __future__ import annotations

import math
import re
import threading

import pytest

from engine_actor.core.metric_table import ENGINE_METRICS, Definition
from engine_actor.core.metrics import Metrics

_TABLE = (
    Definition("steps_total", "counter", "Steps", "steps"),
    Definition("heat", "gauge", "A back\\slash\nand a line", "kelvin"),
    Definition("ends_total", "counter", "Ends by reason", "", ("reason", "where")),
    Definition("wait_seconds", "histogram", "Waiting", "seconds", (), (0.5, 1.0, 2.5)),
    Definition("size_rows", "histogram", "Sizes", "rows", ("kind",), (1.0,)),
)

_GOLDEN = r"""# HELP steps_total Steps (steps)
# TYPE steps_total counter
steps_total 3
# HELP heat A back\\slash\nand a line (kelvin)
# TYPE heat gauge
heat 1.5
# HELP ends_total Ends by reason
# TYPE ends_total counter
ends_total{reason="a\"quote",where="back\\slash"} 1
ends_total{reason="stop",where="two\nlines"} 2
# HELP wait_seconds Waiting (seconds)
# TYPE wait_seconds histogram
wait_seconds_bucket{le="0.5"} 2
wait_seconds_bucket{le="1"} 2
wait_seconds_bucket{le="2.5"} 3
wait_seconds_bucket{le="+Inf"} 4
wait_seconds_sum 12.25
wait_seconds_count 4
# HELP size_rows Sizes (rows)
# TYPE size_rows histogram
size_rows_bucket{kind="x",le="1"} 1
size_rows_bucket{kind="x",le="+Inf"} 1
size_rows_sum{kind="x"} 1
size_rows_count{kind="x"} 1
"""


def _filled() -> Metrics:
    metrics = Metrics(_TABLE)
    metrics.add("steps_total")
    metrics.add("steps_total", 2)
    metrics.set("heat", 1.5)
    metrics.add("ends_total", 2, "stop", "two\nlines")
    metrics.add("ends_total", 1, 'a"quote', "back\\slash")
    for seconds in (0.25, 0.5, 1.5, 10.0):
        metrics.observe("wait_seconds", seconds)
    metrics.observe("size_rows", 1, "x")
    return metrics


def test_prometheus_text_is_golden() -> None:
    """HELP and TYPE lines, escaped labels, cumulative buckets that include their upper bound."""
    assert _filled().text() == _GOLDEN


def test_snapshot_has_the_same_samples_as_the_text() -> None:
    """The Ray mirror and /metrics can never disagree on a name or a value."""
    metrics = _filled()
    lines = [line for line in metrics.text().splitlines() if not line.startswith("#")]
    shown = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    assert metrics.snapshot() == shown
    assert metrics.value("ends_total", "stop", "two\nlines") == 2
    assert metrics.count("wait_seconds") == 4


def test_literal_names_exist_from_the_start() -> None:
    """S-65: the public names are there, at 0, before anything has run."""
    snapshot = Metrics().snapshot()
    for name in (
        "prefill_steps_total",
        "prefill_decode_overlap_steps",
        "prefill_decode_stream_overlap_steps",
        "prefill_decode_mixed_forward_steps",
        "prefill_decode_overlapped_seconds",
        "prefill_chunk_seconds_count",
        "decode_step_seconds_count",
        "ttft_seconds_count",
        "inter_token_latency_seconds_count",
        "requests_running",
        "kv_blocks_free",
    ):
        assert snapshot[name] == 0, name


def test_every_family_is_described() -> None:
    """Legal names, one help text and one unit each, rising buckets for every histogram."""
    for definition in ENGINE_METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", definition.name), definition
        assert definition.help, definition
        assert definition.unit, definition
        assert list(definition.buckets) == sorted(set(definition.buckets)), definition
        assert bool(definition.buckets) == (definition.kind == "histogram"), definition
    names = [definition.name for definition in ENGINE_METRICS]
    assert len(set(names)) == len(names)
    assert Metrics().table == ENGINE_METRICS


def test_numbers_are_written_whole() -> None:
    """No rounding of big counters, and the format's own words for what is not finite."""
    metrics = Metrics((Definition("x", "gauge", "X", "x"),))
    for value, written in ((2**53, "9007199254740992.0"), (1e15 - 1, "999999999999999"),
                           (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN"),
                           (0.1, "0.1")):  # fmt: skip
        metrics.set("x", value)
        assert metrics.text().splitlines()[-1] == f"x {written}"


def test_wrong_names_and_labels_are_bugs() -> None:
    """A misspelt name or a missing label value never makes a new family."""
    metrics = Metrics(_TABLE)
    with pytest.raises(KeyError):
        metrics.add("stepps_total")
    with pytest.raises(ValueError, match="takes labels"):
        metrics.add("ends_total", 1, "stop")
    with pytest.raises(ValueError, match="takes labels"):
        metrics.observe("size_rows", 1)
    with pytest.raises(ValueError, match="takes labels"):
        metrics.set("heat", 1, "x")
    with pytest.raises(ValueError, match="share a name"):
        Metrics((*_TABLE, _TABLE[0]))


def test_readers_beside_a_writer() -> None:
    """One writer, several readers: no lost count, no reader ever fails, cumulative at all times."""
    metrics = Metrics(_TABLE)
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                snapshot = metrics.snapshot()
                buckets = [snapshot[f'wait_seconds_bucket{{le="{le}"}}'] for le in ("0.5", "+Inf")]
                assert buckets[0] <= buckets[1] == snapshot["wait_seconds_count"]
        except BaseException as failure:
            failures.append(failure)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for index in range(4000):
        metrics.add("ends_total", 1, str(index % 500), "here")
        metrics.observe("wait_seconds", index % 3)
    done.set()
    for reader in readers:
        reader.join()
    assert not failures
    assert sum(metrics.value("ends_total", str(index), "here") for index in range(500)) == 4000
    assert metrics.count("wait_seconds") == 4000
