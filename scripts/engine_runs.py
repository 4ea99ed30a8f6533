"""An engine stepped by hand with a clock beside it: when each request got each of its tokens.

Shared by the benches that drive `Engine.step()` itself: scheduler, paged KV and sampler included,
no thread, no HTTP. Knows nothing of what a bench asks or reports.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from configs.load import cache_dir, merged
from configs.schema import AppArgs
from cpu_peers import Prompts
from engine_actor.build import build_engine
from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import TokenLogprobs
from engine_actor.engine import Engine
from engine_actor.events import StepEvents
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.source import resolve
from engine_actor.messages import Cancel, Flag, Submit
from random_model import random_engine

CLIENT = "bench"
RANDOM = "random:"
UNFINISHED = (Flag.RUNNING, Flag.REQUEUED)
BACKENDS = {"w4a16": {4}, "w3a16": {3}, "mixed": {3, 4}, "fp16": {0}}
"""Bits of the layers that each of the seed's backends means; `auto` takes the checkpoint's."""
MAX_STEPS = 1_000_000


class BenchError(RuntimeError):
    """The bench cannot say what it was asked for; one line."""


@dataclass(eq=False)
class Request:
    """One request: `times` has one entry per token, seconds of the run's clock."""

    rid: int
    prompt_tokens: int
    sent: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Flag | None = None
    code: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from the submit to the first token."""
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Mean seconds a token after the first. Raises ZeroDivisionError for fewer than two."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


class EngineRun:
    """Submits, steps and keeps what was heard. `after_step` may submit or cancel."""

    def __init__(
        self, engine: Engine, seed: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.requests: dict[int, Request] = {}
        self.refused: dict[str, int] = {}
        self._prompts = Prompts(engine.facts.vocab_size, seed)
        self._next_rid = 1

    def prompt(self, tokens: int) -> tuple[int, ...]:
        """Random ids; no two prompts of a run begin alike, so no prefix cache can help."""
        return self._prompts.next(tokens)

    def submit(self, prompt: int | Sequence[int], max_tokens: int, **sampling: Any) -> Request:
        """A random prompt of so many tokens, or these ids; greedy and without an end-of-text unless
        told otherwise. Raises BenchError where the engine refuses."""
        request = self.offer(prompt, max_tokens, **sampling)
        if request is None:
            raise BenchError(f"the engine refused a request: {', '.join(self.refused)}")
        return request

    def offer(
        self, prompt: int | Sequence[int], max_tokens: int, salt: str = "", **sampling: Any
    ) -> Request | None:
        """As submit, but a refusal is counted by its code and is None. `salt`: another one shares
        no cached prefix."""
        ids = self.prompt(prompt) if isinstance(prompt, int) else tuple(prompt)
        rid, self._next_rid = self._next_rid, self._next_rid + 1
        given = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | sampling
        message = Submit(rid, ids, SamplingParams(**given), salt=salt, trace_id=f"r{rid}")
        request = Request(rid, len(ids), self.clock())
        code = self.engine.submit(CLIENT, message)
        if code is not None:
            self.refused[code] = self.refused.get(code, 0) + 1
            return None
        self.requests[rid] = request
        return request

    def cancel(self, request: Request) -> None:
        """Ask for its end; it is heard in a step to come."""
        self.engine.cancel(CLIENT, Cancel(request.rid))

    def step(self) -> StepEvents:
        """One step of the engine; its tokens bear the time at which it returned."""
        events = self.engine.step()
        now = self.clock()
        for event in events.by_client.get(CLIENT, ()):
            request = self.requests[event.rid]
            if request.end is not None:
                raise BenchError(f"request {event.rid} was told more after its end")
            request.tokens += event.tokens
            request.logprobs += event.extra.logprobs
            request.times += [now] * len(event.tokens)
            if event.flag not in UNFINISHED:
                request.end = event.flag
                request.code = event.extra.error_code
        return events

    def until(self, done: Callable[[], bool]) -> list[float]:
        """Step until done(); the seconds of each step. Raises BenchError where the engine has
        nothing left to do before that."""
        seconds: list[float] = []
        for _ in range(MAX_STEPS):
            if done():
                return seconds
            if not self.engine.has_work:
                raise BenchError("the engine ran out of work before the bench was done")
            started = self.clock()
            self.step()
            seconds.append(self.clock() - started)
        raise BenchError(f"not done after {MAX_STEPS} steps")

    def finish(self) -> list[float]:
        """Step until nobody is left; the seconds of each step."""
        return self.until(lambda: not self.engine.has_work)

    def cancel_all(self) -> None:
        """End what runs and forget all requests: the next repetition starts empty."""
        for request in self.requests.values():
            if request.end is None:
                self.cancel(request)
        self.finish()
        self.requests.clear()

    def counters(self, *names: str) -> dict[str, int]:
        """Present values of the engine's counters."""
        return {name: int(self.engine.metrics.value(name)) for name in names}


def add_model_flags(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """What to run and under which settings; all of it ends in the result's switches."""
    parser.add_argument(
        "--checkpoint",
        default=default,
        required=default is None,
        help="a checkpoint folder, a Hub id, demo, or random:SHAPE (random_model.py)",
    )
    parser.add_argument("--backend", choices=["auto", *BACKENDS], default="auto")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--cache-dir", type=Path, help="where demo and Hub models are kept")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of `engine:` by its dotted path, the value as JSON or text",
    )


def settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE pairs as nested settings: kv.dtype=int8 is {"kv": {"dtype": "int8"}}."""
    found: dict[str, Any] = {}
    for pair in pairs:
        path, sign, text = pair.partition("=")
        if not sign:
            raise BenchError(f"--set {pair}: no = in it")
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = text
        for key in reversed(path.split(".")):
            value = {key: value}
        found = merged(found, value)
    return found


def engine_of(
    args: argparse.Namespace,
    settings: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
) -> Engine:
    """The engine that the flags name. `settings` of the bench lie under those of --set.

    Raises BenchError where --backend is not what the checkpoint holds, CheckpointError.
    """
    given = merged({"device": args.device}, merged(settings or {}, settings_of(args.set)))
    if args.checkpoint.startswith(RANDOM):
        shape = args.checkpoint.removeprefix(RANDOM)
        engine = random_engine(shape, given, max_model_len=max_model_len)
        kinds = engine.facts.weights
    else:
        folder = resolve(args.checkpoint, args.cache_dir or cache_dir(), None)
        source = {"path": args.checkpoint, "max_model_len": max_model_len}
        app = AppArgs.model_validate({"model": source, "engine": given})
        kinds = str(open_checkpoint(folder).quantisation)
        engine = build_engine(app, folder)
    require_backend(args.backend, kinds)
    return engine


def require_backend(backend: str, kinds: str) -> None:
    """Raise BenchError unless the bits that `backend` means are among `kinds`, a text as
    Quantisation gives it."""
    found = {bits for bits in (3, 4) if f"x W{bits}" in kinds} or {0}
    if backend != "auto" and not BACKENDS[backend] <= found:
        raise BenchError(f"--backend {backend}: the checkpoint holds {kinds}")


def switches_of(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """Every flag, and what the engine made of them."""
    flags = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in ("note", "output")
    }
    return flags | {
        "engine": engine.config.model_dump(mode="json"),
        "facts": asdict(engine.facts),
    }
