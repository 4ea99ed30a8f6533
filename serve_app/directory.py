"""Where the engines are: names of this deployment's engine actors, resolved again after a death.

A handle to a dead actor stays dead, so nobody keeps one: each attachment asks here. The seam
behind which a plain named actor could stand as well as a Serve deployment actor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ray import serve

from serve_app.client import EnginePort, PortDied
from serve_app.ray_port import RayPort
from serve_app.socket_port import SocketPort

log = logging.getLogger(__name__)


def engine_names(count: int) -> tuple[str, ...]:
    """`engine-0`, `engine-1`, ...: the readable end of each actor's name in Ray."""
    return tuple(f"engine-{index}" for index in range(count))


class EngineDirectory:
    """Finds engine actors from inside a replica. `look_up` raises ValueError where none is."""

    def __init__(
        self,
        names: tuple[str, ...],
        look_up: Callable[[str], Any] = serve.get_deployment_actor,
        first_pause_s: float = 0.05,
        longest_pause_s: float = 0.5,
        give_up_s: float = 30.0,
    ) -> None:
        self.names = names
        self._look_up = look_up
        self._pauses = (first_pause_s, longest_pause_s)
        self._give_up_s = give_up_s

    def name_for(self, rank: int) -> str:
        """The engine of the ingress replica of this rank: replicas are dealt out in turn."""
        return self.names[rank % len(self.names)]

    async def port(self, name: str) -> EnginePort:
        """A port to the living engine of this name; waits with growing pauses while Serve starts
        it anew. Raises PortDied after `give_up_s` seconds (whoever asked may ask again).
        """
        pause, longest = self._pauses
        try:
            async with asyncio.timeout(self._give_up_s):
                while True:
                    try:
                        port = RayPort(await asyncio.to_thread(self._look_up, name))
                        return SocketPort(port, port.socket_address)
                    except ValueError:
                        await asyncio.sleep(pause)
                        pause = min(pause * 2, longest)
        except TimeoutError:
            raise PortDied(f"no actor {name} within {self._give_up_s:g} s") from None
