#!/usr/bin/env python3
"""A conversion as a user runs it, watched: time, the host's memory, bytes against the plan, kills.

    scripts/bench_conversion.py /tmp/random-7b-fp16 --work /tmp/out --output conversion.json -- \\
        --recipe mixed --group 128 --fit 4GiB --tune-steps 0

What stands behind -- goes to `deepinfer-sm86 quantize`. Two run side by side: one is left alone,
the other is killed (SIGKILL) at random moments and started again with --resume; every file of both
must then be the same. Memory is the largest VmHWM of the left-alone process: what it had in memory
at its peak, file pages that it had mapped included. Exit code 1 where bytes differ, memory or size
is over its limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.quant.journal import JOURNAL, SUFFIX
from results import make_record, make_row, write_record

MIB = 1 << 20
POLL_S = 0.1
PLANNED = ("layers (", "embedding and head", "norms and biases")
"""Lines of the printed plan that make up the folder's weights."""
COMMAND = (sys.executable, "-m", "serve_app.cli", "quantize")


@dataclass
class Run:
    """One conversion, its processes one after the other. kills: (seconds after that process had
    its first layer, layers finished at that moment)."""

    source: str
    target: Path
    flags: list[str]
    pauses: list[float] = field(default_factory=list)
    output: str = ""
    wall_s: float = 0.0
    peak_mib: float = 0.0
    rcs: list[int] = field(default_factory=list)
    kills: list[tuple[float, int]] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)

    def go(self) -> None:
        """Until it ends by itself."""
        began = time.monotonic()
        for pause in [*self.pauses, None]:
            words = [*COMMAND, self.source, str(self.target), *self.flags]
            words += ["--resume"] if self.rcs else []
            if self._process(words, pause) >= 0:
                break
        self.wall_s = time.monotonic() - began

    def _process(self, words: list[str], pause: float | None) -> int:
        log = self.target.with_name(f"{self.target.name}.log-{len(self.rcs)}")
        with log.open("w", encoding="utf-8") as file:
            child = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
            first, at_start = None, self._finished()
            while child.poll() is None:
                now, done = time.monotonic(), self._finished()
                self.layers += [now] * (done - len(self.layers))
                self.peak_mib = max(self.peak_mib, _peak_mib(child.pid))
                if first is None and done > at_start:
                    first = now
                if pause is not None and first is not None and now - first >= pause:
                    child.kill()
                    self.kills.append((now - first, done))
                    pause = None
                time.sleep(POLL_S)
        self.output = log.read_text(encoding="utf-8")
        self.rcs.append(child.returncode)
        return child.returncode

    def _finished(self) -> int:
        """Layers in the journal."""
        path = self.target.with_name(self.target.name + SUFFIX) / JOURNAL
        try:
            return len(json.loads(path.read_text(encoding="utf-8"))["layers"])
        except (OSError, ValueError):
            return len(self.layers)

    @property
    def layer_s(self) -> list[float]:
        """From one finished layer to the next."""
        return [b - a for a, b in zip(self.layers, self.layers[1:], strict=False)]

    @property
    def planned_mib(self) -> float:
        """Weights of the folder by the plan that was printed before the first layer."""
        sizes = [
            float(line.split()[-2].replace(",", ""))
            for line in self.output.splitlines()
            if line.strip().startswith(PLANNED) and line.endswith(" MiB")
        ]
        return sum(sizes)


def _peak_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--earliest", type=float, default=1.0, help="seconds after a first layer")
    parser.add_argument("--latest", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--memory-mib", type=float, default=16 * 1024)
    parser.add_argument("--note", action="append", default=[])
    return parser


def rows_of(whole: Run, killed: Run, stored_mib: float, equal: int, files: int) -> list[Any]:
    """Of the record."""
    case = {"run": "left alone"}
    rows = [
        make_row(case, "wall", "s", [whole.wall_s], 0),
        make_row(case, "host_peak", "MiB", [whole.peak_mib], 0),
        make_row(case, "planned_weights", "MiB", [whole.planned_mib], 0),
        make_row(case, "stored_weights", "MiB", [stored_mib], 0),
    ]
    if whole.layer_s:
        rows.append(make_row(case, "layer", "s", whole.layer_s, 0))
    case = {"run": "killed and resumed"}
    rows.append(make_row(case, "wall", "s", [killed.wall_s], 0))
    rows.append(make_row(case, "host_peak", "MiB", [killed.peak_mib], 0))
    if killed.kills:
        rows.append(make_row(case, "killed_after", "s", [at for at, _ in killed.kills], 0))
        rows.append(make_row(case, "layers_at_kill", "", [n for _, n in killed.kills], 0))
    return [
        *rows,
        make_row(case, "equal_files", "", [equal], 0),
        make_row(case, "files", "", [files], 0),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Both runs, the comparison, the record."""
    words = sys.argv[1:] if arguments is None else arguments
    split = words.index("--") if "--" in words else len(words)
    options, flags = build_parser().parse_args(words[:split]), words[split + 1 :]
    options.work.mkdir(parents=True, exist_ok=True)
    draw = random.Random(options.seed)
    pauses = [draw.uniform(options.earliest, options.latest) for _ in range(options.kills)]
    whole = Run(options.source, options.work / "whole", flags)
    killed = Run(options.source, options.work / "killed", flags, pauses)
    threads = [threading.Thread(target=run.go) for run in (whole, killed)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(whole.output)
    print(f"exit codes {whole.rcs} and {killed.rcs}, killed at {killed.kills}")
    if whole.rcs[-1] or killed.rcs[-1]:
        print(killed.output[-2000:])
        return 1
    stored = open_checkpoint(whole.target).nbytes / MIB
    ours, theirs = digests(whole.target), digests(killed.target)
    equal = sum(theirs.get(name) == digest for name, digest in ours.items())
    files = len(ours.keys() | theirs.keys())
    rows = rows_of(whole, killed, stored, equal, files)
    hidden = ("work", "output", "note", "source")
    switches = {k: str(v) for k, v in vars(options).items() if k not in hidden}
    shown = (Path(word).name if "/" in word else word for word in flags)
    switches |= {"source": Path(options.source).name, "flags": " ".join(shown)}
    write_record(make_record("conversion", switches, rows, options.note), options.output)
    print(
        f"{whole.wall_s:.1f} s, host {whole.peak_mib:,.0f} MiB; planned {whole.planned_mib:,.1f}, "
        f"stored {stored:,.1f} MiB; {equal} of {files} files equal after {len(killed.kills)} kills"
    )
    fits = whole.peak_mib <= options.memory_mib and stored <= whole.planned_mib + 0.1
    return 0 if equal == files and fits else 1


if __name__ == "__main__":
    sys.exit(main())
