"""Every metric family of the engine: name, kind, help, unit, labels, buckets. The one place.

The first seven families below the line "literal" are public names that dashboards and the bench
scripts read; never rename one. Two facts, two names: `prefill_decode_overlap_steps` counts steps
that held both works, `prefill_decode_stream_overlap_steps` only those that ran on two streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric family. `unit` is for people ("seconds", "tokens"); `labels` are label names, in
    the order in which values are given when recording; `buckets` are a histogram's upper bounds.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# fmt: off
_SECONDS_STEP = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03,
    0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)
_SECONDS_REQUEST = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
    2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0,
)
# fmt: on
_TOKENS = tuple(float(2**power) for power in range(15))
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


def _counter(name: str, help: str, unit: str, *labels: str) -> Definition:
    return Definition(name, "counter", help, unit, labels)


def _gauge(name: str, help: str, unit: str) -> Definition:
    return Definition(name, "gauge", help, unit)


def _histogram(name: str, help: str, unit: str, buckets: tuple[float, ...]) -> Definition:
    return Definition(name, "histogram", help, unit, (), buckets)


ENGINE_METRICS: tuple[Definition, ...] = (
    # literal
    _counter("prefill_steps_total", "Steps that held a prefill work", "steps"),
    _counter(
        "prefill_decode_overlap_steps",
        "Steps that held both a prefill and a decode work, however they ran",
        "steps",
    ),
    _counter(
        "prefill_decode_stream_overlap_steps",
        "Steps whose prefill and decode ran on two device streams",
        "steps",
    ),
    _counter(
        "prefill_decode_mixed_forward_steps",
        "Steps whose prefill and decode rows shared one forward pass",
        "steps",
    ),
    _counter(
        "prefill_decode_overlapped_seconds",
        "Time in which the event intervals of a step's prefill and decode intersect",
        "seconds",
    ),
    _histogram(
        "prefill_chunk_seconds", "Time of one step's prefill work", "seconds", _SECONDS_STEP
    ),
    _histogram("decode_step_seconds", "Time of one step's decode work", "seconds", _SECONDS_STEP),
    _histogram(
        "mixed_forward_seconds",
        "Time of one forward pass that held prefill and decode rows, in neither of the two above",
        "seconds",
        _SECONDS_STEP,
    ),
    _counter(
        "prefill_decode_overlap_mode_steps",
        "Steps that held both works, by how they shared the device",
        "steps",
        "mode",
    ),
    # steps
    _counter("engine_steps_total", "Scheduler steps that launched something", "steps"),
    _counter("decode_steps_total", "Steps that held a decode work", "steps"),
    _histogram(
        "step_seconds", "Time of one whole step, host work included", "seconds", _SECONDS_STEP
    ),
    _histogram("prefill_chunk_tokens", "Prompt tokens of one prefill chunk", "tokens", _TOKENS),
    _histogram("decode_batch_rows", "Sequences of one decode work", "sequences", _ROWS),
    # a request's times
    _histogram(
        "queue_seconds",
        "Arrival to the first time a request is scheduled",
        "seconds",
        _SECONDS_REQUEST,
    ),
    _histogram("ttft_seconds", "Arrival to the first token", "seconds", _SECONDS_REQUEST),
    _histogram(
        "inter_token_latency_seconds", "Between two tokens of one request", "seconds", _SECONDS_STEP
    ),
    _histogram(
        "time_per_output_token_seconds",
        "Mean time per token after the first, once per request",
        "seconds",
        _SECONDS_STEP,
    ),
    _histogram(
        "e2e_latency_seconds", "Arrival to the end of a request", "seconds", _SECONDS_REQUEST
    ),
    # tokens
    _counter(
        "prompt_tokens_total", "Prompt tokens of admitted requests, cached ones included", "tokens"
    ),
    _counter(
        "cached_prompt_tokens_total", "Prompt tokens whose KV came from the prefix cache", "tokens"
    ),
    _counter(
        "computed_prompt_tokens_total", "Prompt tokens computed, recomputed ones included", "tokens"
    ),
    _counter("generation_tokens_total", "Tokens made", "tokens"),
    _histogram("request_prompt_tokens", "Prompt length of one request", "tokens", _TOKENS),
    _histogram(
        "request_generation_tokens", "Tokens made for one finished request", "tokens", _TOKENS
    ),
    # requests
    _gauge("requests_running", "Requests in prefill or decode", "requests"),
    _gauge("requests_waiting", "Requests in the queue", "requests"),
    _counter("requests_received_total", "Requests that reached the engine", "requests"),
    _counter(
        "requests_finished_total", "Requests that ended, by finish reason", "requests", "reason"
    ),
    _counter(
        "admission_rejections_total",
        "Requests that the engine refused, by error code",
        "requests",
        "code",
    ),
    _counter("preemptions_total", "Sequences sent back to the queue for recompute", "sequences"),
    _counter(
        "cancelled_total",
        "Requests cancelled by a client or an operator",
        "requests",
    ),
    _counter("evicted_total", "Requests evicted by message", "requests"),
    # memory
    _gauge("kv_blocks_total", "KV blocks the pool holds", "blocks"),
    _gauge("kv_blocks_free", "KV blocks free or evictable", "blocks"),
    _gauge("kv_blocks_cached", "Free KV blocks that hold a reusable prefix", "blocks"),
    _gauge("kv_bytes_total", "Memory of the KV pool", "bytes"),
    _gauge("kv_host_blocks_total", "Slots of the host for evicted KV blocks", "blocks"),
    _gauge("kv_host_blocks_used", "Slots of the host that hold a reusable prefix", "blocks"),
    _counter(
        "kv_host_hit_tokens_total",
        "Tokens whose KV came back from the host, those of preempted requests as well",
        "tokens",
    ),
    _counter("kv_host_bytes_out_total", "KV copied from the device to the host", "bytes"),
    _counter("kv_host_bytes_back_total", "KV copied from the host to the device", "bytes"),
    _counter("kv_host_dropped_total", "KV blocks that the host let go of", "blocks"),
    _counter(
        "oom_isolated_total",
        "Out-of-memory errors that ended one request and nothing else",
        "requests",
    ),
    _counter("oom_retries_total", "Works retried smaller after an out-of-memory error", "works"),
    # decode graphs
    _gauge(
        "decode_graphs", "Decode steps captured as CUDA graphs, one a bucket of shapes", "graphs"
    ),
    _gauge("decode_graph_bytes", "Device memory that they took", "bytes"),
    _counter("decode_graph_replays_total", "Decode works that replayed a graph", "works"),
    _counter(
        "decode_graph_failures_total",
        "Captures that failed; the work ran without and its bucket goes on so",
        "captures",
    ),
    # clients
    _gauge("clients_attached", "Ingress replicas that hold a lease", "clients"),
    _counter("leases_expired_total", "Clients dropped because they fell silent", "clients"),
)
