"""The engine as a Ray actor: a shell without logic over engine_actor.service.EngineService.

Serve pickles this module by value, so it stays thin and imports inside its methods. Each
concurrency group has its own event loop in its own thread; the service hands over between them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import ray

SWITCH_S = 0.0001


@ray.remote(  # type: ignore[call-overload]
    max_restarts=0,
    max_task_retries=0,
    concurrency_groups={"ctl": 64, "events": 64, "admin": 8},
)
class EngineActor:
    """One engine. Serve starts a new one when it dies; nobody keeps a handle across a death.

    name: "engine-0", ...; app_args: AppArgs as a dict, `engine.device` already decided. Loads the
    weights and warms up before the constructor returns: alive means ready.
    """

    def __init__(self, name: str, app_args: dict[str, Any]) -> None:
        import asyncio
        import logging
        import sys
        import time

        from engine_actor.build import build_service
        from engine_actor.local_socket import LocalSocket
        from engine_actor.ray_metrics import RayMirror
        from engine_actor.watchdog import Watchdog, leave_process

        logging.basicConfig(format="%(levelname)s %(name)s -- %(message)s")
        log = logging.getLogger("engine_actor")
        log.setLevel(logging.INFO)
        # Who reads posts and sends tokens shares the interpreter with the engine's thread, which is
        # hardly ever idle: with the 5 ms that are usual either would wait for the other.
        sys.setswitchinterval(SWITCH_S)
        begun = time.monotonic()
        self._name = name
        self._model = app_args["model"]["path"]
        self._service = build_service(app_args, name=name)
        log.info("%s loaded in %.1f s", name, time.monotonic() - begun)
        limit_s = app_args["engine"]["watchdog_s"]
        self._watchdog = Watchdog(self._service.heartbeat, limit_s, leave=leave_process)
        self._mirror = RayMirror(name, lambda: asyncio.run(self._service.metrics_snapshot()))
        self._socket = LocalSocket(self._service).start()
        self._watchdog.start()
        self._mirror.start()

    def __repr__(self) -> str:
        # Ray asks for it also after a failed constructor; an error here would bury the real one.
        return f"{getattr(self, '_name', 'engine')}({getattr(self, '_model', 'not loaded')})"

    @ray.method(concurrency_group="ctl")
    async def attach(self, client: str, protocol: int, first_seq: int = 0) -> dict[str, Any]:
        """See EngineService.attach."""
        return await self._service.attach(client, protocol, first_seq)

    @ray.method(concurrency_group="ctl")
    async def socket_address(self) -> dict[str, Any] | None:
        """Where EngineService.post and .events can be called without Ray, and on which node."""
        if self._socket is None:
            return None
        address = {"port": self._socket.port, "key": self._socket.key}
        return {"node_id": ray.get_runtime_context().get_node_id(), **address}

    @ray.method(concurrency_group="ctl")
    async def post(self, client: str, seq: int, messages: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        """See EngineService.post."""
        return await self._service.post(client, seq, messages)

    @ray.method(concurrency_group="events")
    async def events(
        self, client: str, epoch: int, from_seq: int, max_items: int = 5000
    ) -> AsyncIterator[tuple[Any, ...]]:
        """See EngineService.events."""
        async for item in self._service.events(client, epoch, from_seq, max_items):
            yield item

    @ray.method(concurrency_group="admin")
    async def status(self) -> dict[str, Any]:
        """See EngineService.status."""
        return await self._service.status()

    @ray.method(concurrency_group="admin")
    async def metrics_text(self) -> str:
        """See EngineService.metrics_text."""
        return await self._service.metrics_text()

    @ray.method(concurrency_group="admin")
    async def metrics_snapshot(self) -> dict[str, float]:
        """See EngineService.metrics_snapshot."""
        return await self._service.metrics_snapshot()

    @ray.method(concurrency_group="admin")
    async def act(self, messages: list[tuple[Any, ...]]) -> int:
        """See EngineService.act."""
        return await self._service.act(messages)

    @ray.method(concurrency_group="admin")
    async def reset_prefix_cache(self) -> None:
        """See EngineService.reset_prefix_cache."""
        await self._service.reset_prefix_cache()

    @ray.method(concurrency_group="admin")
    async def drain(self, seconds: float) -> None:
        """See EngineService.drain."""
        await self._service.drain(seconds)
