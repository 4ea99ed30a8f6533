"""What the linear bench asks for and what its plot reads, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import bench_linear
from kernels.linear.reference import linear_reference
from linear_contenders import CONTENDERS, missing_contenders
from plot_linear import floors, lines, main
from results import make_record, make_row, write_record
from tests.kernels_cpu.layers import random_layer


def record(*rows: tuple[str, int, int, float]) -> dict:
    """(contender, bits, m, us) at 2048 x 2048, floors of half a microsecond a bit."""
    made = [
        make_row(
            {"contender": name, "bits": bits, "n": 2048, "k": 2048, "m": m, "floor_us": bits / 2},
            "time of a call",
            "us",
            [us],
            1,
        )
        for name, bits, m, us in rows
    ]
    made.append(make_row({"ceiling": "read"}, "rate", "B/s", [1e12], 1))
    return make_record("linear", {}, made)


def test_cases_name_each_contender_for_the_bits_it_holds() -> None:
    """Dense weights once a shape, torch's int4 for W4 only."""
    args = bench_linear.build_parser().parse_args(
        ["--output", "x.json", "--shapes", "16x32", "--bits", "3"]
    )
    found = {(each.name, bits) for each, bits, n, k in bench_linear.cases(args, CONTENDERS)}
    assert ("ours", 3) in found
    assert ("cuBLAS fp16", 16) in found
    assert not any(name.startswith("torch int4") for name, _ in found)
    assert all(bits in (3, 16) for _, bits in found)


def test_all_copies_take_turns_unless_that_takes_long() -> None:
    """A graph lasts 400 us at least, and stops short of all copies beyond 4 ms."""
    assert bench_linear.launches_of(2.0, 63) == 4 * 63
    assert bench_linear.launches_of(100.0, 6) == 6
    assert bench_linear.launches_of(1000.0, 6) == 4
    assert bench_linear.launches_of(90_000.0, 2) == 1


def test_an_absent_peer_is_named() -> None:
    """So that an empty column has a reason."""
    (note,) = missing_contenders()
    assert note.startswith("Marlin")


def test_relative_error_sees_a_wrong_row() -> None:
    """Frobenius over the rows that are compared."""
    layer = random_layer(32, 128, group=128, kind="symmetric")
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    y = linear_reference(x, layer)
    assert bench_linear.relative_error(y, x, layer) < 1e-6
    y[1] = 0
    assert bench_linear.relative_error(y, x, layer) > 0.1


def test_lines_and_floors_are_of_the_bits_asked() -> None:
    """Dense baselines belong to every picture, another width to none; ceilings are no line."""
    made = record(("ours", 4, 1, 3.0), ("ours", 3, 1, 2.0), ("cuBLAS fp16", 16, 1, 8.0))
    assert floors(made, 4) == {(2048, 2048, 1): 2.0}
    assert lines(made, 4, (2048, 2048)) == {"ours": [(1, 3.0)], "cuBLAS fp16": [(1, 8.0)]}


def test_plot_is_written(tmp_path: Path) -> None:
    """From our file and another run's."""
    ours, peers = tmp_path / "ours.json", tmp_path / "peers.json"
    write_record(record(("ours", 4, 1, 3.0), ("ours", 4, 8, 3.5)), ours)
    write_record(record(("peer", 4, 1, 6.0)), peers)
    assert json.loads(ours.read_text())["rows"]
    assert main([str(ours), str(peers), "--output", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").stat().st_size > 1000
