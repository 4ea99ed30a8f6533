#!/usr/bin/env python3
"""The engine's own speed on a GPU, beside its twins and its peers' published figures.

    scripts/bench_engine.py --output docs/results/gpu_engine.json \\
        --twin "no graphs" cuda_graphs=false --twin "synchronous" async_steps=false \\
        --twin "no prefill graphs" prefill_graphs=false

Through Engine.step(), scheduler and sampler included: decode of 1 to 64 streams, prefill of one and
of many prompts, TTFT of prompts on an idle engine. A twin is the same engine with other settings
in the same run. Weights are random, of Qwen2.5-3B's shape unless --checkpoint says otherwise.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from configs.load import merged
from engine_runs import (
    BenchError,
    EngineRun,
    Request,
    add_model_flags,
    engine_of,
    settings_of,
    switches_of,
)
from gpu_time import metered_waits, trace
from results import make_record, make_row, percentile, write_record

OURS = "deepinfer-sm86"
FLOOR_MS = 0.354
"""One read of the 3B's weights in W4, head included, at the 4.49 TB/s that the H200 reads."""
PEERS = {
    1: {"llama.cpp Q4_0": 439, "vLLM W4": 381, "vLLM fp16": 339},
    8: {"llama.cpp Q4_0": 1915, "vLLM W4": 2842, "vLLM fp16": 2636},
    16: {"llama.cpp Q4_0": 2359, "vLLM W4": 5498, "vLLM fp16": 4548},
    32: {"llama.cpp Q4_0": 3902, "vLLM W4": 9585, "vLLM fp16": 9709},
    64: {"llama.cpp Q4_0": 5916, "vLLM W4": 14627, "vLLM fp16": 18248},
}
"""Tokens/s of decode by streams, 512 in and 128 out, 3B shape, another run on such a card."""
PEER_PREFILL_MS, PEER_PREFILL_RATE, PEER_TTFT_MS = 34.0, 95_501, 13.0
"""vLLM W4: 2,048 tokens; 16 x 2,048 tokens in tokens/s; first token after 512."""
TRACED_STEPS = 12
TTFT_PROMPTS = 5
"""Of each repetition and length."""


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser, default="random:3b")
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=512, help="tokens in, for decode")
    parser.add_argument("--out", type=int, default=128, help="tokens out of each stream")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of a prompt; 0: none")
    parser.add_argument("--prefill-many", type=int, default=16, help="so many of them at once")
    parser.add_argument(
        "--ttft", type=int, nargs="*", default=[32, 128, 512], help="tokens of a prompt, for TTFT"
    )
    parser.add_argument("--prefill-chunk-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="repetitions thrown away")
    parser.add_argument(
        "--twin",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "KEY=VALUE"),
        help="the same engine under other settings, in the same run",
    )
    parser.add_argument("--twin-repeats", type=int, default=2)
    parser.add_argument("--no-trace", action="store_true", help="leave out the device's busy time")
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


Found = dict[tuple[str, str, int], list[float]]
"""(metric, unit, streams or prompt tokens) -> raw values of all repetitions."""


