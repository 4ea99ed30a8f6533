"""Clients that read slowly or wait long: bounded buffers, bounded writes, keep-alives. F-35."""

from __future__ import annotations

import asyncio

import pytest

from engine_actor.messages import Flag
from tests.serve.conftest import ApiMaker
from tests.serve.held import held, running, stream_of
from tests.serve.wire import events

pytestmark = pytest.mark.anyio


async def test_a_slow_reader_gets_one_big_chunk(make_api: ApiMaker) -> None:
    api = await held(make_api)
    call = stream_of(api, max_tokens=50)
    await running(api, 1)
    api.service.tick()
    await call.take_event()
    call.stop_reading()
    for _ in range(49):
        api.service.tick()
    while api.link.live:
        await asyncio.sleep(0)
    call._reads.set()
    found = [e["choices"][0]["text"] for e in events(await call.rest())[:-1]]
    assert "".join(found) == "x" * 49
    assert len(found) <= 3


async def test_a_reader_that_stops_loses_its_request_by_count(make_api: ApiMaker) -> None:
    """More than `stream_buffer_tokens` behind: cancelled, and the engine goes on."""
    api = await held(make_api, http={"stream_buffer_tokens": 20})
    call = stream_of(api)
    await running(api, 1)
    api.service.tick()
    await call.take_event()
    call.stop_reading()
    for _ in range(30):
        api.service.tick()
        await asyncio.sleep(0)
    await running(api, 0)
    assert api.link.live == 0
    call._reads.set()
    *_, error, done = events(await call.rest())
    assert (error["error"]["code"], done) == ("slow_client", "[DONE]")


async def test_a_reader_that_stops_loses_its_request_by_time(make_api: ApiMaker) -> None:
    """A write that is not taken within `slow_client_s`."""
    api = await held(make_api, http={"slow_client_s": 0.02})
    call = stream_of(api)
    await running(api, 1)
    api.service.tick()
    await call.take_event()
    call.stop_reading()
    api.service.tick()
    await call.rest()
    await running(api, 0)
    assert "ingress_slow_clients_total 1" in (await api.client.get("/metrics")).text


async def test_a_waiting_stream_is_kept_alive_and_can_still_fail(make_api: ApiMaker) -> None:
    """F-35: the comment sends the 200; from then on an error is an event."""
    api = await held(make_api, http={"keep_alive_s": 0.01})
    call = stream_of(api, max_tokens=2)
    assert (await call.take())["status"] == 200
    assert await call.take_event() == ": keep-alive\n\n"
    api.service.tick()
    api.service.tick()
    texts = [e["choices"][0]["text"] for e in events(await call.rest())[:-1]]
    assert "".join(texts) == "xx"
    late = stream_of(api)
    assert await late.take_event() == ": keep-alive\n\n"
    api.service.ends[-1] = (Flag.OOM, "out_of_memory")
    api.service.tick()
    error, done = events(await late.rest())
    assert (error["error"]["code"], done) == ("out_of_memory", "[DONE]")
