"""What a soak found, as one record: a verdict with the figures it rests on, a row a quantity.

Knows memory's figures and how to judge that they are flat; knows no engine and no load.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memory_use import growth, slope
from results import make_row

SECONDS_OF_A_QUESTION = 10.0


@dataclass
class Quiet:
    """What was found when the engine was empty: memory in MiB, and the period before it."""

    at: float
    tokens: int
    busy_seconds: float
    device_mib: float
    host_mib: float
    reserved_mib: float = 0.0
    pool_mib: float = 0.0
    process_mib: float = 0.0

    @property
    def other_mib(self) -> float:
        """What the process has of the card beside torch and the pool: kernels, graphs, the
        context. 0 where the driver does not say."""
        return max(0.0, self.process_mib - self.reserved_mib - self.pool_mib)


def process_mib() -> float:
    """What this process has of the first card it is on, by the driver; 0 where that is silent."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=SECONDS_OF_A_QUESTION
        )
    except (OSError, subprocess.SubprocessError):
        return 0.0
    for line in asked.stdout.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip() == str(os.getpid()) and used.strip().isdigit():
            return float(used)
    return 0.0


def memory_trends(
    quiets: Sequence[Quiet], allowed: Mapping[str, float]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Every kind of memory in `allowed` (MiB over the soak): what it was, how far the end lies
    above all of the first third, and the line through the rest in MiB a minute. The texts name the
    kinds that grew, by either measure."""
    trends: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    settled = quiets[len(quiets) // 3 :]
    for name, most in allowed.items():
        values = [getattr(quiet, name) for quiet in quiets]
        grown = growth(values)
        times = [quiet.at / 60 for quiet in settled]
        rise = slope(times, [getattr(quiet, name) for quiet in settled])
        trends[name] = {
            "first": round(values[0], 3) if values else 0.0,
            "last": round(values[-1], 3) if values else 0.0,
            "grown": round(grown, 3),
            "slope_mib_a_minute": round(rise, 4),
            "allowed": most,
        }
        if grown > most:
            wrong.append(f"{name} grew by {grown:.1f} MiB, {most:g} are allowed")
        elif times and rise * (times[-1] - times[0]) > most:
            wrong.append(f"{name} rises by {rise:.2f} MiB a minute")
    return trends, wrong


def rows_of(quiets: Sequence[Quiet]) -> list[dict[str, Any]]:
    """One row a quantity: a value for each period."""
    rates = [quiet.tokens / max(quiet.busy_seconds, 1e-9) for quiet in quiets]
    series = {
        ("tokens_per_second", "tokens/s"): rates,
        ("device_memory", "MiB"): [quiet.device_mib for quiet in quiets],
        ("host_memory", "MiB"): [quiet.host_mib for quiet in quiets],
        ("reserved_memory", "MiB"): [quiet.reserved_mib for quiet in quiets],
        ("kv_pool", "MiB"): [quiet.pool_mib for quiet in quiets],
        ("other_memory", "MiB"): [quiet.other_mib for quiet in quiets],
    }
    return [make_row({}, name, unit, values, 0) for (name, unit), values in series.items()]
