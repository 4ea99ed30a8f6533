#!/usr/bin/env python3
"""One decode step of the model alone, as a replayed CUDA graph: its time beside its kernels' sum.

    scripts/bench_decode_step.py --rows 1 8 16 32 64 --context 512

Weights are random, of Qwen2.5-3B's shape unless --shape says otherwise. Times are medians over
replays, of events around each; the tracer's sum of kernels comes from other replays. No scheduler
and no sampler: bench_engine.py measures the engine. --without times the step again with all
launches of one kernel left out, then another: what a step would gain if it cost nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine_actor.core.plan import DecodeSlot
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.runner import ModelRunner, build_runner
from engine_actor.work.inputs import build_decode
from gpu_time import trace
from kernels.jit.kernel import Kernel
from random_model import SHAPES, random_checkpoint

BLOCK = 16
TRACED = 5


def runner_of(shape: str, rows: int, context: int, kv_dtype: str, graphs: bool) -> ModelRunner:
    """With a cache of random content for `rows` sequences."""
    device = torch.device("cuda")
    checkpoint = random_checkpoint(SHAPES[shape], device)
    runner = build_runner(
        checkpoint.config,
        checkpoint.weights(),
        device=device,
        kv_dtype=kv_dtype,
        packed=checkpoint.packed,
    )
    runner.prepare_decode(rows, context, graphs)
    runner.resize_kv(rows * -(-context // BLOCK))
    with torch.inference_mode():
        for layer in runner.kv.layers:
            if isinstance(layer, torch.Tensor):
                layer.normal_()
    return runner


def batch(runner: ModelRunner, rows: int, length: int, context: int) -> BatchInputs:
    """`rows` sequences of `length` keys, the new one included."""
    each = -(-context // BLOCK)
    slots = [
        DecodeSlot(("", i), length - 1, 7 * i, tuple(range(i * each, (i + 1) * each)), i)
        for i in range(rows)
    ]
    return build_decode(slots, BLOCK, runner.device)


@contextmanager
def left_out(entry: str) -> Iterator[None]:
    """Launches of the kernel of that name do nothing while it is open."""
    launch = Kernel.launch

    def launch_others(kernel: Kernel, *args: Any, **kwargs: Any) -> None:
        if kernel.entry != entry:
            launch(kernel, *args, **kwargs)

    Kernel.launch = launch_others  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Kernel.launch = launch  # type: ignore[method-assign]


def without(
    runner: ModelRunner, entry: str, inputs: BatchInputs, context: int, replays: int
) -> float:
    """Median seconds of the step without one kernel; the graphs are captured anew."""
    with left_out(entry):
        runner.prepare_decode(len(inputs.q_lens), context, True)
        seconds(lambda: runner.decode_logits(inputs), 20)
        return statistics.median(seconds(lambda: runner.decode_logits(inputs), replays))


def seconds(run: Callable[[], object], times: int) -> list[float]:
    """Of each call, by events around it; calls are queued without a wait."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(times)
    ]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def main() -> None:
    """Print a table, and the kernels of each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="3b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=512, help="keys before the step")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--replays", type=int, default=60)
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument("--without", nargs="*", default=[], help="kernels to leave out, by name")
    parser.add_argument("--shown", type=int, default=14, help="kernels named for each size")
    args = parser.parse_args()
    most = args.context + 512
    runner = runner_of(args.shape, max(args.rows), most, args.kv_dtype, not args.eager)
    table = [f"{'rows':>5} {'step us':>9} {'kernels us':>11} {'launches':>9} {'tokens/s':>9}"]
    for rows in args.rows:
        inputs = batch(runner, rows, args.context + 64, most)

        def step(inputs: BatchInputs = inputs) -> torch.Tensor:
            return runner.decode_logits(inputs)

        seconds(step, 20)
        took = statistics.median(seconds(step, args.replays))
        traced = trace(lambda: [step() for _ in range(TRACED)], TRACED)
        if traced is None:
            raise SystemExit("no device event was traced: is there a GPU?")
        sums = sum(time for _, time, _ in traced.names)
        table.append(
            f"{rows:5d} {1e6 * took:9.1f} {1e6 * sums:11.1f} {traced.launches:9.0f}"
            f" {rows / took:9.0f}"
        )
        print(f"--- {rows} rows", *traced.lines()[: args.shown], sep="\n")
    print(*table, runner.graph_counts, sep="\n")
    for rows in args.rows if args.without else ():
        inputs = batch(runner, rows, args.context + 64, most)
        each = {entry: without(runner, entry, inputs, most, args.replays) for entry in args.without}
        print(f"{rows:5d}", *(f"without {name} {1e6 * took:.1f}" for name, took in each.items()))


if __name__ == "__main__":
    main()
