"""Many requests at once: each is handed to the engine before the next one is parsed."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from serve_app import generation
from serve_app.turnstile import A_TURN, Turnstile
from tests.serve.conftest import running_api
from tests.serve.doubles import PieceTokenizer

pytestmark = pytest.mark.anyio


async def test_a_few_enter_in_a_turn_of_the_loop_in_order() -> None:
    turnstile, turns, entered = Turnstile(), 0, list[tuple[int, int]]()

    def count() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(count)

    async def one(name: int) -> None:
        await turnstile.enter()
        entered.append((turns, name))

    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(one(name)) for name in range(4 * A_TURN)]
    loop.call_soon(count)
    await asyncio.sleep(0)
    tasks[A_TURN + 1].cancel()
    await asyncio.wait(tasks)
    names = [name for name in range(4 * A_TURN) if name != A_TURN + 1]
    assert [name for _, name in entered] == names
    together = [len(list(group)) for _, group in itertools.groupby(turn for turn, _ in entered)]
    assert max(together) == A_TURN
    assert len(together) == 4
    for _ in range(3):
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
        monkeypatch.setattr(port, "most_posts", 8)
        while api.link._mailbox.on_put is None:
            await asyncio.sleep(0)
        answers = await asyncio.gather(*(api.complete(f"p{i}", max_tokens=2) for i in range(6)))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["AB"] * 6
    assert log == [line for i in range(6) for line in (f"parse p{i}", "post 1")]


async def test_a_text_that_cannot_begin_leaves_no_sequence_behind(monkeypatch: Any) -> None:
    """Texts are made once the request is on its way."""

    def broken(*given: Any) -> Any:
        raise ValueError("no text")

    async with running_api(PieceTokenizer(), lambda submit: [65, 66]) as api:
        with monkeypatch.context() as patch:
            patch.setattr(generation, "Choice", broken)
            assert (await api.complete("a", max_tokens=2)).status_code == 500
        assert api.link.live == 0
        assert (await api.complete("a", max_tokens=2)).json()["choices"][0]["text"] == "AB"
