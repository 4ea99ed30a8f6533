"""An API over the scripted double: link, client and service, started and stopped around a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from configs.schema import HttpConfig
from serve_app.client import LocalPort
from serve_app.engine_link import EngineLink
from serve_app.engine_links import EngineLinks
from serve_app.ingress import build_api
from serve_app.intake import Facts
from tests.serve.doubles import PieceTokenizer, Script, ScriptedService


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Api:
    """Everything one test needs: post(), events() and the parts behind them."""

    def __init__(
        self,
        service: ScriptedService,
        http: HttpConfig,
        facts: Facts,
        others: Sequence[Callable[[], Any]] = (),
    ) -> None:
        self.service = service
        self.ports: list[LocalPort] = []
        self.link = EngineLink(self.port, beat_s=0.02, first_pause_s=0.001)
        self.links = EngineLinks(
            self.link, [EngineLink(port, beat_s=0.02, first_pause_s=0.001) for port in others]
        )
        self.app = build_api(self.links, service.tokenizer, facts, http)
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=True)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    async def port(self) -> LocalPort:
        """A new port to the service."""
        self.ports.append(LocalPort(self.service))
        return self.ports[-1]

    async def complete(self, prompt: Any = "a", **body: Any) -> httpx.Response:
        """POST /v1/completions."""
        return await self.client.post("/v1/completions", json={"prompt": prompt, **body})

    async def chat(self, content: Any = "hi", **body: Any) -> httpx.Response:
        """POST /v1/chat/completions with one user message."""
        messages = [{"role": "user", "content": content}]
        return await self.client.post("/v1/chat/completions", json={"messages": messages, **body})


@asynccontextmanager
async def running_api(
    tokenizer: PieceTokenizer,
    script: Script,
    http: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    others: Sequence[Callable[[], Any]] = (),
    **service: Any,
) -> AsyncIterator[Api]:
    """An API whose link is attached."""
    double = ScriptedService(tokenizer, script, auto=service.pop("auto", True))
    for name, value in service.items():
        setattr(double, name, value)
    told = Facts(**{"attach_wait_s": 0, **(facts or {})})
    api = Api(double, HttpConfig(**(http or {})), told, others)
    api.links.start()
    try:
        assert await api.link.wait_ready(10)
        async with api.client:
            yield api
    finally:
        await api.links.stop()


ApiMaker = Callable[..., Any]


@pytest.fixture
async def make_api(anyio_backend: str) -> AsyncIterator[ApiMaker]:
    """make_api(tokenizer, script, ...) -> an Api that ends with the test."""
    async with AsyncExitStack() as stack:

        async def make(*args: Any, **more: Any) -> Api:
            return await stack.enter_async_context(running_api(*args, **more))

        yield make
