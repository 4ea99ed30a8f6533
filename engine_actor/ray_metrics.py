"""Mirrors the engine's own metrics to Ray's, once a second, so that Ray's dashboard shows them.

Reads a snapshot and knows nothing of the engine. Every sample becomes a gauge of the same name
(Ray puts `ray_` before it), counters too: a Ray counter cannot say 0 nor be set to a value, and an
overlap counter that stands at 0 must be seen. All are sent each time, because a gauge that is not
set again leaves Ray's page after one collection (measured with ray 2.60). A call costs 6 to 8 us,
so it is this thread that makes them, never the scheduler's.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

log = logging.getLogger(__name__)

_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?P<labels>.*)\})?")
_LABEL = re.compile(r'(?P<name>[A-Za-z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
ENGINE_TAG = "engine"
SKIPPED_SUFFIX = "_bucket"
"""Histogram buckets stay on our own /metrics: a dozen series each would swamp Ray's agent."""


class Gauge(Protocol):
    """`ray.util.metrics.Gauge`, as far as it is used here."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


def ray_gauge(name: str, tag_keys: tuple[str, ...]) -> Gauge:
    """A gauge of Ray's."""
    from ray.util.metrics import Gauge as RayGauge

    gauge: Gauge = RayGauge(name, description=f"deepinfer-sm86: {name}", tag_keys=tag_keys)
    return gauge


def parse_sample(sample: str) -> tuple[str, dict[str, str]]:
    """Name and labels of a Prometheus sample name: `a{b="c"}` is ("a", {"b": "c"})."""
    match = _SAMPLE.fullmatch(sample)
    if match is None:
        raise ValueError(f"not a sample name: {sample!r}")
    labels = {
        label["name"]: re.sub(r"\\.", lambda part: _ESCAPES[part[0]], label["value"])
        for label in _LABEL.finditer(match["labels"] or "")
    }
    return match["name"], labels


class RayMirror:
    """Sends `snapshot()` to Ray every `period_s` seconds, from a thread of its own."""

    def __init__(
        self,
        engine: str,
        snapshot: Callable[[], Mapping[str, float]],
        make_gauge: Callable[[str, tuple[str, ...]], Gauge] = ray_gauge,
        period_s: float = 1.0,
    ) -> None:
        self._engine = engine
        self._snapshot = snapshot
        self._make_gauge = make_gauge
        self._period_s = period_s
        self._gauges: dict[str, Gauge] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-metrics", daemon=True)

    def start(self) -> None:
        """Begin to mirror."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def flush(self) -> int:
        """Send every sample; returns how many."""
        n_sent = 0
        for sample, value in self._snapshot().items():
            name, labels = parse_sample(sample)
            if name.endswith(SKIPPED_SUFFIX):
                continue
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = self._gauges[name] = self._make_gauge(name, (ENGINE_TAG, *labels))
            gauge.set(float(value), tags={ENGINE_TAG: self._engine, **labels})
            n_sent += 1
        return n_sent

    def _run(self) -> None:
        has_failed = False
        while not self._stopped.wait(self._period_s):
            try:
                self.flush()
                has_failed = False
            except Exception:
                # Metrics must never hurt serving; one line an outage, not one a second.
                if not has_failed:
                    log.exception("metrics cannot be mirrored to Ray")
                has_failed = True
