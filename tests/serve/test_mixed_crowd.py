"""Many unlike requests at once over a real tiny model, a pool so small that it preempts, and memory
that fails now and then: each answer is the one it has alone, nothing is left behind. B-09, B-22.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.schema import FaultRule
from engine_actor.load.tiny import write_tiny
from engine_actor.load.tokenizer import Tokenizer
from engine_actor.service import EngineService
from serve_app.client import LocalPort
from serve_app.engine_link import EngineLink
from serve_app.ingress import build_api
from serve_app.intake import Facts
from tests.engine.real_engine import Loaded, load
from tests.serve.wire import AsgiCall, chunks

pytestmark = pytest.mark.anyio

N_REQUESTS = 48
FAULTS = (
    FaultRule(stage="launch", min_rows=9, times="always"),
    FaultRule(stage="finish", min_rows=5, times=12),
    FaultRule(stage="prepare", min_rows=3, times=4),
)
Answer = tuple[list[Any], dict[str, int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Tokenizer]:
    folder: Path = write_tiny(tmp_path_factory.mktemp("tiny"))
    return load(folder, "exact"), Tokenizer.from_folder(folder)


class Served:
    """An API over one engine of the loaded model."""

    def __init__(self, model: tuple[Loaded, Tokenizer], **engine: Any) -> None:
        loaded, tokenizer = model
        self.engine = loaded.engine(**engine)
        self.service = EngineService(self.engine)
        self.link = EngineLink(self._port, beat_s=0.05)
        self.app = build_api(self.link, tokenizer, Facts(max_sequences=1000))
        transport = httpx.ASGITransport(app=self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)

    async def _port(self) -> LocalPort:
        return LocalPort(self.service)

    async def ask(self, body: dict[str, Any]) -> httpx.Response:
        return await self.client.post("/v1/completions", json=body)


@asynccontextmanager
async def served(model: tuple[Loaded, Tokenizer], **engine: Any) -> AsyncIterator[Served]:
    made = Served(model, **engine)
    made.link.start()
    try:
        assert await made.link.wait_ready(20)
        async with made.client, asyncio.timeout(120):
            yield made
    finally:
        await made.link.stop()
        made.service.close()


def make_body(draw: random.Random, seed: int) -> dict[str, Any]:
    """One request of many kinds at once; every one has a seed."""
    shared = draw.choice(["the and is here " * 8, "on tell at " * 10, "x"])
    body: dict[str, Any] = {
        "prompt": shared[: draw.randrange(1, 70)] + "he the in " * draw.randrange(6) + "q",
        "max_tokens": draw.choice([1, 3, 16, 56]),
        "temperature": draw.choice([0, 0, 0.7, 2]),
        "seed": seed,
        "ignore_eos": draw.random() < 0.5,
        "priority": draw.randint(-2, 2),
    }
    extras: list[tuple[float, dict[str, Any]]] = [
        (0.2, {"n": 2}),
        (0.2, {"best_of": 3}),
        (0.3, {"logprobs": draw.randint(0, 5)}),
        (0.3, {"echo": True}),
        (0.3, {"stop": draw.sample(["e", "he", "a", "t ", "1"], 2)}),
        (0.2, {"stop_token_ids": draw.sample(range(270), 20)}),
        (0.2, {"min_tokens": body["max_tokens"] // 2}),
        (0.2, {"include_stop_str_in_output": True}),
        (0.2, {"presence_penalty": 1.5, "repetition_penalty": 1.3}),
        (0.2, {"top_p": 0.5, "top_k": 9}),
        (0.1, {"prompt": [body["prompt"], "tell"]}),
        (0.1, {"cache_salt": "s"}),
    ]
    for chance, extra in extras:
        if draw.random() < chance:
            body |= extra
    if body.get("echo") and draw.random() < 0.3:
        body |= {"max_tokens": 0, "min_tokens": 0}
    return body


def whole(response: httpx.Response) -> Answer:
    assert response.status_code == 200, response.text
    answer = response.json()
    texts = [[c["text"], c["finish_reason"], c["logprobs"]] for c in answer["choices"]]
    return texts, counts(answer["usage"])


def streamed(response: httpx.Response) -> Answer:
    """The same from a stream; every choice ends once."""
    *events, last = chunks(response.text)
    texts: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            text = texts.setdefault(choice["index"], ["", None, None])
            assert text[1] is None
            text[0] += choice["text"]
            text[1] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                text[2] = text[2] or {}
                text[2].setdefault(name, []).extend(values)
    return [texts[index] for index in sorted(texts)], counts(last["usage"])


def counts(usage: dict[str, Any]) -> dict[str, int]:
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


async def test_each_answer_is_the_one_it_has_alone(model: tuple[Loaded, Tokenizer]) -> None:
    draw = random.Random(11)
    bodies = [make_body(draw, seed) for seed in range(N_REQUESTS)]
    ways = [draw.choice(["whole", "stream", "leave"]) for _ in bodies]
    async with served(model, max_num_seqs=1, prefill_chunk_tokens=512) as alone:
        right = [whole(await alone.ask(body)) for body in bodies]

    limits = {"max_num_seqs": 12, "prefill_chunk_tokens": 24, "max_partial_prefills": 3}
    async with served(model, kv_blocks=14, faults=FAULTS, **limits) as crowd:

        async def check(index: int) -> None:
            body, way = bodies[index], ways[index]
            if way == "leave":
                call = AsgiCall(crowd.app, "/v1/completions", {**body, "best_of": None})
                for _ in range(index % 7):
                    await asyncio.sleep(0)
                call.leave()
                await call.task
            elif way == "stream" and "best_of" not in body:
                options = {"stream": True, "stream_options": {"include_usage": True}}
                assert streamed(await crowd.ask({**body, **options})) == right[index]
            else:
                assert whole(await crowd.ask(body)) == right[index]

        await asyncio.gather(*map(check, range(N_REQUESTS)))
        await asyncio.wrap_future(crowd.service._loop.when_idle())
        engine = crowd.engine
        engine.scheduler.check()
        assert engine.faults.fired > 20
        assert engine.scheduler.stats.preemptions > 0
        assert engine.kv.n_free == engine.kv.capacity == 14
        assert (crowd.link.live, len(engine._live), engine.has_work) == (0, 0, False)
