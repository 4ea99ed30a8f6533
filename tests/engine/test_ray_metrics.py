"""The mirror to Ray's metrics, with gauges of the test's own."""

from __future__ import annotations

import threading

import pytest

from engine_actor.core.metrics import Metrics
from engine_actor.ray_metrics import RayMirror, parse_sample


class Gauges:
    """Remembers what was set: {(name, tags): value}, and how often."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.keys: dict[str, tuple[str, ...]] = {}
        self.n_sets = 0

    def make(self, name: str, tag_keys: tuple[str, ...]) -> _Gauge:
        assert name not in self.keys, "a gauge is made once"
        self.keys[name] = tag_keys
        return _Gauge(self, name)


class _Gauge:
    def __init__(self, gauges: Gauges, name: str) -> None:
        self._gauges, self._name = gauges, name

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self._gauges.keys[self._name])
        self._gauges.values[self._name, tuple(sorted(tags.items()))] = value
        self._gauges.n_sets += 1


@pytest.mark.parametrize(
    ("sample", "parsed"),
    [
        ("prefill_steps_total", ("prefill_steps_total", {})),
        ('a{b="c"}', ("a", {"b": "c"})),
        ('a{b="c",d="e,f=\\"g\\""}', ("a", {"b": "c", "d": 'e,f="g"'})),
        ('a{b="back\\\\slash\\nline"}', ("a", {"b": "back\\slash\nline"})),
    ],
)
def test_sample_names_are_taken_apart(sample, parsed):
    assert parse_sample(sample) == parsed


def test_what_is_no_sample_name_is_refused():
    with pytest.raises(ValueError, match="not a sample name"):
        parse_sample("two words")


def test_a_counter_at_zero_is_seen_and_every_value_equals_ours():
    metrics, gauges = Metrics(), Gauges()
    metrics.add("prefill_steps_total", 3)
    mirror = RayMirror("engine-0", metrics.snapshot, gauges.make)
    mirror.flush()
    tags = (("engine", "engine-0"),)
    assert gauges.values["prefill_steps_total", tags] == 3
    assert gauges.values["prefill_decode_overlap_steps", tags] == 0
    assert gauges.values["prefill_decode_stream_overlap_steps", tags] == 0
    assert not any(name.endswith("_bucket") for name in gauges.keys)


def test_everything_is_sent_again_changed_or_not():
    """Ray drops a gauge that is not set again from its page."""
    metrics, gauges = Metrics(), Gauges()
    mirror = RayMirror("engine-0", metrics.snapshot, gauges.make)
    n_samples = mirror.flush()
    assert n_samples == gauges.n_sets > 10
    assert mirror.flush() == n_samples
    assert gauges.n_sets == 2 * n_samples


def test_the_thread_goes_on_after_a_failure():
    calls, again = [], threading.Event()

    def snapshot() -> dict[str, float]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("Ray is not there")
        again.set()
        return {}

    mirror = RayMirror("engine-0", snapshot, Gauges().make, period_s=0.001)
    mirror.start()
    assert again.wait(10)
    mirror.stop()
