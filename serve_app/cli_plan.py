"""The command `plan`: what a model takes on a GPU, and what fits beside it. Loads nothing."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from serve_app.cli_options import add_model_options, args_of, require_range

DOES_NOT_FIT = 1
NO_CARD = 2
"""Exit codes: refused; neither a GPU here nor a card given."""
MOST_MB = 1 << 40
"""So many MiB no card will have."""


def add_plan(commands: Any) -> None:
    """deepinfer-sm86 plan."""
    parser = commands.add_parser(
        "plan",
        help="what the model takes on a GPU, and which context and how many sequences fit",
        description="The memory plan that a start would follow, from the checkpoint's headers: of "
        "this machine's GPU, or of a card that is not here. Exit code 1 where it does not fit; the "
        "last lines then name what would.",
    )
    add_model_options(parser)
    parser.add_argument("--card-mb", type=int, help="memory of a card that is not here, MiB")
    parser.add_argument("--sm", type=int, default=86, help="its compute capability: 86 for 8.6")
    parser.add_argument("--json", action="store_true", help="for machines")


def plan(options: argparse.Namespace) -> int:
    """Print it. Returns the exit code. Raises CheckpointError, one line."""
    from configs.load import cache_dir
    from engine_actor import capabilities
    from engine_actor.load.progress import ConsoleProgress
    from engine_actor.load.source import resolve

    args = args_of(options)
    require_range(1, MOST_MB, card_mb=options.card_mb)
    require_range(1, None, sm=options.sm)
    if options.card_mb is None and not capabilities.usable_gpus():
        print("error: torch finds no GPU here; name a card by --card-mb", file=sys.stderr)
        return NO_CARD
    source = args.model
    folder = resolve(source.path, cache_dir(), source.revision, ConsoleProgress("model"))
    found = capabilities.memory_plan(args, folder, options.card_mb, options.sm)
    print(json.dumps(found.as_dict(), indent=1) if options.json else capabilities.render(found))
    return 0 if found.refusal is None else DOES_NOT_FIT
