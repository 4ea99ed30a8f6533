"""How many threads torch should have: one per physical core that this process may use, less one for
the processes around the engine.
"""

from __future__ import annotations

import os
from pathlib import Path

CORES = Path("/proc/cpuinfo")


def engine_threads(cores: int) -> int:
    """Threads of an engine on a machine with that many physical cores.

    torch's threads spin while they wait for one another; with a thread on every core, each slice
    that HTTP takes stops them all. On two cores a streamed token took 59 ms with two threads and
    43 ms with one (docs/log.md).
    """
    return max(1, cores - 1)


def physical_cores(cpuinfo: Path = CORES) -> int:
    """Physical cores among the CPUs that this process may run on; half of the logical ones, at
    least one, where the machine does not say."""
    allowed = _allowed_cpus()
    try:
        blocks = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n")
    except OSError:
        return max(1, len(allowed) // 2)
    cores = set()
    for block in blocks:
        pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
        fields = {name.strip(): value.strip() for name, value in pairs}
        if int(fields.get("processor", -1)) in allowed:
            # Virtual machines often leave the core out: then each processor counts.
            core = fields.get("core id", fields["processor"])
            cores.add((fields.get("physical id", ""), core))
    return max(1, len(cores))


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
