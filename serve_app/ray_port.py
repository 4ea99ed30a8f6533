"""A port to an engine that is a Ray actor: its methods as awaitables, its death as PortDied.

Knows no requests and no text; `engine_link` drives it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
    TaskCancelledError,
)

from engine_actor.frames import SocketAddress
from serve_app.client import PortDied, PortInterrupted, Reply

T = TypeVar("T")


class RayPort:
    """One engine actor. A port never outlives its actor: after PortDied resolve a new one."""

    carrier = "ray"
    most_posts = 1

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def attach(self, client: str, protocol: int, first_seq: int = 0) -> dict[str, Any]:
        """See EngineService.attach."""
        return await self._alive(self._actor.attach.remote(client, protocol, first_seq))

    async def post(self, client: str, seq: int, messages: list[tuple[Any, ...]]) -> Reply:
        """See EngineService.post."""
        return await self._alive(self._actor.post.remote(client, seq, messages))

    async def events(
        self, client: str, epoch: int, from_seq: int, max_items: int = 5000
    ) -> AsyncIterator[tuple[Any, ...]]:
        """See EngineService.events."""
        stream = self._actor.events.remote(client, epoch, from_seq, max_items)
        while True:
            try:
                reference = await self._alive(anext(stream))
            except StopAsyncIteration:
                return
            yield await self._alive(reference)

    async def status(self) -> dict[str, Any]:
        """See EngineService.status."""
        return await self._alive(self._actor.status.remote())

    async def metrics_text(self) -> str:
        """See EngineService.metrics_text."""
        return await self._alive(self._actor.metrics_text.remote())

    async def act(self, messages: list[tuple[object, ...]]) -> int:
        """See EngineService.act."""
        return await self._alive(self._actor.act.remote(messages))

    async def reset_prefix_cache(self) -> None:
        """See EngineService.reset_prefix_cache."""
        await self._alive(self._actor.reset_prefix_cache.remote())

    async def drain(self, seconds: float) -> None:
        """See EngineService.drain."""
        await self._alive(self._actor.drain.remote(seconds))

    def close(self) -> None:
        """Nothing is held."""

    async def socket_address(self) -> SocketAddress | None:
        """The engine's loopback socket, where it listens on this very node."""
        found = await self._alive(self._actor.socket_address.remote())
        if found is None or found["node_id"] != ray.get_runtime_context().get_node_id():
            return None
        return SocketAddress(found["port"], found["key"])

    @staticmethod
    async def _alive(call: Awaitable[T]) -> T:
        """The call's result. Raises PortDied or PortInterrupted where Ray says so, and what the
        engine itself raised as it is.
        """
        try:
            return await call
        except (ActorUnavailableError, GetTimeoutError) as error:
            # The connection broke; Ray does not know whether the actor lives or the call arrived.
            raise PortInterrupted(_first_line(error)) from None
        except (RayActorError, TaskCancelledError) as error:
            raise PortDied(_first_line(error)) from None
        except RayTaskError as error:
            raise error.as_instanceof_cause() from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
