"""What bench_serve_rate.py makes of its records: rates, what lies between paths, broken promises.

Knows records and rows; asks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from results import make_row, percentile
from sse_client import StreamRecord

LEAST_SHARE = 0.8
MOST_TTFT_S = 0.005
"""What the project allows Serve and HTTP to cost: of the engine's rate, and at the median."""
RATES = ("decode_tokens_per_second", "text_tokens_per_second")
TWIN = "twin"
"""The path of the bare engine that is given the requests when the server's engine got them."""

Found = dict[tuple[int, str], list[dict[str, float]]]
"""(streams, path) -> what each repetition gave."""


def measured(records: Sequence[StreamRecord]) -> dict[str, float]:
    """The two rates in tokens/s, the median and the mean time to the first token and the longest
    gap of a stream in s, tokens of one event."""
    first = max(record.event_times[0] for record in records)
    last = min(record.event_times[-1] for record in records)
    inside = 0.0
    for record in records:
        events = sum(first < at <= last for at in record.event_times)
        inside += record.tokens * events / len(record.event_times)
    sent = min(record.sent for record in records)
    ended = max(record.event_times[-1] for record in records)
    tokens = sum(record.tokens for record in records)
    waits = [record.event_times[0] - record.sent for record in records]
    gaps = [b - a for record in records for a, b in pairwise(record.event_times)]
    return {
        "decode_tokens_per_second": inside / (last - first) if last > first else 0.0,
        "text_tokens_per_second": tokens / (ended - sent),
        "ttft": percentile(waits, 0.5),
        "ttft_mean": sum(waits) / len(waits),
        "longest_gap": max(gaps, default=0.0),
        "tokens_per_event": tokens / sum(len(record.event_times) for record in records),
    }


UNITS = {
    "decode_tokens_per_second": "tokens/s",
    "text_tokens_per_second": "tokens/s",
    "ttft": "s",
    "ttft_mean": "s",
    "longest_gap": "s",
    "tokens_per_event": "tokens",
}


def rows_of(found: Found, warmup: int, out: int) -> list[dict[str, Any]]:
    """Every path, then what lies between them inside each repetition: `http - engine` is what the
    promise is about, `http - twin` the part of it that is not the order of arrival. out: tokens of
    a stream."""

    def case_of(streams: int, path: str) -> dict[str, Any]:
        return {"streams": streams, "out": out, "path": path}

    rows = [
        make_row(case_of(streams, path), name, unit, [v[name] for v in values], warmup)
        for (streams, path), values in found.items()
        for name, unit in UNITS.items()
    ]
    for streams in dict.fromkeys(streams for streams, _ in found):
        pairs = list(zip(found[streams, "engine"], found[streams, "http"], strict=True))
        case = case_of(streams, "http / engine")
        for name in RATES:
            shares = [engine[name] and http[name] / engine[name] for engine, http in pairs]
            kind = name.partition("_")[0]
            rows.append(make_row(case, f"{kind}_share", "share", shares, warmup))
        for other in ("engine", TWIN):
            if (streams, other) not in found:
                continue
            pairs = list(zip(found[streams, other], found[streams, "http"], strict=True))
            case = case_of(streams, f"http - {other}")
            for name in ("ttft", "ttft_mean"):
                added = [http[name] - bare[name] for bare, http in pairs]
                rows.append(make_row(case, f"{name}_added", "s", added, warmup))
    return rows


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line a load and promise that is broken."""
    lines = []
    for row in rows:
        where = _name(row["case"])
        if row["metric"] == "decode_share" and row["min"] and row["median"] < LEAST_SHARE:
            lines.append(f"BROKEN {where}: {row['median']:.0%} of the engine's tokens/s")
        is_promised = row["case"]["path"] == "http - engine" and row["metric"] == "ttft_added"
        if is_promised and row["median"] > MOST_TTFT_S:
            lines.append(f"BROKEN {where}: the first token {1e3 * row['median']:.2f} ms later")
    return lines


def _name(case: dict[str, Any]) -> str:
    return f"{case['streams']} streams of {case['out']} tokens"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a load."""
    cells: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        name, path = _name(row["case"]), row["case"]["path"]
        cells.setdefault(name, {})[path, row["metric"]] = row["median"]
    lines = []
    for name, cell in cells.items():
        line = f"{name:>24s}:"
        for rate in RATES:
            kind = rate.partition("_")[0]
            engine, http = cell["engine", rate], cell["http", rate]
            line += f" {kind} {http:8.0f} of {engine:8.0f} tokens/s"
            line += f" ({cell['http / engine', f'{kind}_share']:.0%}) "
        ttft = [1e3 * cell[path, "ttft"] for path in ("engine", "http")]
        line += f" TTFT {ttft[0]:.2f} -> {ttft[1]:.2f} ms"
        line += f" (+{1e3 * cell['http - engine', 'ttft_added']:.2f},"
        line += f" mean +{1e3 * cell['http - engine', 'ttft_mean_added']:.2f}"
        if (twin := cell.get((f"http - {TWIN}", "ttft_added"))) is not None:
            line += f", over its twin +{1e3 * twin:.2f}"
        line += f") longest gap {1e3 * cell['http', 'longest_gap']:.1f} ms"
        lines.append(line + f"  {cell['http', 'tokens_per_event']:.2f} tokens an event")
    return "\n".join(lines)
