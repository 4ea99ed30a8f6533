"""Many requests at once: each is handed to the engine before the next one is read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.turnstile import Turnstile
from tests.serve.conftest import running_api
from tests.serve.doubles import PieceTokenizer

pytestmark = pytest.mark.anyio


async def test_one_enters_in_a_turn_of_the_loop_in_order() -> None:
    turnstile, turns, entered = Turnstile(), 0, list[tuple[int, int]]()

    def count() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(count)

    async def one(name: int) -> None:
        await turnstile.enter()
        entered.append((turns, name))

    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(one(name)) for name in range(5)]
    loop.call_soon(count)
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert [name for _, name in entered] == [0, 1, 3, 4]
    assert [turn for turn, _ in entered] == sorted({turn for turn, _ in entered})
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    before = turns
    await turnstile.enter()
    assert turns == before, "nobody is before it"


async def test_a_request_is_posted_before_the_next_one_is_parsed(monkeypatch: Any) -> None:
    log: list[str] = []
    async with running_api(PieceTokenizer(), lambda submit: [65, 66]) as api:
        (port,) = api.ports
        intake = api.app.state.intake
        parse, post = intake.parse, port.post

        def parsed(endpoint: Any, body: Any) -> Any:
            log.append(f"parse {body['prompt']}")
            return parse(endpoint, body)

        def posted(client: str, seq: int, messages: list[tuple[Any, ...]]) -> Any:
            # As over a socket: what is called is sent.
            if any(message[0] != "beat" for message in messages):
                log.append(f"post {len(messages)}")
            return post(client, seq, messages)

        monkeypatch.setattr(intake, "parse", parsed)
        monkeypatch.setattr(port, "post", posted)
        while api.link._mailbox._waiter is None:
            await asyncio.sleep(0)
        answers = await asyncio.gather(*(api.complete(f"p{i}", max_tokens=2) for i in range(6)))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["AB"] * 6
    assert log[:2] == ["parse p0", "post 1"]
    assert [line for line in log if line.startswith("parse")] == [f"parse p{i}" for i in range(6)]
    # The others wait for one reply at most, which comes while they are being parsed.
    posts = [index for index, line in enumerate(log) if line.startswith("post")]
    assert posts[1] < log.index("parse p5")
