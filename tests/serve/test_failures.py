"""What a client sees when things go wrong: decisions.md section 5, before and after the first byte.
B-09, B-22, F-38, F-73 to F-76, F-78.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine_actor.messages import Cancel, Flag, Submit
from serve_app.client import PortDied
from serve_app.guard import Guard
from serve_app.ingress_metrics import ingress_metrics
from tests.serve.conftest import ApiMaker
from tests.serve.doubles import PieceTokenizer
from tests.serve.held import held, running, stream_of
from tests.serve.wire import events

pytestmark = pytest.mark.anyio

ENDS = [
    (Flag.OOM, "out_of_memory", 503, "out_of_memory"),
    (Flag.OOM, None, 503, "out_of_memory"),
    (Flag.CANCELLED, "deadline_exceeded", 408, "deadline_exceeded"),
    (Flag.ERROR, "deadline_exceeded", 408, "deadline_exceeded"),
    (Flag.ERROR, "context_length_exceeded", 400, "context_length_exceeded"),
    (Flag.ERROR, "engine_restarted", 503, "unavailable"),
    (Flag.ERROR, "kernel at 0xdead: /secret", 500, "internal_error"),
    (Flag.ERROR, None, 500, "internal_error"),
    (Flag.CANCELLED, None, 499, "cancelled"),
]


@pytest.mark.parametrize(("flag", "code", "status", "public"), ENDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_byte_it_is_a_status(
    make_api: ApiMaker, flag: Flag, code: str | None, status: int, public: str, stream: bool
) -> None:
    api = await held(make_api)
    waiting = asyncio.create_task(api.complete(stream=stream))
    await running(api, 1)
    api.service.ends[-1] = (flag, code)
    api.service.tick()
    response = await waiting
    assert response.status_code == status
    assert response.json()["error"]["code"] == public
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert (response.headers.get("x-should-retry") == "false") == (status in (408, 499))
    assert "secret" not in response.text
    assert api.link.live == 0


@pytest.mark.parametrize(("flag", "code", "status", "public"), ENDS)
async def test_after_the_first_byte_it_is_an_error_event_and_done(
    make_api: ApiMaker, flag: Flag, code: str | None, status: int, public: str
) -> None:
    api = await held(make_api)
    call = stream_of(api, n=2)
    await running(api, 2)
    api.service.tick()
    assert (await call.take())["status"] == 200
    assert "x" in await call.take_event()
    api.service.ends[1] = (flag, code)
    api.service.tick()
    *_, error, done = events(await call.rest())
    expected = "engine_restarted" if code == "engine_restarted" else public
    assert error["error"]["code"] == expected
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert done == "[DONE]"
    assert "secret" not in str(error)
    await running(api, 0)
    assert api.link.live == 0


async def test_one_that_ran_out_of_memory_costs_no_neighbour(make_api: ApiMaker) -> None:
    """B-22, F-78: #3 of 5."""
    api = await held(make_api)
    calls = [asyncio.create_task(api.complete("a", max_tokens=3)) for _ in range(5)]
    await running(api, 5)
    third = sorted(rid for _, rid in api.service.running)[2]
    api.service.ends[third] = (Flag.OOM, "out_of_memory")
    while api.service.running:
        api.service.tick()
    answers = [await call for call in calls]
    assert sorted(answer.status_code for answer in answers) == [200] * 4 + [503]
    texts = [a.json()["choices"][0]["text"] for a in answers if a.status_code == 200]
    assert texts == ["xxx"] * 4


async def test_a_full_queue_is_a_429_from_either_side(make_api: ApiMaker) -> None:
    """F-74, F-75."""
    api = await held(make_api, facts={"max_sequences": 2}, queue_limit=1)
    first = asyncio.create_task(api.complete(max_tokens=1))
    await running(api, 1)
    for response in (await api.complete(), await api.complete(n=2)):
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
    api.service.tick()
    assert (await first).status_code == 200
    assert api.link.live == 0


async def test_engine_death_ends_every_waiter_and_new_ones_are_served(make_api: ApiMaker) -> None:
    """A stream hears engine_restarted and [DONE], a waiter gets 503; then all is well again."""
    api = await held(make_api)
    stream = stream_of(api)
    await running(api, 1)
    api.service.tick()
    await stream.take_event()
    whole = asyncio.create_task(api.complete())
    unseen = stream_of(api)
    await running(api, 3)
    api.service.running.clear()
    api.service.epoch = 2
    api.service.auto = True
    api.ports[-1].kill()
    *_, error, done = events(await stream.rest())
    assert (error["error"]["code"], done) == ("engine_restarted", "[DONE]")
    response = await whole
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"
    assert response.headers["retry-after"]
    assert (await unseen.take())["status"] == 503
    assert await api.link.wait_ready(10)
    assert (await api.complete(max_tokens=2)).json()["choices"][0]["text"] == "xx"


