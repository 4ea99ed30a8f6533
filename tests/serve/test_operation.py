"""Health, metrics, status, models and cancel by id. F-28, F-30 to F-33."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from serve_app.client import LocalPort, PortDied
from tests.serve.conftest import Api, ApiMaker
from tests.serve.doubles import PieceTokenizer, ScriptedService
from tests.serve.wire import AsgiCall, events

pytestmark = pytest.mark.anyio

TOKENIZER = PieceTokenizer()


async def test_health_follows_the_engine(make_api: ApiMaker) -> None:
    """F-30."""
    api = await make_api(TOKENIZER, lambda submit: [120])
    for path in ("/health", "/health/ready", "/health/live"):
        assert (await api.client.get(path)).status_code == 200
    api.link.draining = True
    for path in ("/health", "/health/ready"):
        response = await api.client.get(path)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "draining" in response.json()["error"]["message"]
    assert (await api.client.get("/health/live")).status_code == 200
    assert (await api.complete()).status_code == 503


async def test_a_stuck_or_draining_engine_is_not_ready(make_api: ApiMaker) -> None:
    """F-79: posts are answered, the engine's thread is not."""
    api = await make_api(TOKENIZER, lambda submit: [120])
    api.link._stale_s = 0.02
    stuck = asyncio.Event()

    async def never() -> dict[str, Any]:
        await stuck.wait()
        return {"draining": True}

    api.service.status = never
    response = await api.client.get("/health/ready")
    assert response.status_code == 503
    assert "does not answer" in response.json()["error"]["message"]
    stuck.set()
    api.link._stale_s = 20.0
    response = await api.client.get("/health/ready")
    assert response.status_code == 503
    assert "draining" in response.json()["error"]["message"]


async def test_a_head_is_the_get_without_its_body(make_api: ApiMaker) -> None:
    """Watchers of uptime ask with HEAD."""
    api = await make_api(TOKENIZER, lambda submit: [120])
    for path in ("/health", "/health/live", "/v1/models", "/metrics", "/nope", "/v1/completions"):
        head, get = await api.client.head(path), await api.client.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
        assert head.headers["x-request-id"]
    assert (await api.client.head("/health")).status_code == 200
    assert (await api.client.head("/v1/completions")).headers["allow"] == "POST"


async def test_metrics_hold_the_engine_s_and_the_ingress_s(make_api: ApiMaker) -> None:
    """F-31."""
    api = await make_api(TOKENIZER, lambda submit: [120])
    await api.complete()
    await api.complete(n=0)
    page = await api.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "prefill_steps_total 3" in page.text
    assert 'http_requests_total{route="/v1/completions",status="200"} 1' in page.text
    assert 'http_requests_total{route="/v1/completions",status="400"} 1' in page.text
    assert "ingress_live_sequences 0" in page.text


async def test_status_is_the_engine_s_with_the_ingress_s_beside(make_api: ApiMaker) -> None:
    """F-33."""
    api = await make_api(TOKENIZER, lambda submit: [120])
    body = (await api.client.get("/v1/status")).json()
    assert body["prefill_decode_overlap"] is True
    assert body["ingress"]["client"] == api.link.client
    assert body["ingress"]["live_sequences"] == 0
    assert body["ingress"]["carrier"] == "this process"


async def test_models(make_api: ApiMaker) -> None:
    """F-28."""
    api = await make_api(TOKENIZER, lambda submit: [120], facts={"created": 7, "meta": {"bits": 4}})
    card = (await api.client.get("/v1/models")).json()["data"][0]
    assert card["id"] == "m"
    assert card["created"] == 7
    assert card["max_model_len"] == 512
    assert card["meta"] == {"vocab_size": TOKENIZER.vocab_size, "kv_tokens": 1024, "bits": 4}


