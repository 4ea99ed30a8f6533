"""One JSON form for every measured result, so that any two can be laid side by side.

A record names its commit, its machine and every switch; a row holds raw values with their summary.
Standard library only. Knows nothing of what was measured.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
ARCHIVED = ROOT / ".git_archival.txt"
"""Holds a placeholder that `git archive` replaces by the commit (.gitattributes)."""

# The flags that decide which matrix kernels a CPU library picks.
CPU_FLAGS = (
    "avx avx2 fma f16c avx_vnni avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_int8 amx_bf16 asimd asimddp i8mm sve bf16"
).split()
PACKAGES = ("torch", "ray", "transformers", "tokenizers", "numpy", "deepinfer-sm86")

RECORD_FIELDS: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "name": str,
    "made": str,
    "commit": str,
    "dirty": bool,
    "machine": dict,
    "versions": dict,
    "switches": dict,
    "rows": list,
    "notes": list,
}
SEED_FIELDS: dict[str, type | tuple[type, ...]] = {"prefill_decode_overlap": bool, "runs": list}
"""Fields that the seed's two scheduler benches have beside those above; others have neither."""
ROW_FIELDS: dict[str, type | tuple[type, ...]] = {
    "case": dict,
    "metric": str,
    "unit": str,
    "warmup": int,
    "n": int,
    "median": (int, float),
    "p95": (int, float),
    "p99": (int, float),
    "min": (int, float),
    "max": (int, float),
    "raw": list,
}


def percentile(values: Sequence[float], share: float) -> float:
    """The value at `share` (0..1) of the sorted values, linear between neighbours.

    Raises ValueError for no values.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def make_row(
    case: Mapping[str, Any], metric: str, unit: str, raw: Sequence[float], warmup: int
) -> dict[str, Any]:
    """One measured quantity of one case. `warmup`: runs thrown away before the first raw value."""
    values = [round(float(value), 7) for value in raw]
    return {
        "case": dict(case),
        "metric": metric,
        "unit": unit,
        "warmup": warmup,
        "n": len(values),
        **_summary(values),
        "raw": values,
    }


def _summary(values: Sequence[float]) -> dict[str, float]:
    shares = {"min": 0.0, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: round(percentile(values, share), 7) for name, share in shares.items()}


def make_record(
    name: str,
    switches: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str] = (),
    seed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A whole result, stamped with the commit and the machine it was made on. `seed`: values of
    SEED_FIELDS."""
    commit, dirty = _commit()
    return {
        "schema": SCHEMA,
        "name": name,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "machine": describe_machine(),
        "versions": _versions(),
        "switches": dict(switches),
        "rows": [dict(row) for row in rows],
        "notes": list(notes),
        **(seed or {}),
    }


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Validate, then write. Raises ValueError as `validate` does."""
    validate(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def validate(record: Mapping[str, Any]) -> None:
    """Raises ValueError that names the first field which is missing, of a wrong type, or whose
    summary is not that of its raw values.
    """
    _require(
        record, RECORD_FIELDS | {n: SEED_FIELDS[n] for n in SEED_FIELDS if n in record}, "record"
    )
    if record["schema"] != SCHEMA:
        raise ValueError(f"record.schema is {record['schema']}, not {SCHEMA}")
    if not record["rows"]:
        raise ValueError("record.rows is empty")
    for index, row in enumerate(record["rows"]):
        where = f"rows[{index}]"
        _require(row, ROW_FIELDS, where)
        if row["n"] != len(row["raw"]):
            raise ValueError(f"{where}.n is {row['n']}, raw has {len(row['raw'])}")
        for name, value in _summary(row["raw"]).items():
            if abs(value - row[name]) > 1e-6 * max(1.0, abs(value)):
                raise ValueError(f"{where}.{name} is {row[name]}, raw gives {value}")


def _require(
    found: Mapping[str, Any], fields: Mapping[str, type | tuple[type, ...]], where: str
) -> None:
    for name, kind in fields.items():
        if name not in found:
            raise ValueError(f"{where}.{name} is missing")
        if not isinstance(found[name], kind):
            raise ValueError(f"{where}.{name} is {type(found[name]).__name__}, not {kind}")
    unknown = sorted(set(found) - set(fields))
    if unknown:
        raise ValueError(f"{where}.{unknown[0]} is not part of the schema")


def _commit() -> tuple[str, bool]:
    """The checkout's commit and whether tracked files differ from it. In what `git archive` made:
    the commit that it wrote into ARCHIVED. ("", True) where neither says."""
    try:
        head = _output(["git", "rev-parse", "HEAD"])
        status = _output(["git", "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.CalledProcessError):
        return _archived_commit()
    return head.strip(), bool(status.strip())


def _archived_commit() -> tuple[str, bool]:
    text = ARCHIVED.read_text(encoding="ascii") if ARCHIVED.is_file() else ""
    found = re.fullmatch(r"commit: ([0-9a-f]{40})", text.strip())
    return (found[1], False) if found else ("", True)


def _output(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_machine() -> dict[str, Any]:
    """CPU model and flags, cores, memory, GPU: what a number means nothing without."""
    model, flags = _cpu_info()
    return {
        "cpu": model,
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "gpu": _gpu(),
    }


def _cpu_info() -> tuple[str, frozenset[str]]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", ""))
    return fields.get("model name", platform.machine()), frozenset(flags.split())


def _memory_gib() -> float | None:
    if not hasattr(os, "sysconf"):
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _gpu() -> str | None:
    """Name, driver and clocks of the first GPU as nvidia-smi gives them, None without one."""
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem"
    try:
        text = _output(["nvidia-smi", query, "--format=csv,noheader"])
    except (OSError, subprocess.CalledProcessError):
        return None
    return text.strip().splitlines()[0] if text.strip() else None
