"""The HTTP face over the real engine with a scripted model, in one process. B-05, B-08, B-22."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from configs.schema import FaultRule
from engine_actor.service import EngineService
from serve_app.client import EnginePort, LocalPort, PortDied
from serve_app.engine_link import EngineLink
from serve_app.ingress import build_api
from serve_app.intake import Facts
from tests.doubles.scripted_runner import ScriptedRunner, make_service
from tests.serve.doubles import PieceTokenizer
from tests.serve.wire import AsgiCall, events, joined

pytestmark = pytest.mark.anyio

TOKENIZER = PieceTokenizer(" Paris", ".")
PROMPT = "The capital of France is"


class Whole:
    """An API over an engine; `restart()` gives the link a new engine, as Serve would."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.services: list[EngineService] = []
        self.runner = self.restart()
        self.link = EngineLink(self._port, beat_s=0.02, first_pause_s=0.001)
        self.app = build_api(self.link, TOKENIZER, Facts(attach_wait_s=10))
        transport = httpx.ASGITransport(app=self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)

    def restart(self) -> ScriptedRunner:
        scripts = {tuple(TOKENIZER.encode(PROMPT)): TOKENIZER.ids(" Paris", ".")}
        self.runner = ScriptedRunner(TOKENIZER.vocab_size, scripts, eos=TOKENIZER.eos)
        self.services.append(make_service(self.runner, epoch=len(self.services), **self.settings))
        return self.runner

    async def _port(self) -> EnginePort:
        if self.services[-1].heartbeat().fatal is not None:
            raise PortDied("the engine has died")
        return LocalPort(self.services[-1])

    async def complete(self, prompt: Any, **body: Any) -> httpx.Response:
        sent = {"prompt": prompt, "temperature": 0, **body}
        return await self.client.post("/v1/completions", json=sent)

    def text(self, prompt: str, n: int) -> str:
        """What must follow; like `choices` without broken bytes at the end, which are flushed as
        one replacement character however many they are.
        """
        expected = self.runner.expected(TOKENIZER.encode(prompt), n)
        return TOKENIZER.decode(expected).rstrip("\ufffd")


@asynccontextmanager
async def whole(**settings: Any) -> AsyncIterator[Whole]:
    made = Whole(**settings)
    made.link.start()
    try:
        assert await made.link.wait_ready(20)
        async with made.client, asyncio.timeout(60):
            yield made
    finally:
        await made.link.stop()
        for service in made.services:
            service.close()


def choices(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["text"].rstrip("\ufffd") for choice in response.json()["choices"]]


async def test_a_stream_is_the_whole_text() -> None:
    async with whole() as w:
        body = {"max_tokens": 40, "n": 3, "seed": 5, "temperature": 1.5, "logprobs": 2}
        texts = choices(await w.complete("abc", **body))
        stream = (await w.complete("abc", stream=True, **body)).text
        assert [joined(stream, i).rstrip("\ufffd") for i in range(3)] == texts
        assert len(set(texts)) == 3, "each choice draws from its own seed"
        assert choices(await w.complete("abc", **body)) == texts


