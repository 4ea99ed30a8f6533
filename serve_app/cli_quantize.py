"""The flags of `quantize` and `eval`, and the way from them to the converter. Imports no torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from configs.schema import MOST_THREADS
from serve_app.cli_options import require_range

RECIPES = ("w4", "w3", "mixed", "auto")


def add_quantize(commands: Any) -> None:
    """deepinfer-sm86 quantize SRC DST."""
    parser = commands.add_parser(
        "quantize",
        help="convert a checkpoint to 3 or 4 bits; resumable, whole or not at all",
        description="Convert a checkpoint to a packed folder, one layer in memory at a time.",
    )
    parser.add_argument("source", metavar="SRC", help="demo, a checkpoint folder, or a Hub id")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder to make")
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="w4",
        help="w4, w3: all layers; mixed: attention 4, MLP 3 bits; auto: measured, under --fit",
    )
    parser.add_argument("--group", type=int, help="weights that share a scale (default 64)")
    parser.add_argument("--offsets", action="store_true", help="an fp16 offset for each group too")
    parser.add_argument(
        "--embedding-bits",
        type=int,
        choices=(8, 4),
        help="embedding, and a tied head (default 8; 4 where only so an untied model meets --fit)",
    )
    parser.add_argument(
        "--head-bits", type=int, choices=(8, 4), default=8, help="a head of its own"
    )
    parser.add_argument("--fit", metavar="SIZE", help="the card that must serve it: 4GiB")
    parser.add_argument("--calibration", metavar="FILE", type=Path, help="UTF-8 text to adapt to")
    parser.add_argument("--text", metavar="FILE", type=Path, help="UTF-8 text to measure on")
    parser.add_argument(
        "--tune-steps",
        metavar="N",
        type=int,
        help="steps of tuning the whole model towards its source (default: up to 300 on a GPU, "
        "as far as text and memory go; 0 on a CPU)",
    )
    parser.add_argument("--resume", action="store_true", help="go on with an unfinished run")
    _add_machine(parser)


def add_eval(commands: Any) -> None:
    """deepinfer-sm86 eval MODEL."""
    parser = commands.add_parser("eval", help="perplexity of a model, and its KL to a source")
    parser.add_argument("model", metavar="MODEL", help="demo, a checkpoint folder, or a Hub id")
    parser.add_argument("--source", metavar="SRC", help="the model it was made from")
    parser.add_argument("--text", metavar="FILE", type=Path, help="UTF-8 text to measure on")
    parser.add_argument("--json", action="store_true", help="for machines")
    _add_machine(parser)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, help="torch threads on the CPU")


def quantize(options: argparse.Namespace) -> int:
    """Run the conversion; lines on stdout, the bar on stderr."""
    from safetensors import SafetensorError

    from configs.load import cache_dir
    from engine_actor.load.formats.base import LARGEST_GROUP
    from engine_actor.quant import command

    require_range(1, LARGEST_GROUP, group=options.group)
    require_range(1, MOST_THREADS, threads=options.threads)
    require_range(0, None, tune_steps=options.tune_steps)
    chosen = command.QuantizeOptions(
        source=options.source,
        target=options.target,
        recipe=options.recipe,
        group=options.group,
        offsets=options.offsets,
        embedding_bits=options.embedding_bits,
        head_bits=options.head_bits,
        fit=options.fit,
        calibration=options.calibration,
        text=options.text,
        tune_steps=options.tune_steps,
        resume=options.resume,
        device=options.device,
        threads=options.threads,
    )
    try:
        command.quantize(chosen, cache_dir(), print)
    except KeyboardInterrupt:
        print("\nstopped; finished layers are kept, --resume goes on from them", file=sys.stderr)
        return 130
    except (OSError, SafetensorError) as error:  # a full disk, a target that cannot be made
        print(f"error: {error}; finished layers are kept, see --resume", file=sys.stderr)
        return 1
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Measure a model; lines or JSON on stdout."""
    from configs.load import cache_dir
    from engine_actor.quant import command

    require_range(1, MOST_THREADS, threads=options.threads)
    lines, document = command.evaluate(
        options.model, options.source, options.text, options.device, options.threads, cache_dir()
    )
    print(json.dumps(document, indent=1) if options.json else "\n".join(lines))
    return 0
