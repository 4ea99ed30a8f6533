"""Finding an engine again after its death, and what Ray's errors become. Needs Ray's package, not
a cluster."""

from __future__ import annotations

import asyncio

import pytest

from engine_actor.frames import SocketAddress
from serve_app.client import PortDied, PortInterrupted
from serve_app.directory import EngineDirectory, engine_names
from serve_app.ray_port import RayPort
from serve_app.socket_port import SocketPort

pytestmark = pytest.mark.ray


def test_names_are_readable_and_replicas_are_dealt_out():
    directory = EngineDirectory(engine_names(3), look_up=None)
    assert directory.names == ("engine-0", "engine-1", "engine-2")
    assert [directory.name_for(rank) for rank in range(4)] == [
        "engine-0",
        "engine-1",
        "engine-2",
        "engine-0",
    ]


def test_a_missing_engine_is_looked_up_again_until_it_is_there():
    asked = []

    def look_up(name: str) -> object:
        asked.append(name)
        if len(asked) < 4:
            raise ValueError("no such actor")
        return object()

    directory = EngineDirectory(("engine-0",), look_up, first_pause_s=0.001)
    assert isinstance(asyncio.run(directory.port("engine-0")), SocketPort)
    assert asked == ["engine-0"] * 4


def test_an_engine_that_never_comes_is_a_dead_port():
    def look_up(name: str) -> object:
        raise ValueError("no such actor")

    directory = EngineDirectory(("engine-0",), look_up, first_pause_s=0.001, give_up_s=0.05)
    with pytest.raises(PortDied, match="engine-0"):
        asyncio.run(directory.port("engine-0"))


class Method:
    """An actor's method whose call ends as the test says."""

    def __init__(self, end: BaseException | object) -> None:
        self._end = end

    def remote(self, *arguments: object):
        async def call() -> object:
            if isinstance(self._end, BaseException):
                raise self._end
            return self._end

        return call()


class Actor:
    def __init__(self, end: BaseException | object) -> None:
        self.status = self.socket_address = Method(end)


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"node_id": "here", "port": 7, "key": "ab"}, SocketAddress(7, "ab")),
        ({"node_id": "elsewhere", "port": 7, "key": "ab"}, None),
        (None, None),
    ],
)
def test_a_loopback_socket_is_for_its_own_node(monkeypatch, told, found):
    context = type("Context", (), {"get_node_id": staticmethod(lambda: "here")})
    monkeypatch.setattr("serve_app.ray_port.ray.get_runtime_context", lambda: context)
    assert asyncio.run(RayPort(Actor(told)).socket_address()) == found


def _died() -> BaseException:
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


def _unavailable() -> BaseException:
    from ray.exceptions import ActorUnavailableError

    return ActorUnavailableError("the connection broke", None)


def test_death_and_interruption_are_told_apart():
    with pytest.raises(PortDied, match=r"^[^\n]*$"):
        asyncio.run(RayPort(Actor(_died())).status())
    with pytest.raises(PortInterrupted):
        asyncio.run(RayPort(Actor(_unavailable())).status())
    assert asyncio.run(RayPort(Actor({"engine": "engine-0"})).status()) == {"engine": "engine-0"}


def test_what_the_engine_itself_raised_arrives_as_it_is():
    from ray.exceptions import RayTaskError

    from engine_actor.errors import EngineRestarted

    wrapped = RayTaskError("status", "traceback", EngineRestarted("epoch 1 is over"))
    with pytest.raises(EngineRestarted):
        asyncio.run(RayPort(Actor(wrapped)).status())
