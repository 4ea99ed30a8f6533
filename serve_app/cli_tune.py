"""The command `tune`: measure the kernels on this card for a model's shapes. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from serve_app.cli_options import add_model_options, args_of

NO_GPU = 2
"""Exit code where there is nothing to measure on."""


def add_tune(commands: Any) -> None:
    """deepinfer-sm86 tune."""
    parser = commands.add_parser(
        "tune",
        help="measure the kernels on this GPU, and keep which is fastest for which shape",
        description="Measure every CUDA backend on the model's linear layers. The table is written "
        "to the cache folder and asked before the one that is shipped.",
    )
    add_model_options(parser)


def tune(options: argparse.Namespace) -> int:
    """The bar on stderr, the result on stdout. Returns the exit code: NO_GPU without a GPU."""
    from configs.load import cache_dir
    from engine_actor import tuning
    from engine_actor.load.progress import ConsoleProgress
    from engine_actor.load.source import resolve

    args = args_of(options)
    if not tuning.can_tune():
        print("error: tune measures on a CUDA device, torch finds none here", file=sys.stderr)
        return NO_GPU
    source = args.model
    folder = resolve(source.path, cache_dir(), source.revision, ConsoleProgress("model"))
    print("\n".join(tuning.tune(folder, ConsoleProgress("tune"))))
    return 0
