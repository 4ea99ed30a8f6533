"""Backends are asked in order, and every refusal keeps its reason (S-16)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.linear.op import CPU_HALF, DENSE, EXACT, LINEAR, PACKED_BACKENDS
from kernels.spec.device import device_info
from kernels.spec.op import OpKey
from kernels.spec.registry import NoBackend, Verdict, choose, explain


@dataclass(frozen=True)
class Fixed:
    """Refuses with a fixed reason, or never."""

    name: str
    reason: str | None

    def refuse(self, key: OpKey) -> str | None:
        return self.reason


KEY = OpKey("linear", "cpu", "float32", n=32, k=64, bits=4, group=32)
FIRST, SECOND, THIRD = Fixed("a", "too old"), Fixed("b", None), Fixed("c", None)


def test_the_first_that_does_not_refuse() -> None:
    """Order is preference."""
    assert choose((FIRST, SECOND, THIRD), KEY) is SECOND
    assert explain((FIRST, SECOND), KEY) == (Verdict("a", "too old"), Verdict("b", None))


def test_forced_is_taken_or_an_error() -> None:
    """A forced backend that refuses is never replaced silently."""
    assert choose((FIRST, SECOND, THIRD), KEY, forced="c") is THIRD
    with pytest.raises(NoBackend, match="a: too old"):
        choose((FIRST, SECOND), KEY, forced="a")
    with pytest.raises(NoBackend, match="no backend is named 'x'; there are a, b"):
        choose((FIRST, SECOND), KEY, forced="x")


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, "cpu.int4"),
        ({"bits": 3}, "cpu.int4"),
        ({"bits": 8}, "reference.dequantise"),
        ({"n": 33}, "reference.dequantise"),
        ({"k": 65}, "reference.dequantise"),
        ({"device": "cuda"}, "reference.dequantise"),
        ({"group": 48}, "reference.dequantise"),
    ],
)
def test_dispatch_of_packed_weights(change: dict[str, object], chosen: str) -> None:
    """What fits torch's int4 kernel goes there, the rest to the reference."""
    from dataclasses import replace

    assert choose(PACKED_BACKENDS, replace(KEY, **change)).name == chosen


def test_exact_refuses_batch_dependent_backends() -> None:
    """Only the tiles promise equal bits."""
    key = OpKey("linear", "cpu", "float32", n=32, k=64, exact=True)
    assert EXACT.refuse(key) is None
    assert DENSE.refuse(key) == CPU_HALF.refuse(key) == "batch-dependent sums"


def test_device_info_of_a_cpu() -> None:
    """Vector level by torch's name; no such thing as an sm."""
    info = device_info(torch.device("cpu"))
    assert (info.kind, info.sm) == ("cpu", 0)
    assert info.capability == torch.backends.cpu.get_cpu_capability()
    with pytest.raises(ValueError, match="no kernels for device 'meta'"):
        device_info(torch.device("meta"))


def test_the_spec_names_its_tolerances() -> None:
    """Unknown dtypes have no tolerance to hide behind."""
    assert LINEAR.allowed("float32") < LINEAR.allowed("float16") < LINEAR.allowed("bfloat16")
    with pytest.raises(KeyError):
        LINEAR.allowed("int8")
