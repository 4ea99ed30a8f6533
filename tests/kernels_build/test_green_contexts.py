"""Splitting a card against a driver that is written down here: what it is asked, why it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from kernels.jit import driver, green_contexts
from kernels.jit.driver import LaunchError
from kernels.jit.green_contexts import GreenContextRefused, Partition, split_card

COUNT_AT = 96


@pytest.fixture(autouse=True)
def _no_split_is_remembered() -> Iterator[None]:
    split_card.cache_clear()
    yield
    split_card.cache_clear()


class CardOf132:
    """Splits in eights, as Hopper does. `broken`: a call and the status that it gives."""

    def __init__(self, broken: str = "", status: int = 801, groups: int = 1) -> None:
        self.log: list[str] = []
        self._broken = broken
        self._status = status
        self._groups = groups
        self._handles = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or (name == self._broken and self._status == 0):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.log.append(name)
            if name == self._broken:
                return self._status
            return getattr(self, f"do_{name}", self.new_handle)(*arguments)

        return call

    def new_handle(self, place: Any, *rest: Any) -> int:
        self._handles += 1
        place._obj.value = self._handles
        return 0

    def do_cuDeviceGet(self, place: Any, ordinal: int) -> int:
        place._obj.value = ordinal
        return 0

    def do_cuDeviceGetDevResource(self, device: Any, resource: Any, kind: int) -> int:
        assert kind == 1
        set_count(resource, 132)
        return 0

    def do_cuDevSmResourceSplitByCount(
        self, part: Any, groups: Any, whole: Any, rest: Any, flags: Any, least: Any
    ) -> int:
        rounded = -(-least.value // 8) * 8
        groups._obj.value = self._groups
        set_count(part, rounded)
        set_count(rest, 132 - rounded)
        return 0

    def do_cuGetErrorName(self, status: int, place: Any) -> int:
        place._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"
        return 0

    def do_cuGetErrorString(self, status: int, place: Any) -> int:
        place._obj.value = b"operation not supported"
        return 0


def set_count(resource: Any, count: int) -> None:
    ctypes.c_uint.from_buffer(resource, COUNT_AT).value = count


def use(monkeypatch: pytest.MonkeyPatch, card: CardOf132) -> CardOf132:
    monkeypatch.setattr(driver, "driver", lambda: card)
    monkeypatch.setattr(driver, "enter_context", lambda device: None)
    return card


def test_a_card_is_split_into_what_was_asked_for_and_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = use(monkeypatch, CardOf132())
    few, many = split_card(0, 30)
    assert (few.multiprocessors, many.multiprocessors) == (32, 100)
    assert few.stream != many.stream
    assert isinstance(few, Partition)
    assert card.log.count("cuGreenCtxCreate") == 2
    assert card.log.count("cuGreenCtxStreamCreate") == 2
    assert split_card(0, 30) == (few, many)
    assert card.log.count("cuGreenCtxCreate") == 2


@pytest.mark.parametrize("first", [0, -1, 132, 200])
def test_nothing_to_split_is_refused(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    use(monkeypatch, CardOf132())
    with pytest.raises(GreenContextRefused, match="of 132 multiprocessors"):
        split_card(0, first)


@pytest.mark.parametrize("groups", [0, 2])
def test_a_card_that_splits_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    use(monkeypatch, CardOf132(groups=groups))
    with pytest.raises(GreenContextRefused, match="cannot split off 32 of 132"):
        split_card(0, 32)


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, CardOf132(broken="cuGreenCtxStreamCreate", status=0))
    with pytest.raises(GreenContextRefused, match=r"older than CUDA 12\.4"):
        split_card(0, 32)


@pytest.mark.parametrize(
    "call",
    [
        "cuDeviceGetDevResource",
        "cuDevSmResourceSplitByCount",
        "cuDevResourceGenerateDesc",
        "cuGreenCtxCreate",
        "cuGreenCtxStreamCreate",
    ],
)
def test_the_drivers_own_reason_is_kept(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    use(monkeypatch, CardOf132(broken=call))
    with pytest.raises(GreenContextRefused, match="CUDA_ERROR_NOT_SUPPORTED"):
        split_card(0, 32)


def test_no_driver_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> ctypes.CDLL:
        raise LaunchError("no usable CUDA driver: not here")

    monkeypatch.setattr(driver, "driver", absent)
    with pytest.raises(GreenContextRefused, match="no usable CUDA driver"):
        green_contexts.split_card(0, 32)