async def test_b05_a_fully_cached_prompt() -> None:
    """B-05: cached_tokens stays below the prompt's length, the text is the same."""
    async with whole() as w:
        prompt = "abcd" * 4
        answers = [(await w.complete(prompt, max_tokens=8)).json() for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        details = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
        assert details[0] == 0
        assert 0 < details[1] < 16


async def test_b08_too_large_for_the_pool() -> None:
    """B-08 with the engine's own pool of 64 tokens."""
    async with whole(kv_blocks=16) as w:
        response = await w.complete([97] * 50, max_tokens=100)
        assert response.status_code == 400
        assert "needs 150 tokens" in response.json()["error"]["message"]
        assert "holds 64" in response.json()["error"]["message"]
        assert choices(await w.complete(PROMPT, max_tokens=5)) == [" Paris."]


async def test_echo_with_logprobs_through_chunks() -> None:
    """F-07: prompt logprobs arrive in pieces and join."""
    async with whole(prefill_chunk_tokens=4) as w:
        body = {"echo": True, "logprobs": 1, "max_tokens": 1}
        for _ in range(2):
            logprobs = (await w.complete(PROMPT, **body)).json()["choices"][0]["logprobs"]
            assert "".join(logprobs["tokens"]) == PROMPT + " Paris"
            assert logprobs["token_logprobs"][0] is None
            assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
        only = (await w.complete(PROMPT, echo=True, logprobs=0, max_tokens=0)).json()
        assert only["choices"][0]["text"] == PROMPT
        assert len(only["choices"][0]["logprobs"]["tokens"]) == len(PROMPT)
        assert only["usage"]["completion_tokens"] == 0


async def test_b22_out_of_memory_ends_one_request() -> None:
    """B-22, F-78: an always failing prefill of one of five; the others' texts are right."""
    rule = FaultRule(stage="launch", request="victim", times="always")
    async with whole(faults=(rule,)) as w:

        async def ask(name: str) -> httpx.Response:
            sent = {"prompt": name, "temperature": 0, "max_tokens": 12, "request_id": name}
            headers = {"x-request-id": name}
            return await w.client.post("/v1/completions", json=sent, headers=headers)

        names = ["one", "two", "victim", "four", "five"]
        answers = dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))
        failed = answers.pop("victim")
        assert failed.status_code == 503
        assert failed.json()["error"]["code"] == "out_of_memory"
        assert failed.headers["retry-after"]
        for name, answer in answers.items():
            assert choices(answer) == [w.text(name, 12)]


async def test_a_lost_device_answers_everybody_and_a_new_engine_serves() -> None:
    """Engine death mid-stream: the stream and the waiter hear it, later requests succeed."""
    async with whole(kv_blocks=2000) as w:
        call = AsgiCall(
            w.app, "/v1/completions", {"prompt": "zz", "max_tokens": 3000, "stream": True}
        )
        await call.take_event()
        waiting = asyncio.create_task(w.complete("yy", max_tokens=3000))
        while w.link.live < 2:
            await asyncio.sleep(0)

        def lose(inputs: Any) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        w.runner.before_layers = lose
        *_, error, done = events(await call.rest())
        assert (error["error"]["code"], done) == ("engine_restarted", "[DONE]")
        assert "illegal" not in str(error)
        response = await waiting
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "unavailable"
        w.restart()
        assert choices(await w.complete(PROMPT, max_tokens=5)) == [" Paris."]
        assert w.link.restarts == 1


async def test_b09_clients_that_leave_at_random_points_cost_nobody_anything() -> None:
    """B-09: while queued, in prefill, in decode, before the submit was posted, with n up to 4. The
    blocks all come back and the neighbours' texts are right.
    """
    draw = random.Random(9)
    async with whole(kv_blocks=400, max_num_seqs=8, prefill_chunk_tokens=8) as w:
        kv = w.services[0]._engine.kv
        names = [f"neighbour {index}" for index in range(6)]
        neighbours = [asyncio.create_task(w.complete(name, max_tokens=60)) for name in names]
        for index in range(60):
            body = {
                "prompt": f"leaver {index} " + "x" * draw.randrange(60),
                "n": draw.randint(1, 4),
                "max_tokens": 100,
                "stream": True,
            }
            call = AsgiCall(w.app, "/v1/completions", body)
            for _ in range(draw.randrange(12)):
                await asyncio.sleep(0)
            for _ in range(draw.choice((0, 0, 0, 1, 3))):
                await call.take_event()
            call.leave()
            await call.rest()
        for name, answer in zip(names, await asyncio.gather(*neighbours), strict=True):
            assert choices(answer) == [w.text(name, 60)]
        assert w.link.live == 0
        await w.link.status()
        await asyncio.wrap_future(w.services[0]._loop.when_idle())
        assert kv.n_free == kv.capacity


async def test_a_deadline_is_a_408() -> None:
    """F-76, by the engine's own clock."""
    async with whole(kv_blocks=2000) as w:
        response = await w.complete("zz", max_tokens=4000, timeout=0.05)
        assert response.status_code == 408
        assert response.headers["x-should-retry"] == "false"
        assert w.link.live == 0


async def test_a_full_queue_is_a_429() -> None:
    """F-74: the engine's own limit."""
    async with whole(max_num_seqs=1, max_queue=2, kv_blocks=500) as w:
        answers = await asyncio.gather(*(w.complete(f"{i}", max_tokens=60) for i in range(8)))
        codes = sorted(answer.status_code for answer in answers)
        assert set(codes) == {200, 429}
        assert codes.count(200) >= 2
