"""Page-locked memory against a driver that is written down here: which thread gives it back."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.jit import driver
from kernels.jit.driver import LaunchError
from kernels.jit.host_memory import PinnedBytes

DEVICE, SIZE = 1, 64


class Driver:
    """Contexts are a thread's own, as CUDA's are; without one nothing is taken or given back."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(SIZE)
        self.freed: list[int] = []
        self.device = -1
        self._of_thread = threading.local()
        # Plain functions: the caller sets argument types on them, which a method does not take.
        calls = {name[1:]: getattr(self, name) for name in dir(self) if name.startswith("_cu")}
        self.library = SimpleNamespace(
            **{name: lambda *given, call=call: call(*given) for name, call in calls.items()}
        )

    def _status(self) -> int:
        return 0 if getattr(self._of_thread, "context", 0) else 201

    def _cuCtxGetCurrent(self, place: Any) -> int:
        place._obj.value = getattr(self._of_thread, "context", 0)
        return 0

    def _cuDeviceGet(self, place: Any, device: int) -> int:
        place._obj.value = self.device = device
        return 0

    def _cuDevicePrimaryCtxRetain(self, place: Any, handle: Any) -> int:
        place._obj.value = 5
        return 0

    def _cuCtxSetCurrent(self, context: Any) -> int:
        self._of_thread.context = context.value
        return 0

    def _cuMemHostAlloc(self, place: Any, size: int, flags: int) -> int:
        place._obj.value = ctypes.addressof(self.memory)
        return self._status()

    def _cuCtxSynchronize(self) -> int:
        return self._status()

    def _cuMemFreeHost(self, address: int) -> int:
        if self._status() == 0:
            self.freed.append(address)
        return self._status()

    def _cuGetErrorName(self, status: int, place: Any) -> int:
        return 1

    _cuGetErrorString = _cuGetErrorName


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(driver, "driver", lambda: found.library)
    return found


def test_any_thread_gives_it_back(written: Driver) -> None:
    memory = PinnedBytes(SIZE, DEVICE)
    memory.tensor.fill_(7)
    assert written.memory.raw == b"\7" * SIZE
    written.device = -1
    other = threading.Thread(target=memory.close)
    other.start()
    other.join()
    assert written.freed == [ctypes.addressof(written.memory)]
    assert written.device == DEVICE
    memory.close()
    assert len(written.freed) == 1


def test_what_the_driver_does_not_take_back_is_told_once(
    written: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = PinnedBytes(SIZE, DEVICE)
    monkeypatch.setattr(written.library, "cuMemFreeHost", lambda address: 719)
    with pytest.raises(LaunchError, match="unlocking the host's memory: CUDA error 719"):
        memory.close()
    memory.close()
