"""The bar and the time left, by a clock that the test turns."""

from __future__ import annotations

import io

import pytest

from engine_actor.quant.progress import TimedProgress, spell


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (7260, "2 h 01 min")],
)
def test_times_are_spelt_for_people(seconds, text):
    assert spell(seconds) == text


def test_layers_of_an_earlier_run_do_not_count_for_the_time_left():
    now, stream = [100.0], Terminal()
    progress = TimedProgress("quantize", stream, lambda: now[0])
    progress("layers", 20, 30)  # resumed
    assert "left" not in stream.getvalue()
    now[0] += 50.0
    progress("layers", 22, 30)  # 25 s a layer, eight to go
    assert "73 %, 3 min left" in stream.getvalue()
    progress("layers", 30, 30)
    assert stream.getvalue().endswith("\n")
    assert stream.getvalue().count("\r") == 3


def test_off_a_terminal_it_is_a_line_a_tenth():
    stream = io.StringIO()
    progress = TimedProgress("quantize", stream, lambda: 0.0)
    for done in range(101):
        progress("layers", done, 100)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert all(line.startswith("quantize: layers") for line in lines)
    assert "\r" not in stream.getvalue()
