"""How a backend is chosen: asked in order, the first that does not refuse, every reason kept.

Knows no op and no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kernels.spec.op import OpKey


class Backend(Protocol):
    """One way to compute an op."""

    @property
    def name(self) -> str:
        """Stable, dotted, as it appears in configuration and reports: "cpu.int4"."""
        ...

    def refuse(self, key: OpKey) -> str | None:
        """None where it can do `key`, else the reason in a few words."""
        ...


AnyBackend = TypeVar("AnyBackend", bound=Backend)


class NoBackend(LookupError):
    """Every backend refused; the message holds each reason."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one backend said of one key. `refusal` None means that it would do it."""

    backend: str
    refusal: str | None


def explain(backends: Sequence[Backend], key: OpKey) -> tuple[Verdict, ...]:
    """Every backend's answer, in the order in which choose() asks them."""
    return tuple(Verdict(backend.name, backend.refuse(key)) for backend in backends)


def refuse_all_but_half(key: OpKey, exact: str, does: str) -> str | None:
    """What every half-precision GPU backend refuses first. exact: why it cannot be exact; does: its
    verb in the reason ("holds", "computes in").
    """
    if key.device != "cuda":
        return "runs on a GPU only"
    if key.exact:
        return exact
    if key.dtype not in ("float16", "bfloat16"):
        return f"{does} half precision, not {key.dtype}"
    return None


def choose(backends: Sequence[AnyBackend], key: OpKey, forced: str | None = None) -> AnyBackend:
    """The first backend that does not refuse `key`, or the one named `forced`.

    Raises NoBackend where none is left; a forced backend that refuses is an error, never ignored.
    """
    asked = [backend for backend in backends if forced in (None, backend.name)]
    if not asked:
        names = ", ".join(backend.name for backend in backends)
        raise NoBackend(f"{key.op}: no backend is named {forced!r}; there are {names}")
    for backend in asked:
        if backend.refuse(key) is None:
            return backend
    reasons = "; ".join(f"{verdict.backend}: {verdict.refusal}" for verdict in explain(asked, key))
    raise NoBackend(f"{key}: {reasons}")