async def test_no_engine_is_a_503_at_once(make_api: ApiMaker) -> None:
    api = await held(make_api)

    async def none() -> Any:
        raise PortDied("no such actor")

    api.link._port_factory = none
    api.ports[-1].kill()
    while api.link.ready:
        await asyncio.sleep(0)
    for response in (
        await api.complete(),
        await api.chat(),
        await api.client.get("/v1/models"),
        await api.client.get("/v1/status"),
        await api.client.get("/health"),
        await api.client.post("/v1/requests/cmpl-o-1-1/cancel"),
    ):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "unavailable"
        assert response.headers["retry-after"]
    assert "http_requests_total" in (await api.client.get("/metrics")).text
    assert (await api.client.get("/health/live")).status_code == 200


async def test_a_deadline_holds_where_the_engine_cannot_say_so(
    make_api: ApiMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-76."""
    monkeypatch.setattr("serve_app.generation.DEADLINE_GRACE_S", 0.0)
    api = await held(make_api)
    response = await api.complete(timeout=0.01)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "deadline_exceeded"
    await running(api, 0)


async def test_b09_a_client_that_leaves_frees_all_its_children(make_api: ApiMaker) -> None:
    """B-09: after the first byte, n = 4."""
    api = await held(make_api)
    for stream in (True, False):
        call = stream_of(api, n=4, stream=stream)
        await running(api, 4)
        api.service.tick()
        if stream:
            await call.take_event()
        call.leave()
        await call.rest()
        await running(api, 0)
        assert api.link.live == 0
    cancels = [m for m in api.service.received if isinstance(m, Cancel)]
    assert [(c.rid, c.reason) for c in cancels] == [(rid, "client") for rid in range(1, 9)]
    text = (await api.client.get("/metrics")).text
    assert "ingress_disconnects_total 2" in text
    assert 'http_requests_total{route="/v1/completions",status="499"} 1' in text


async def test_a_cancelled_request_is_a_client_that_left() -> None:
    """Serve says it so. Of the answer nothing was sent: 499, as nginx has it."""
    metrics = ingress_metrics()
    entered = asyncio.Event()

    async def endless(*_: object) -> None:
        entered.set()
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "headers": []}
    request = asyncio.ensure_future(Guard(endless, metrics)(scope, endless, endless))
    await entered.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert metrics.value("ingress_disconnects_total") == 1
    assert metrics.value("http_requests_total", "other", "499") == 1
    assert metrics.value("http_requests_in_flight") == 0


async def test_b09_a_client_that_leaves_before_the_post_was_sent(make_api: ApiMaker) -> None:
    """B-09: the engine never hears of it."""
    api = await held(make_api)
    api.service.post_gate = asyncio.Event()
    blocked = stream_of(api)
    while not api.link.live:
        await asyncio.sleep(0)
    while len(api.link._mailbox):
        await asyncio.sleep(0)
    late = stream_of(api, n=4)
    while api.link.live < 5:
        await asyncio.sleep(0)
    late.leave()
    await late.rest()
    assert api.link.live == 1
    blocked.leave()
    await blocked.rest()
    api.service.post_gate.set()
    await running(api, 0)
    while not any(isinstance(m, Cancel) for m in api.service.received):
        await asyncio.sleep(0)
    submits = [m.rid for m in api.service.received if isinstance(m, Submit)]
    cancels = [m.rid for m in api.service.received if isinstance(m, Cancel)]
    assert (submits, cancels) == ([1], [1]), "submit and cancel of the posted one, in order"


async def test_a_cancelled_handler_is_a_client_that_left(make_api: ApiMaker) -> None:
    """How Serve's proxy says it: CancelledError in the handler."""
    api = await held(make_api)
    call = stream_of(api, n=2)
    await running(api, 2)
    api.service.tick()
    await call.take_event()
    call.task.cancel()
    await asyncio.wait({call.task})
    await running(api, 0)


async def test_a_fault_of_ours_is_a_500_that_tells_nothing(make_api: ApiMaker) -> None:
    api = await held(make_api)

    def broken(text: str, add_special_tokens: bool = True) -> list[int]:
        raise RuntimeError("secret path")

    api.app.state.intake.tokenizer = PieceTokenizer()
    api.app.state.intake.tokenizer.encode = broken
    response = await api.complete()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
