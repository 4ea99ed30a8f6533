"""Memory that a long run holds, and whether it grew: for benches that look for leaks."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine_actor.core.sequence import Sequence as LiveSequence
from engine_actor.model.memory import MIB
from engine_actor.work.isolate import release_cached_memory

PAGE_BYTES = 4096


def growth(values: Sequence[float]) -> float:
    """How far the last value lies above all of the first third; 0 for fewer than three."""
    return values[-1] - max(values[: len(values) // 3]) if len(values) >= 3 else 0.0


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the straight line through the points that leaves the least squares; 0 for fewer than two
    times."""
    if len(set(times)) < 2:
        return 0.0
    middle, level = sum(times) / len(times), sum(values) / len(values)
    shared = sum((t - middle) * (v - level) for t, v in zip(times, values, strict=True))
    return shared / sum((t - middle) ** 2 for t in times)


def device_mib(engine: Any) -> float:
    """What torch has handed out on the GPU; 0 without one. The KV pool, which grows with use, is
    mapped outside of torch and not in it.
    """
    if engine.facts.device == "cpu":
        return 0.0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / MIB


def pool_mib(engine: Any) -> float:
    """What the KV pool has of the device, outside of torch or in it."""
    return engine.elastic.n_blocks * engine.facts.kv_block_bytes / MIB


def reserved_mib(engine: Any) -> float:
    """What torch holds of the GPU, free pieces included; 0 without one."""
    return 0.0 if engine.facts.device == "cpu" else torch.cuda.memory_reserved() / MIB


def resident_mib() -> float:
    """Memory of this process; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    if not path.exists():
        return 0.0
    return int(path.read_text(encoding="ascii").split()[1]) * PAGE_BYTES / MIB


def live_sequences() -> int:
    """The engine's sequences that anything in this process still holds."""
    gc.collect()
    return sum(type(one) is LiveSequence for one in gc.get_objects())


def give_back(device: str) -> None:
    """What engines that nobody holds any more took. The parts of an engine hold each other, so that
    without a collection the next engine would find its memory still in use.
    """
    gc.collect()
    release_cached_memory(torch.device(device))
