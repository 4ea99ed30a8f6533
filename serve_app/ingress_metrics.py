"""What the ingress itself counts, in the same registry type as the engine's. No engine facts."""

from __future__ import annotations

from engine_actor.core.metric_table import Definition
from engine_actor.core.metrics import Metrics

# fmt: off
_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2,
    0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)
# fmt: on

INGRESS_METRICS: tuple[Definition, ...] = (
    Definition(
        "http_requests_total", "counter",
        "Answers by route and status, 499 where the client left first", "requests",
        ("route", "status"),
    ),
    Definition(
        "http_request_seconds", "histogram", "From the request's head to the last byte", "seconds",
        ("route",), _SECONDS,
    ),
    Definition(
        "http_first_event_seconds", "histogram", "From a streamed request to its first event",
        "seconds", (), _SECONDS,
    ),
    Definition("http_requests_in_flight", "gauge", "Requests being answered", "requests"),
    Definition("ingress_live_sequences", "gauge", "Sequences the engine owes an end", "sequences"),
    Definition("ingress_disconnects_total", "counter", "Clients that left early", "requests"),
    Definition("ingress_slow_clients_total", "counter", "Clients that did not read", "requests"),
    Definition("ingress_engine_restarts", "gauge", "Attachments lost since the start", "times"),
)  # fmt: skip


def ingress_metrics() -> Metrics:
    """A fresh registry of the ingress's families."""
    return Metrics(INGRESS_METRICS)
