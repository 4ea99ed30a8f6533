"""The tables of docs/kernels/README.md say what their records say, rounded as written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.house_rules.figures import DAY, Found, median, record, row_of, table, wrong

PAGE = "kernels/README.md"
LINEAR = f"{DAY}linear"
OURS, SEED, CUBLAS = "ours", "seed", "cuBLAS fp16"
FEW_ROWS = (1, 8, 16, 32, 64)
NARROW = 5632
"""The widest of the shapes that are called narrow."""


def time_of(shape: str, rows: int, bits: int = 4, contender: str = OURS) -> float:
    """us"""
    n, k = map(int, shape.split("x"))
    case = {"contender": contender, "n": n, "k": k, "m": rows, "bits": bits}
    return median(LINEAR, "time of a call", **case)


def few_rows() -> Found:
    for row in table(PAGE, "From one row to thousands", "shape", "rows"):
        at = (row[0], int(row[1]))
        ours, seed = time_of(*at), time_of(*at, contender=SEED)
        yield row[2], ours
        yield row[4], seed
        yield row[5], seed / ours
        yield row[6], time_of(*at, 16, CUBLAS)
        yield row[7], time_of(*at, contender="torch int4 (bf16)")


def w3_over_w4() -> Found:
    for row in table(PAGE, "From one row to thousands", "shape", "1 row"):
        shapes = [row[0]]
        if "x" not in row[0].split()[0]:
            shapes = [name for name in record(LINEAR)["switches"]["shapes"] if _is_narrow(name)]
        for cell, rows in zip(row[1:], FEW_ROWS, strict=True):
            yield cell, max(time_of(name, rows, 3) / time_of(name, rows) for name in shapes)


def _is_narrow(shape: str) -> bool:
    return int(shape.split("x")[0]) <= NARROW


def over_the_seed() -> Found:
    for row in table(PAGE, "From one row to thousands", "", "1 row"):
        if row[0] == "goal":
            continue
        bits, shape = int(row[0][1]), row[0].split()[1]
        for cell, rows in zip(row[1:], FEW_ROWS, strict=True):
            yield cell, time_of(shape, rows, bits, SEED) / time_of(shape, rows, bits)


def many_rows() -> Found:
    for row in table(PAGE, "Many rows", "shape", "rows"):
        at = (row[0], int(row[1]))
        n, k = map(int, row[0].split("x"))
        dense = {"n": n, "k": k, "m": at[1], "bits": 4, "backend": "cuda.strip_cublas"}
        yield row[2], time_of(*at)
        yield row[3], time_of(*at, contender="ours, mma.sync")
        yield row[4], median(f"{DAY}prefill-gemm", "time", **dense)
        yield row[5], time_of(*at, 16, CUBLAS)


def shared_card() -> Found:
    backends = {"wgmma": "cuda.gemm_hopper", "mma.sync": "cuda.gemm_ampere"}
    metrics = ("decode_step_beside_prefill", "prefill_alone", "prefill_beside_decode")
    for row in table(PAGE, "A card shared by prefill and decode", "prefill", "chunk"):
        case = {"backend": backends[row[0]], "m": int(row[1])}
        for cell, metric in zip(row[2:], metrics, strict=True):
            shares = (132, 116, 100, 84)
            name = f"{DAY}shared-card"
            yield cell, [median(name, metric, max_ctas=share, **case) for share in shares]


def attention() -> Found:
    short, short_long, short_int8, rates, ratios = table(
        PAGE, "Attention of decoded rows", "", "16/2 heads"
    )
    for column, layout in enumerate(((16, 2), (28, 4)), 1):
        for row, context, kv in (
            (short, 128, "fp16"),
            (short_long, 512, "fp16"),
            (short_int8, 512, "int8"),
        ):
            yield row[column], attended(layout, 1, context, kv)[0]
        large = [
            (attended(layout, batch, context, "fp16"), attended(layout, batch, context, "int8"))
            for batch in (1, 4, 16, 64)
            for context in (128, 512, 2048, 8192, 32768)
            if batch * context >= 128 * 1024
        ]
        speeds = [cached / micros / 1e6 for (micros, cached), _ in large]
        yield rates[column], [min(speeds), max(speeds)]
        over = [int8 / fp16 for (fp16, _), (int8, _) in large]
        yield ratios[column], [min(over), max(over)]
    for row, context in ((short, 128), (short_long, 512)):
        layouts = ((16, 2), (28, 4))
        yield row[3], [attended(each, 1, context, "fp16", "torch_sdpa")[0] for each in layouts]


def attended(
    layout: tuple[int, int], batch: int, context: int, kv: str, way: str = "decode_heads"
) -> tuple[float, float]:
    """us, and bytes of the cache."""
    case = {"heads": layout[0], "kv_heads": layout[1], "batch": batch, "context": context}
    row = row_of(f"{DAY}attention-from-heads", "time", kv=kv, way=way, **case)
    return row["median"], row["case"]["kv_bytes"]


def seeds_bench() -> Found:
    name = "qwen_sm86_tiled_prefill"
    for row in table(PAGE, "The seed's bench", "", "tiled"):
        case = {"bits": int(row[0][1]), "shape": f"30x{row[0].split()[1]}"}
        tiled = row_of(name, "time", way="seed_tiled", **case)
        fallback, ours = (
            median(name, "time", way=way, **case) for way in ("forward_dequant_cublas", "ours")
        )
        seed = tiled["case"]
        yield row[1], [tiled["median"], seed["seed_tiled_ms"]]
        yield row[2], [fallback, seed["seed_fallback_ms"]]
        yield row[3], [fallback / tiled["median"], seed["seed_speedup"]]
        yield row[4], ours
        yield row[5], tiled["median"] / ours


@pytest.mark.parametrize(
    "figures",
    [few_rows, w3_over_w4, over_the_seed, many_rows, shared_card, attention, seeds_bench],
)
def test_a_table_has_its_records_figures(figures: Callable[[], Found]) -> None:
    assert wrong(figures()) == []
