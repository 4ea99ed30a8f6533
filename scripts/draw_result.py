"""The command line of the scripts that draw one result file. Knows no picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


def draw_result(
    argv: Sequence[str] | None,
    about: str | None,
    plot: Callable[[Record, Path], None],
    table: Callable[[Record], str] | None = None,
) -> int:
    """Draw the named result into --output, and print its table if there is one; 0. about: the
    script's docstring."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    record = json.loads(args.result.read_text(encoding="utf-8"))
    plot(record, args.output)
    if table is not None:
        print(table(record))
    return 0