async def test_cancel_by_id_ends_every_child(make_api: ApiMaker) -> None:
    """F-32: after the first byte the stream ends with an error object and [DONE]."""
    api = await make_api(TOKENIZER, lambda submit: [120] * 300, auto=False)
    call = AsgiCall(api.app, "/v1/completions", {"prompt": "a", "n": 2, "stream": True})
    while len(api.service.running) < 2:
        await api.link.status()
    api.service.tick()
    first = events(await call.take_event())
    response = await api.client.post(f"/v1/requests/{first[0]['id']}/cancel")
    assert response.json()["status"] == "cancelling"
    *_, error, done = events(await call.rest())
    assert error["error"]["code"] == "cancelled"
    assert done == "[DONE]"
    assert not api.service.running
    again = await api.client.post(f"/v1/requests/{first[0]['id']}/cancel")
    assert again.status_code == 404


async def nowhere() -> LocalPort:
    raise PortDied("no actor")


async def open_stream(api: Api, service: ScriptedService | None = None) -> tuple[AsgiCall, str]:
    """A stream that goes on until somebody ends it, and its public id. service: where it runs."""
    service = service or api.service
    call = AsgiCall(api.app, "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 300})
    while not service.running:
        await asyncio.sleep(0)
    service.tick()
    return call, events(await call.take_event())[0]["id"]


async def test_cancel_through_another_ingress_or_engine(make_api: ApiMaker) -> None:
    """The id says whose the request is, not where it runs: all engines are asked, and only what was
    found is called cancelled."""
    one = await make_api(TOKENIZER, lambda submit: [120] * 300, auto=False)
    other = await make_api(TOKENIZER, lambda submit: [120], others=[one.port])
    assert await other.links.all[1].wait_ready(10)
    call, name = await open_stream(one)
    response = await other.client.post(f"/v1/requests/{name}/cancel")
    assert (response.status_code, response.json()["status"]) == (200, "cancelling")
    *_, error, done = events(await call.rest())
    assert (error["error"]["code"], done) == ("cancelled", "[DONE]")
    assert not one.service.running
    for gone in (name, "cmpl-nobody-a-2"):
        again = await other.client.post(f"/v1/requests/{gone}/cancel")
        assert again.status_code == 404
        assert again.json()["error"]["code"] == "request_not_found"


async def test_nothing_is_claimed_where_an_engine_does_not_answer(make_api: ApiMaker) -> None:
    """It may be there. Where it was found elsewhere nobody needs to know."""
    one = await make_api(TOKENIZER, lambda submit: [120] * 300, auto=False)
    other = await make_api(TOKENIZER, lambda submit: [120], others=[nowhere, one.port])
    assert await other.links.all[2].wait_ready(10)
    call, name = await open_stream(one)
    response = await other.client.post("/v1/requests/cmpl-nobody-a-2/cancel")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"
    assert (await other.client.post(f"/v1/requests/{name}/cancel")).status_code == 200
    assert events(await call.rest())[-1] == "[DONE]"


@pytest.mark.parametrize("name", ["x", "cmpl-a-1", "cmpl-a-1-0", "cmpl-a-1-fffffff", "%F0%9F"])
async def test_ids_that_nobody_gave_out(make_api: ApiMaker, name: str) -> None:
    api = await make_api(TOKENIZER, lambda submit: [120])
    response = await api.client.post(f"/v1/requests/{name}/cancel")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "request_not_found"


async def test_the_api_describes_itself(make_api: ApiMaker) -> None:
    """F-44: every reference in the page leads somewhere."""
    api = await make_api(TOKENIZER, lambda submit: [120])
    page = await api.client.get("/openapi.json")
    schemas = page.json()["components"]["schemas"]
    used = set(re.findall(r'"#/components/schemas/(\w+)"', page.text))
    assert used <= set(schemas)
    assert {"CompletionRequest", "ChatRequest", "StreamOptions", "Message"} <= used
    assert (await api.client.get("/docs")).status_code == 200
