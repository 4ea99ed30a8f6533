"""Which queue of launches gets which counters; no GPU."""

from __future__ import annotations

import torch

from kernels.jit.counters import COUNTERS, Counters


def test_equal_keys_share_and_others_do_not() -> None:
    """Also when there are more keys than lanes."""
    counters = Counters(torch.device("cpu"), lanes=2)
    keys = [(stream, capture) for stream in (0, 7) for capture in (0, 1)]
    lanes = [counters.of(key) for key in keys]
    for i, lane in enumerate(lanes):
        assert lane.shape == (COUNTERS,)
        assert not lane.any()
        lane.fill_(i + 1)
    for i, key in enumerate(keys):
        assert counters.of(key) is lanes[i]
        assert bool((lanes[i] == i + 1).all())
