"""Runs a plain engine by hand and collects what each client would hear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine_actor.core.params import SamplingParams
from engine_actor.engine import Engine
from engine_actor.events import StepEvents
from engine_actor.messages import Extra, Flag, Submit, Usage

CLIENT = "c"
MAX_STEPS = 20_000


@dataclass
class Heard:
    """All that one request was told."""

    tokens: list[int] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)

    @property
    def end(self) -> Flag | None:
        """The one final flag; None while it runs."""
        final = [flag for flag in self.flags if flag not in (Flag.RUNNING, Flag.REQUEUED)]
        assert len(final) <= 1, f"ended {len(final)} times"
        return final[0] if final else None

    @property
    def usage(self) -> Usage:
        found = [extra.usage for extra in self.extras if extra.usage is not None]
        assert len(found) == 1
        return found[0]

    @property
    def code(self) -> str | None:
        return next((extra.error_code for extra in self.extras if extra.error_code), None)


class Driver:
    """`heard` by (client, rid). `after_step` may submit, cancel, evict or assert."""

    def __init__(self, engine: Engine, check: bool = True) -> None:
        self.engine = engine
        self.heard: dict[tuple[str, int], Heard] = {}
        self.steps: list[StepEvents] = []
        self.check = check

    def submit(
        self,
        rid: int,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        client: str = CLIENT,
        priority: int = 0,
        **sampling: object,
    ) -> str | None:
        """Greedy unless told otherwise; trace id "r<rid>". Returns the code of a refusal."""
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | sampling))
        message = Submit(rid, tuple(prompt), params, priority=priority, trace_id=f"r{rid}")
        code = self.engine.submit(client, message)
        if code is None:
            self.heard.setdefault((client, rid), Heard())
        return code

    def step(self) -> StepEvents:
        events = self.engine.step()
        self.steps.append(events)
        for client, list_of_events in events.by_client.items():
            for event in list_of_events:
                heard = self.heard.setdefault((client, event.rid), Heard())
                assert heard.end is None, f"{event.rid} is told more after its end"
                heard.tokens.extend(event.tokens)
                heard.flags.append(event.flag)
                heard.extras.append(event.extra)
        if self.check:
            self.engine.scheduler.check()
        return events

    def run(self, after_step: Callable[[int], None] = lambda step: None) -> None:
        """Step until nothing is left to do."""
        for step in range(MAX_STEPS):
            if not self.engine.has_work:
                return
            self.step()
            after_step(step)
        raise AssertionError(f"still busy after {MAX_STEPS} steps")

    def tokens(self, rid: int, client: str = CLIENT) -> list[int]:
        return self.heard[client, rid].tokens

    def end(self, rid: int, client: str = CLIENT) -> Flag | None:
        return self.heard[client, rid].end

    def assert_all_free(self) -> None:
        """Every block is free or evictable, nobody is left."""
        stats = self.engine.scheduler.stats
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_blocks == stats.capacity_blocks
        self.engine.kv.check(())