class Bench:
    """All measurements of one engine."""

    def __init__(self, run: EngineRun, args: argparse.Namespace) -> None:
        self.run, self.args = run, args
        self.found: Found = {}
        self.notes: list[str] = []

    def keep(self, metric: str, unit: str, size: int, values: Sequence[float]) -> None:
        self.found.setdefault((metric, unit, size), []).extend(values)

    def measure(self, repeats: int) -> None:
        """The warm-up repetitions, then those that count."""
        for turn in range(self.args.warmup + repeats):
            if turn == self.args.warmup:
                self.found.clear()
            for streams in self.args.streams:
                self.decode(streams)
            if self.args.prefill:
                self.prefill(1)
                self.prefill(self.args.prefill_many)
            for tokens in self.args.ttft:
                self.ttft(tokens)
        if not self.args.no_trace:
            for streams in self.args.streams:
                self.trace(streams)

    def decode(self, streams: int) -> None:
        """From the step in which the last prompt gives its first token to that in which the first
        text ends, every stream decodes and nothing else runs. Peers' `out_tok_s` is all tokens over
        all time, prompts included."""
        run = self.run
        started = run.clock()
        texts = self.decoding(streams)
        begun, made = run.clock(), sum(len(text.times) for text in texts)
        with metered_waits() as meter:
            seconds = run.until(lambda: any(text.end for text in texts))
            waited = meter.seconds
        total = sum(len(text.times) for text in texts) - made
        self.keep("decode_tokens_per_second", "tokens/s", streams, [total / (run.clock() - begun)])
        self.keep("step", "ms", streams, [1e3 * value for value in seconds])
        self.keep(
            "host_time_per_step", "ms", streams, [1e3 * (sum(seconds) - waited) / len(seconds)]
        )
        run.finish()
        whole = sum(len(text.times) for text in texts) / (run.clock() - started)
        self.keep("text_tokens_per_second", "tokens/s", streams, [whole])
        run.cancel_all()

    def decoding(self, streams: int) -> list[Request]:
        """So many streams, each past its first token."""
        texts = [self.run.submit(self.args.prompt, self.args.out) for _ in range(streams)]
        self.run.until(lambda: all(text.times for text in texts))
        if any(text.end for text in texts):
            raise BenchError(f"--out {self.args.out}: a text ended before the last one began")
        return texts

    def trace(self, streams: int) -> None:
        """Busy time of the device in a few steps, against the steps that were timed before."""
        texts = self.decoding(streams)
        steps = min(TRACED_STEPS, self.args.out - max(len(text.times) for text in texts) - 1)
        found = trace(lambda: [self.run.step() for _ in range(steps)], steps)
        self.run.cancel_all()
        if found is None:
            return
        step = percentile(self.found["step", "ms", streams], 0.5)
        self.keep("device_busy_per_step", "ms", streams, [1e3 * found.busy])
        self.keep("device_idle_share", "share", streams, [max(0.0, 1 - 1e3 * found.busy / step)])
        self.keep("launches_per_step", "kernels and copies", streams, [found.launches])
        self.notes += [f"{streams} streams: {line}" for line in found.lines()]

    def prefill(self, prompts: int) -> None:
        """From the first submit to the last first token."""
        run, tokens = self.run, self.args.prefill
        # Drawing 16 x 2,048 ids takes a tenth of what is timed.
        drawn = [run.prompt(tokens) for _ in range(prompts)]
        started = run.clock()
        texts = [run.submit(ids, 1) for ids in drawn]
        run.until(lambda: all(text.times for text in texts))
        seconds = run.clock() - started
        total = prompts * tokens
        if prompts == 1:
            self.keep("prefill", "ms", total, [1e3 * seconds])
        self.keep("prefill_tokens_per_second", "tokens/s", total, [total / seconds])
        run.cancel_all()

    def ttft(self, tokens: int) -> None:
        """Prompts on an idle engine, one after the other."""
        for _ in range(TTFT_PROMPTS):
            text = self.run.submit(tokens, 1)
            self.run.until(lambda text=text: bool(text.times))
            self.keep("ttft", "ms", tokens, [1e3 * text.ttft])
            self.run.cancel_all()

    def rows(self, engine: str, warmup: int) -> list[dict[str, Any]]:
        """One row a metric and size."""
        by_streams = ("decode", "text", "step", "host", "device", "launches")
        return [
            make_row(
                {"engine": engine, "streams" if metric.startswith(by_streams) else "tokens": size},
                metric,
                unit,
                values,
                warmup,
            )
            for (metric, unit, size), values in self.found.items()
        ]


def measure_engine(
    name: str, args: argparse.Namespace, settings: Mapping[str, Any], repeats: int
) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
    """Rows, notes and switches of one engine, which is gone afterwards."""
    base = {"prefill_chunk_tokens": args.prefill_chunk_tokens}
    engine = engine_of(args, merged(base, settings))
    say(f"{name}: {engine.facts.weights} on {engine.facts.device}, {engine.facts.kv_blocks} blocks")
    bench = Bench(EngineRun(engine), args)
    bench.measure(repeats)
    rows = bench.rows(name, args.warmup)
    say(table(rows))
    notes = [f"{name}, {note}" for note in bench.notes]
    switches = switches_of(args, engine)
    del bench, engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows, notes, switches


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a number of streams, then the prompts."""
    found = {
        (row["case"].get("streams", 0), row["case"].get("tokens", 0), row["metric"]): row
        for row in rows
    }
    lines = []
    for streams in sorted({streams for streams, _, _ in found if streams}):
        cell = {metric: row for (s, _, metric), row in found.items() if s == streams}
        rate, step = cell["decode_tokens_per_second"], cell["step"]
        line = f"{streams:3d} streams {rate['median']:8.0f} tokens/s"
        line += f"  step {step['median']:.3f} ms (p95 {step['p95']:.3f})"
        line += f"  host {cell['host_time_per_step']['median']:.3f} ms"
        if "device_idle_share" in cell:
            line += f"  idle {cell['device_idle_share']['median']:.0%}"
            line += f"  {cell['launches_per_step']['median']:.0f} launches"
        line += f"  floor/step {FLOOR_MS / step['median']:.1%}"
        lines.append(line + _peers(streams))
    for (_, tokens, metric), row in found.items():
        if tokens:
            unit = row["unit"]
            lines.append(f"{metric} of {tokens} tokens: {row['median']:.2f} {unit}")
    return "\n".join(lines)


def _peers(streams: int) -> str:
    peers = PEERS.get(streams, {})
    return f"  (peers: {', '.join(f'{name} {rate}' for name, rate in peers.items())})" * bool(peers)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure ours, then its twins; print and write."""
    args = build_parser().parse_args(argv)
    rows, notes, switches = measure_engine(OURS, args, {}, args.repeats)
    for name, *pairs in args.twin:
        more, _, twin = measure_engine(name, args, settings_of(pairs), args.twin_repeats)
        rows += more
        switches[f"engine of {name}"] = twin["engine"]
    switches["peers, tokens/s, another run"] = PEERS
    write_record(make_record("gpu_engine", switches, rows, [*args.note, *notes]), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
