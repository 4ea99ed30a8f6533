"""An API whose engine moves only when a test tells it to, and streams from it."""

from __future__ import annotations

import asyncio
from typing import Any

from engine_actor.messages import Submit
from tests.serve.conftest import Api, ApiMaker
from tests.serve.doubles import PieceTokenizer
from tests.serve.wire import AsgiCall

TOKENIZER = PieceTokenizer()
COMPLETIONS = "/v1/completions"


def endless(submit: Submit) -> list[int]:
    return [120] * submit.sampling.max_tokens


async def held(make_api: ApiMaker, **more: Any) -> Api:
    """An API whose engine only moves when told to."""
    api: Api = await make_api(TOKENIZER, endless, auto=False, **more)
    return api


async def running(api: Api, count: int) -> None:
    """Wait until the engine has `count` sequences."""
    async with asyncio.timeout(10):
        while len(api.service.running) != count:
            await asyncio.sleep(0)


def stream_of(api: Api, **body: Any) -> AsgiCall:
    sent = {"prompt": "a", "max_tokens": 300, "stream": True, **body}
    return AsgiCall(api.app, COMPLETIONS, sent)
