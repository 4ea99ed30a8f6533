#!/usr/bin/env python3
"""Minutes of random arrivals, cancels and injected out-of-memory faults: is anything left behind?

    scripts/soak.py --checkpoint random:3b --seconds 480 --output docs/results/gpu_soak.json

From time to time nothing new comes in until the engine is empty: then every block must be free,
memory must not have grown, and one fixed prompt must give the text it gave at first. The record
with its verdict is written anew after each period. Exit code 1 with a line for whatever was leaked,
lost or wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema import FaultRule
from engine_actor.messages import Flag
from engine_runs import EngineRun, Request, add_model_flags, engine_of, switches_of
from memory_use import device_mib, live_sequences, pool_mib, reserved_mib, resident_mib
from results import make_record, write_record
from soak_record import Quiet, memory_trends, process_mib, rows_of

NEVER = {"stage": "finish", "request": "nobody", "times": 1}
"""Keeps the engine's fault hook armed from the start; more rules are added on the way."""
STAGES = ("prepare", "launch", "finish")
GOLDEN_TOKENS = 24


def build_parser() -> argparse.ArgumentParser:
    """Every flag; all of them end in the result's switches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser, default="random:3b")
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--seconds", type=float, default=480.0, help="load excluded")
    parser.add_argument("--quiet-every", type=float, default=30.0, help="seconds of a period")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second, on average")
    parser.add_argument("--most-prompt", type=int, default=1500, help="tokens")
    parser.add_argument("--most-out", type=int, default=200, help="tokens")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--cancel-share", type=float, default=0.15, help="of the requests")
    parser.add_argument("--fault-rate", type=float, default=1.0, help="injected OOMs a second")
    parser.add_argument("--device-growth-mb", type=float, default=16.0, help="allowed")
    parser.add_argument("--host-growth-mb", type=float, default=64.0, help="allowed")
    parser.add_argument(
        "--other-growth-mb", type=float, default=64.0, help="of the card's, allowed"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", action="append", default=[], help="kept in the result")
    return parser


@dataclass
class Soak:
    """One soak: `wrong` gathers what must not be, a line each."""

    run: EngineRun
    args: argparse.Namespace
    clock: Callable[[], float] = time.monotonic
    wrong: list[str] = field(default_factory=list)
    quiets: list[Quiet] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    submitted: int = 0
    asked_to_cancel: set[int] = field(default_factory=set)
    faults: int = 0
    heard: int = 0
    lost_blocks: int = 0
    held_sequences: int = 0
    other_texts: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.args.seed)
        self._not_ours = live_sequences()
        self._cancel_at: dict[int, int] = {}
        self._target: Request | None = None
        self._golden_prompt = self.run.prompt(40)
        self._golden: list[int] = []

    def go(self, save: Callable[[], object] = lambda: None) -> None:
        """Periods of load, each ended by a quiet moment and `save`, until the time is up."""
        self.quiet(0.0)
        started = self.clock()
        while self.clock() - started < self.args.seconds:
            begun = self.clock()
            self.load(min(begun + self.args.quiet_every, started + self.args.seconds))
            self.drain()
            self.quiet(self.clock() - begun)
            last = self.quiets[-1]
            print(
                f"{last.at - started:6.1f} s: {self.submitted} requests, {self.faults} faults, "
                f"{last.tokens / max(last.busy_seconds, 1e-9):.0f} tokens/s, device "
                f"{last.device_mib:.0f} MiB, host {last.host_mib:.0f} MiB",
                file=sys.stderr,
                flush=True,
            )
            save()

    def load(self, end: float) -> None:
        """Random requests until `end`."""
        due = self.clock()
        fault_due = due + self._wait(self.args.fault_rate)
        while (now := self.clock()) < end:
            while due <= now:
                self.arrive()
                due += self._wait(self.args.rate)
            if fault_due <= now:
                self.inject()
                fault_due += self._wait(self.args.fault_rate)
            if self.run.engine.has_work:
                self.step()
            else:
                time.sleep(max(0.0, min(due, end) - self.clock()))

    def drain(self) -> None:
        """Nothing new until everybody has ended."""
        while self.run.engine.has_work:
            self.step()

    def step(self) -> None:
        self.run.step()
        for rid, count in list(self._cancel_at.items()):
            request = self.run.requests[rid]
            if request.end is None and len(request.tokens) >= count:
                self.run.cancel(request)
                self.asked_to_cancel.add(rid)
            if request.end is not None or rid in self.asked_to_cancel:
                del self._cancel_at[rid]
        if self._target is not None and self._target.end is not None:
            self._target = None
            self.run.engine.faults.clear()

    def arrive(self) -> None:
        """One request; some will be cancelled, a few before their first token."""
        draw, args = self._draw, self.args
        prompt = 1 + int((args.most_prompt - 1) * draw.random() ** 3)
        out = draw.randint(1, args.most_out)
        request = self.run.offer(prompt, out, **self._sampling())
        self.submitted += 1
        if request is not None and draw.random() < args.cancel_share:
            self._cancel_at[request.rid] = draw.choice((0, 1, draw.randint(0, out)))

    def _sampling(self) -> dict[str, Any]:
        draw = self._draw
        if draw.random() < 0.5:
            return {}
        kinds = (
            {"temperature": 0.8, "top_p": 0.9, "seed": draw.randrange(2**31)},
            {"temperature": 1.0, "top_k": 20},
            {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
            {"logprobs": 3},
        )
        return dict(draw.choice(kinds))

    def inject(self) -> None:
        """Either a passing fault that a retry survives, or one that follows a request to its end.
        One request at a time is followed."""
        live = [r for r in self.run.requests.values() if r.end is None]
        stage = self._draw.choice(STAGES)
        if live and self._target is None and self._draw.random() < 0.3:
            self._target = self._draw.choice(live)
            rule = {"stage": stage, "request": f"r{self._target.rid}", "times": "always"}
        else:
            rule = {"stage": stage, "times": 1, "min_rows": self._draw.choice((None, 2))}
        self.run.engine.faults.add(FaultRule.model_validate(rule))
        self.faults += 1

    def _wait(self, rate: float) -> float:
        return self._draw.expovariate(rate) if rate else float("inf")

    def quiet(self, seconds: float) -> None:
        """The engine is empty: judge every request that has ended, then blocks, text, memory."""
        engine = self.run.engine
        engine.faults.clear()
        self._target = None
        tokens = self._judge()
        stats = engine.scheduler.stats
        if (stats.running, stats.waiting) != (0, 0):
            self.wrong.append(f"{stats.running} run and {stats.waiting} wait where nobody should")
        if stats.free_blocks != stats.capacity_blocks:
            lost = self.lost_blocks = stats.capacity_blocks - stats.free_blocks
            self.wrong.append(f"{lost} of {stats.capacity_blocks} blocks are not free")
        engine.kv.check(())
        engine.scheduler.check()
        self._same_text()
        left = live_sequences() - self._not_ours
        if left > 0:
            self.held_sequences = left
            self.wrong.append(f"{left} sequences are still held")
        memory = device_mib(engine), resident_mib(), reserved_mib(engine), pool_mib(engine)
        taken = 0.0 if engine.facts.device == "cpu" else process_mib()
        self.quiets.append(Quiet(self.clock(), tokens, seconds, *memory, taken))

    def _judge(self) -> int:
        tokens = 0
        for request in self.run.requests.values():
            tokens += len(request.tokens)
            name = "nothing" if request.end is None else request.end.name
            self.ends[name] += 1
            if request.end is Flag.CANCELLED and request.rid not in self.asked_to_cancel:
                self.wrong.append(f"request {request.rid} was cancelled by nobody")
            elif request.end not in (Flag.LENGTH, Flag.CANCELLED, Flag.OOM):
                self.wrong.append(f"request {request.rid} ended {name} ({request.code})")
        self.run.requests.clear()
        self.asked_to_cancel.clear()
        self._cancel_at.clear()
        self.heard += tokens
        return tokens

    def _same_text(self) -> None:
        salt = f"golden {len(self.quiets)}"  # the cache must not answer for the kernels
        request = self.run.submit(self._golden_prompt, GOLDEN_TOKENS, salt=salt)
        self.run.finish()
        self.heard += len(request.tokens)
        self._golden = self._golden or request.tokens
        if request.tokens != self._golden:
            self.other_texts += 1
            self.wrong.append(f"at {self.clock():.0f} s the fixed prompt gave another text")
        self.ends[Flag.LENGTH.name] += 1
        self.submitted += 1
        self.run.requests.clear()

    def verdict(self) -> dict[str, Any]:
        """`passed` only where nothing is `wrong`; beside them the figures that this rests on."""
        metrics, wrong, args = self.run.engine.metrics, list(self.wrong), self.args
        accepted = self.submitted - sum(self.run.refused.values())
        ended, made = sum(self.ends.values()), int(metrics.value("generation_tokens_total"))
        if ended != accepted:
            wrong.append(f"{accepted} were accepted, {ended} ended")
        if made != self.heard:
            wrong.append(f"{made} tokens were made, {self.heard} heard")
        if not self.ends[Flag.LENGTH.name]:
            wrong.append("no request ended by its length")
        allowed = {
            "device_mib": args.device_growth_mb,
            "host_mib": args.host_growth_mb,
            "other_mib": args.other_growth_mb,
        }
        memory, grew = memory_trends(self.quiets[1:], allowed)
        wrong += grew + unproved(self)
        return {
            "passed": not wrong,
            "wrong": wrong,
            "leaked": {"blocks": self.lost_blocks, "sequences": self.held_sequences},
            "lost": {"requests": accepted - ended, "tokens": made - self.heard},
            "fixed_texts": {"compared": len(self.quiets), "different": self.other_texts},
            "memory": memory,
        }


def unproved(soak: Soak) -> list[str]:
    """What the soak is for and never met."""
    faults = soak.run.engine.faults
    met = {
        "no fault fired": not soak.args.fault_rate or faults.fired,
        "nobody was cancelled": not soak.args.cancel_share or soak.ends[Flag.CANCELLED.name],
    }
    return [line for line, is_met in met.items() if not is_met]


def record_of(soak: Soak) -> dict[str, Any]:
    """All that is known by now."""
    engine = soak.run.engine
    counts = {
        "requests": soak.submitted,
        "refused": dict(soak.run.refused),
        "ends": dict(soak.ends),
        "faults_injected": soak.faults,
        "faults_fired": engine.faults.fired,
        "preemptions": engine.scheduler.stats.preemptions,
        "oom_retries_total": int(engine.metrics.value("oom_retries_total")),
        "periods": len(soak.quiets) - 1,
        "seconds": round(soak.quiets[-1].at - soak.quiets[0].at, 1),
    }
    found = {"counts": counts, "verdict": soak.verdict()}
    switches = switches_of(soak.args, engine) | found
    return make_record("soak", switches, rows_of(soak.quiets[1:]), soak.args.note)


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, write, and say what is wrong: exit code 1 then."""
    args = build_parser().parse_args(argv)
    engine = engine_of(args, {"faults": [NEVER]}, max_model_len=args.max_model_len)
    soak = Soak(EngineRun(engine, seed=args.seed), args)
    soak.go(lambda: write_record(record_of(soak), args.output))
    found = record_of(soak)["switches"]
    shown = found["counts"] | found["verdict"]
    print("\n".join(f"{name}: {value}" for name, value in shown.items()))
    return int(not found["verdict"]["passed"])


if __name__ == "__main__":
    sys.exit(main())
