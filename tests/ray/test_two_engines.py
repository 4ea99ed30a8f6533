"""Two engines behind one address: how requests are spread, and what one engine's death is to the
streams of the other. A server of its own, asked over HTTP alone.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ray.conftest import ROOT, SETTINGS
from tests.ray.served import Served, wait_until
from tests.ray.streams import Stream, started_stream

pytestmark = pytest.mark.ray

STREAMS = 8
"""Half of what both run at once: if one dies, the other has room for what comes next."""
NAMES = {"engine-0", "engine-1"}


@pytest.fixture(scope="module")
def served(tiny_folder: Path) -> Iterator[Served]:
    server = Served(
        ROOT, "--model", str(tiny_folder), **{**SETTINGS, "DEEPINFER_ENGINE__NUM_ENGINES": "2"}
    )
    print(f"\ntwo engines ready after {server.start_s:.1f} s")
    try:
        ingresses: set[str | None] = {None}

        def both_answer() -> bool:
            ingresses.add(ingress_of(server))
            return len(ingresses) == 3 and running(server).keys() == NAMES

        wait_until(both_answer, 120, "both engines and an answer of each ingress", 0.1)
        yield server
    finally:
        server.stop()


def ingress_of(served: Served) -> str | None:
    """The ingress replica that answers this time."""
    status, answer = served.get("/v1/status")
    return answer["ingress"]["client"] if status == 200 else None


def running(served: Served) -> dict[str, int]:
    """Requests in each engine that answers."""
    status, page = served.get("/metrics")
    found = re.findall(r'^requests_running\{engine="([^"]+)"\} (\S+)$', str(page), re.MULTILINE)
    return {name: int(float(count)) for name, count in found if status == 200}


def engine_pids(served: Served) -> set[int]:
    return {member.pid for member in served.members() if "EngineActor" in member.command}


async def open_streams(served: Served) -> tuple[list[Stream], dict[str, int]]:
    """STREAMS that do not end by themselves, and how many of them each engine has."""
    streams = [await started_stream(served.port, f"endless {i}", 3000) for i in range(STREAMS)]
    return streams, await asyncio.to_thread(running, served)


def test_requests_are_spread_evenly(served: Served) -> None:
    async def spread() -> dict[str, int]:
        streams, counts = await open_streams(served)
        for stream in streams:
            await stream.cut()
        return counts

    counts = asyncio.run(spread())
    assert counts.keys() == NAMES
    assert sum(counts.values()) == STREAMS
    assert min(counts.values()) >= STREAMS // 2 - 1, counts
    wait_until(lambda: running(served) == dict.fromkeys(NAMES, 0), 30, "nobody decodes for nobody")


def test_when_one_is_killed_the_other_answers(served: Served) -> None:
    """Its own streams go on, what comes next is served by it, and the dead one comes back."""
    before = engine_pids(served)
    assert len(before) == 2
    victim = min(before)

    async def kill_one() -> tuple[list[tuple[bool, str | None]], dict[str, int], list[int]]:
        streams, counts = await open_streams(served)
        reading = [asyncio.create_task(stream.rest()) for stream in streams]
        os.kill(victim, signal.SIGKILL)
        # Evenly spread, so half of them, or one less, have nothing left to tell but an error.
        await soon(lambda: sum(s.is_done for s in streams) in counts.values(), "errors told")
        asked = [asyncio.to_thread(complete, served) for _ in range(STREAMS // 2)]
        statuses = await asyncio.gather(*asked)
        alive = [(stream, len(stream.events)) for stream in streams if not stream.is_done]
        await soon(lambda: all(len(s.events) > n for s, n in alive), "more from the other engine")
        for stream, _ in alive:
            await stream.cut()
        await asyncio.wait(reading)
        return [(stream.is_done, stream.error) for stream in streams], counts, statuses

    ends, counts, statuses = asyncio.run(kill_one())
    assert set(ends) == {(True, "engine_restarted"), (False, None)}
    assert ends.count((False, None)) in counts.values()
    assert statuses == [200] * len(statuses)
    assert before - engine_pids(served) == {victim}
    wait_until(lambda: running(served) == dict.fromkeys(NAMES, 0), 120, "both again, idle", 0.1)


async def soon(ask: Callable[[], bool], what: str) -> None:
    """Wait for what the tasks of this loop bring about."""
    await asyncio.to_thread(wait_until, ask, 30, what)


def complete(served: Served) -> int:
    """The status of a short completion."""
    return served.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0]
