"""The command `inspect`: what a checkpoint is and whether it would load. Starts nothing."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

GARBLED = 1
"""Exit code where it loads, and --check finds the weights garbled."""


def add_inspect(commands: Any) -> None:
    """deepinfer-sm86 inspect."""
    parser = commands.add_parser(
        "inspect",
        help="what a checkpoint is, or why it would be refused; reads headers only",
        description="Format, bits and bytes of a folder or GGUF file, from its headers. A "
        "checkpoint that would be refused ends with the one line of its refusal.",
    )
    parser.add_argument("path", help="demo, a checkpoint folder, a .gguf file, or a Hub id")
    parser.add_argument("--layers", action="store_true", help="a line for each linear")
    parser.add_argument(
        "--check", action="store_true", help="read every weight too and look for garbled ones"
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def inspect(options: argparse.Namespace) -> int:
    """Print it. Returns the exit code. Raises CheckpointError, one line."""
    from dataclasses import asdict

    from configs.load import cache_dir
    from engine_actor.load.inspection import check_weights, inspect_checkpoint, render
    from engine_actor.load.progress import ConsoleProgress
    from engine_actor.load.source import resolve

    path = resolve(options.path, cache_dir(), None, ConsoleProgress("model"))
    found = inspect_checkpoint(path)
    warnings = check_weights(path) if options.check else []
    if options.json:
        checked = {"warnings": warnings} if options.check else {}
        print(json.dumps({**asdict(found), **checked}, indent=1))
    else:
        print(render(found, options.layers))
        if options.check and not warnings:
            print("self-check: nothing looks garbled")
    for line in warnings:
        print(f"warning: {line}", file=sys.stderr)
    return GARBLED if warnings else 0
