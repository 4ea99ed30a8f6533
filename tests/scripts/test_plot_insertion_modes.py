"""What the picture of the insertion bench is drawn from."""

from __future__ import annotations

from typing import Any

from plot_insertion_modes import cases, label


def record() -> dict[str, Any]:
    """Two cases as far as the plot reads them."""
    rows = []
    for mode, slice_tokens, seconds in (("mixed", None, 0.006), ("serial", 256, 0.004)):
        case = {
            "mode": mode,
            "chunk_tokens": 2048,
            "max_ctas": None,
            "slice_tokens": slice_tokens,
        }
        for metric in ("itl_p50_s", "itl_p99_s", "max_itl_s", "ttft_s"):
            rows.append({"case": case, "metric": metric, "median": seconds, "max": 2 * seconds})
    return {"rows": rows}


def test_a_label_names_what_is_set() -> None:
    case = {"mode": "green", "chunk_tokens": 128, "max_ctas": 100, "slice_tokens": 64}
    assert label(case) == "green 128, 100 SMs, slice 64"
    assert list(cases(record())) == ["mixed 2048", "serial 2048, slice 256"]
