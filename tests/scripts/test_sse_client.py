"""The bench's own client: right times, tokens and errors, whatever way the bytes are cut."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sse_client import BodyDecoder, EventDecoder, StreamRecord, stream_completion
from tests.scripts.fake_sse_server import FakeServer, ScriptedClock, chunk, usage

PAYLOADS = ["{}", '{"a": "b c"}', "[DONE]", "é\u2028x"]


def _stream(server_events, times, **kwargs) -> StreamRecord:
    async def run() -> StreamRecord:
        clock = ScriptedClock(times)
        async with FakeServer(server_events, clock, **kwargs) as server:
            return await stream_completion(server.url, {"prompt": "x"}, clock)

    return asyncio.run(run())


@pytest.mark.parametrize("chunked", [True, False])
def test_each_event_is_stamped_when_it_is_read(chunked):
    events = [chunk("a"), chunk("b"), chunk("c", "length"), usage(7, 3)]
    record = _stream(events, [10.0, 10.5, 10.75, 11.75, 12.0, 12.1], chunked=chunked)
    assert record.sent == 10.0
    assert record.event_times == [10.5, 10.75, 11.75]
    assert (record.tokens, record.prompt_tokens) == (3, 7)
    assert (record.finish, record.error) == ("length", None)


def test_without_usage_every_event_counts_as_one_token():
    record = _stream([chunk("a"), chunk("b")], [0, 1, 2, 3])
    assert record.tokens == 2


def test_events_without_text_are_no_tokens():
    record = _stream([chunk("a"), chunk("", "stop")], [0, 1, 2, 3])
    assert (record.event_times, record.tokens, record.finish) == ([1], 1, "stop")


def test_an_error_event_is_told():
    record = _stream([chunk("a"), {"error": {"message": "out of memory"}}], [0, 1, 2, 3])
    assert record.error == "out of memory"


def test_a_stream_cut_short_is_an_error():
    record = _stream([chunk("a")], [0, 1], cut=True)
    assert record.error == "the stream ended without [DONE]"


def test_a_refusal_is_told_with_its_status():
    async def run() -> StreamRecord:
        async with FakeServer([], status=429) as server:
            return await stream_completion(server.url, {}, lambda: 0.0)

    assert asyncio.run(run()).error.startswith("HTTP 429")


def test_a_server_that_is_not_there_is_told():
    async def run() -> StreamRecord:
        async with FakeServer([]) as server:
            url = server.url
        return await stream_completion(url, {}, lambda: 0.0)

    assert "ConnectionRefusedError" in asyncio.run(run()).error


def _cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 400)))
def test_a_chunked_body_is_the_same_in_any_split(pieces, cuts):
    wire = b"".join(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in pieces) + b"0\r\n\r\n"
    decoder = BodyDecoder(chunked=True)
    assert b"".join(decoder.feed(part) for part in _cut(wire, cuts)) == b"".join(pieces)


@given(
    st.lists(st.sampled_from(PAYLOADS), max_size=6), st.lists(st.integers(0, 400)), st.booleans()
)
def test_events_are_the_same_in_any_split(payloads, cuts, carriage_return):
    wire = b": ping\n\n" + b"".join(f"data: {p}\n\n".encode() for p in payloads)
    wire = wire.replace(b"\n", b"\r\n") if carriage_return else wire
    decoder = EventDecoder()
    assert [p for part in _cut(wire, cuts) for p in decoder.feed(part)] == payloads


def test_the_request_reaches_the_server_as_it_was_given():
    async def run() -> list[dict]:
        async with FakeServer([chunk("a")]) as server:
            await stream_completion(server.url, {"prompt": "é", "n": 1}, lambda: 0.0)
            return server.bodies

    assert json.dumps(asyncio.run(run())) == json.dumps([{"prompt": "é", "n": 1}])
