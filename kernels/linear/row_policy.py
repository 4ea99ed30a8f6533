"""Which backend for how many rows: the tuned tables, or the seed's fixed rule.

A policy only orders names; a backend that refuses is passed over, and why is kept. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kernels.spec.op import OpKey
from kernels.spec.registry import AnyBackend, NoBackend, Verdict, explain
from kernels.spec.tuned import TunedTable

Policy = Literal["tuned", "seed"]
ROWS_ONE_BY_ONE = 256
"""Up to here every number of rows may have a backend of its own; above, every power of two."""
MOST_ROWS = 1 << 20
SEED_FALLBACK = "cuda.dequantise_cublas"
SEED_RULE = "the seed's rule"
NO_ROW = "no tuned row speaks of it: the order of the list"


@dataclass(frozen=True, slots=True)
class RowChoice:
    """For first..last rows `backend` runs. why: the evidence, a rule, or the order of the list.

    passed_over: backends that the policy named before it and that refused.
    """

    first: int
    last: int
    backend: str
    why: str
    passed_over: tuple[Verdict, ...] = ()


def seed_names(key: OpKey) -> tuple[str, ...]:
    """The seed's dispatch: 1 row a GEMV; 2 to 8 the batch kernels, which for W3 is the GEMV with
    grid.y = batch; more the tiled GEMM; a CPU or activations other than fp16 dequantise.
    """
    if key.device != "cuda" or key.dtype != "float16":
        return (SEED_FALLBACK,)
    if key.m <= 1:
        return ("cuda.seed_gemv",)
    if key.m <= 8:
        return ("cuda.seed_gemv",) if key.bits == 3 else ("cuda.seed_w4_batch_tile",)
    return ("cuda.seed_tiled",)


def proposals(
    key: OpKey, policy: Policy, tables: Sequence[TunedTable], names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """(backend, why) in the order in which to ask; ends with every name in `names`."""
    if policy == "seed":
        yield from ((name, SEED_RULE) for name in (*seed_names(key), SEED_FALLBACK))
        return
    for table in tables:
        yield from ((row.backend, row.evidence) for row in table.matching(key))
    yield from ((name, NO_ROW) for name in names)


def choose_for_rows(
    backends: Sequence[AnyBackend], key: OpKey, policy: Policy, tables: Sequence[TunedTable]
) -> tuple[AnyBackend, RowChoice]:
    """The backend for exactly key.m rows. Raises NoBackend with every reason.

    A name that is not among `backends` is passed over: a table may know more than this version.
    """
    by_name = {backend.name: backend for backend in backends}
    passed: dict[str, Verdict] = {}
    for name, why in proposals(key, policy, tables, tuple(by_name)):
        backend = by_name.get(name)
        refusal = "not part of this version" if backend is None else backend.refuse(key)
        if backend is not None and refusal is None:
            return backend, RowChoice(key.m, key.m, name, why, tuple(passed.values()))
        passed.setdefault(name, Verdict(name, refusal))
    reasons = "; ".join(f"{verdict.backend}: {verdict.refusal}" for verdict in passed.values())
    raise NoBackend(f"{key}: {reasons or explain(backends, key)}")


def row_choices(
    backends: Sequence[AnyBackend], key: OpKey, policy: Policy, tables: Sequence[TunedTable]
) -> list[tuple[AnyBackend, RowChoice]]:
    """The whole range of rows, in order: up to ROWS_ONE_BY_ONE one by one, then by powers of two;
    equal neighbours are one. Raises NoBackend.
    """
    found: list[tuple[AnyBackend, RowChoice]] = []
    for first, last in row_steps():
        backend, choice = choose_for_rows(backends, replace(key, m=first), policy, tables)
        if found and found[-1][0] is backend and found[-1][1].why == choice.why:
            found[-1] = backend, replace(found[-1][1], last=last)
        else:
            found.append((backend, replace(choice, last=last)))
    return found


def row_steps() -> Iterator[tuple[int, int]]:
    """(first, last): the finest cut a policy can make."""
    yield from ((rows, rows) for rows in range(1, ROWS_ONE_BY_ONE + 1))
    first = ROWS_ONE_BY_ONE + 1
    while first < MOST_ROWS:
        last = (1 << first.bit_length()) - 1
        yield first, last
        first = last + 1
