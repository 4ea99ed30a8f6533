"""The tables of docs/gpu_engine.md say what their records say, rounded as written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.house_rules.figures import (
    DAY,
    FIGURE,
    Found,
    median,
    record,
    row_of,
    table,
    wrong,
)

PAGE = "gpu_engine.md"
OURS = "deepinfer-sm86"
STREAM_STEPS = "prefill_decode_stream_overlap_steps"


def decode() -> Found:
    name = f"{DAY}gpu-engine"
    for row in table(PAGE, "Decode", "streams"):
        at = {"streams": int(row[0])}
        ours = {"engine": OURS, **at}
        yield row[1], median(name, "decode_tokens_per_second", **ours)
        step = row_of(name, "step", **ours)
        yield row[3], [step["median"], step["p95"]]
        yield row[4], 100 * median(name, "device_idle_share", **ours)
        for cell, engine in ((row[5], "synchronous"), (row[6], "no graphs")):
            yield cell, median(name, "decode_tokens_per_second", engine=engine, **at)
        yield row[7], median(f"{DAY}gpu-engine-before", "decode_tokens_per_second", **at)


def prompts() -> Found:
    name, before = f"{DAY}gpu-engine", f"{DAY}gpu-engine-before"
    for row in table(PAGE, "Prompts", "", "ours"):
        metric, tokens = {
            "2,048 tokens": ("prefill", 2048),
            "16 x 2,048 tokens": ("prefill_tokens_per_second", 32768),
        }.get(row[0], ("ttft", int(FIGURE.findall(row[0])[0].replace(",", ""))))
        for cell, engine in ((row[1], OURS), (row[3], "no prefill graphs")):
            yield cell, median(name, metric, engine=engine, tokens=tokens)
        if row[4]:
            yield row[4], median(before, metric, tokens=tokens)


def bursts() -> Found:
    for row in table(PAGE, "Through Ray Serve and HTTP", "streams, tokens out"):
        streams, out = map(int, row[0].split(","))
        both = (f"{DAY}serve-streams", f"{DAY}serve-streams-again")
        for cell, metric, path, scale in (
            (row[1], "decode_tokens_per_second", "http", 1),
            (row[2], "decode_share", "http / engine", 100),
            (row[3], "text_share", "http / engine", 100),
            (row[4], "ttft_added", "http - engine", 1000),
        ):
            case = {"path": path, "streams": streams, "out": out}
            yield cell, [scale * median(each, metric, **case) for each in both]


MODES = {
    "two streams, chunk 8,192 in ranges of layers of 256 rows": ("two_streams", 8192, 256),
    "two streams with fewer multiprocessors, the same": ("two_streams_capped", 8192, 256),
    "green contexts, the same": ("green", 8192, 256),
    "serial, the same": ("serial", 8192, 256),
    "two streams, chunk 128": ("two_streams", 128, None),
    "serial, chunk 512": ("serial", 512, None),
    "mixed in one forward, chunk 512": ("mixed", 512, None),
    "serial, chunk 2,048": ("serial", 2048, None),
}


def insertion() -> Found:
    rows = {row[0]: row for row in table(PAGE, "A long prompt into running streams", "")}
    for label, (mode, chunk, size) in MODES.items():
        case = {"mode": mode, "chunk_tokens": chunk, "slice_tokens": size}
        metrics = (("itl_p50_s", "itl_p99_s", "max_itl_s"), ("ttft_s",), ("tpot_p95_s",))
        for cell, of in zip(rows[label][1:], metrics, strict=True):
            yield cell, [1e3 * median(f"{DAY}insertion", metric, **case) for metric in of]


def seven_billions() -> Found:
    for row in table(PAGE, "A 7B in 4 GiB", "KV, chunk"):
        dtype, chunk = row[0].split(", ")
        kv, name = "auto" if dtype == "fp16" else "int8", f"{DAY}memory-sweep-7b"
        plan = record(name)["switches"]["memory"][f"{kv} {chunk} grid"]
        yield row[1], plan["kv_blocks"]
        yield row[5], plan["peak"] / 2**20
        for cell, streams in ((row[2], 1), (row[3], 4), (row[4], 16)):
            rates = sorted(
                (each["case"]["context"], each["median"])
                for each in record(name)["rows"]
                if each["metric"] == "tokens_per_second"
                and [each["case"][key] for key in ("kv", "chunk", "streams")]
                == [kv, int(chunk), streams]
            )
            yield cell, [*(rate for _, rate in rates), rates[-1][0]]


def host_tier() -> Found:
    visits = ("first", "cached", "evicted")
    rows = table(PAGE, "Prefixes kept in the host's memory", "visit")
    for row, visit in zip(rows, visits, strict=True):
        metrics = (("ttft", 0), ("ttft", 8), ("longest_gap", 8))
        for cell, (metric, streams) in zip(row[1:], metrics, strict=True):
            case = {"visit": visit, "streams": streams}
            yield (
                cell,
                [median(f"{DAY}host-tier", metric, tier=tier, **case) for tier in ("off", "on")],
            )


def seeds_benches() -> Found:
    rate, stream_steps, jitter, gap = table(PAGE, "The seed's two benches", "")
    for at, twin in ((1, "overlap"), (2, "no_overlap")):
        paged, inserted = f"paged_concurrency_3b_tiled_{twin}", f"tpot_jitter_3b_chunk128_{twin}"
        for row, metric in ((rate, "tokens_per_second"), (stream_steps, STREAM_STEPS)):
            yield row[at], [median(paged, metric, concurrency=count) for count in (1, 2, 4)]
        yield jitter[at], 1e3 * median(inserted, "inter_token_jitter_s")
        yield gap[at], 1e3 * median(inserted, "max_itl_s")


@pytest.mark.parametrize(
    "figures",
    [decode, prompts, bursts, insertion, seven_billions, host_tier, seeds_benches],
)
def test_a_table_has_its_records_figures(figures: Callable[[], Found]) -> None:
    assert wrong(figures()) == []


@pytest.mark.parametrize(
    ("cell", "values", "is_right"),
    [
        ("1,088", 1088.41, True),
        ("1,088", 1088.51, False),
        ("0.92 (0.96)", [0.9160, 0.9590], True),
        ("**18.1x**", 18.13, True),
        ("-1.6 / 12", [-1.59, 11.93], True),
        ("3.5 / 3.8", [3.49, 3.76, 3.76], False),
        ("", 1.0, False),
    ],
)
def test_a_figure_is_its_record_rounded(
    cell: str, values: float | list[float], is_right: bool
) -> None:
    assert (wrong(iter([(cell, values)])) == []) is is_right
