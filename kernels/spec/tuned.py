"""Tuned tables: which backend for which shape on which architecture, and where that was measured.

A table is YAML, one row a line of evidence; the user's own, written by `deepinfer-sm86 tune`, is
asked before the one that is shipped. Knows no backend beyond names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from configs.load import cache_dir
from kernels.spec.op import OpKey

SHIPPED_FOLDER = Path(__file__).resolve().parent.parent / "tuned"
SHIPPED_TABLES = (86, 90)
"""Architectures with a shipped table; others use that of the nearest below, or the first."""
_AXES = ("m", "n", "k")
_FIELDS = {"op", "backend", "evidence", "bits", *_AXES}
Range = tuple[int, int]
ANY: Range = (0, (1 << 31) - 1)


class TableError(ValueError):
    """A tuned table cannot be read; the message names the file and the row."""


@dataclass(frozen=True, slots=True)
class TunedRow:
    """For keys of `op` within the ranges (both ends included), `backend` was the fastest.

    bits: empty for any. evidence: path of the result file from the repository's root, or a note of
    where the figure comes from.
    """

    op: str
    backend: str
    evidence: str
    bits: tuple[int, ...] = ()
    m: Range = ANY
    n: Range = ANY
    k: Range = ANY

    def matches(self, key: OpKey) -> bool:
        """Whether the row speaks of `key`."""
        return (
            self.op == key.op
            and (not self.bits or key.bits in self.bits)
            and self.m[0] <= key.m <= self.m[1]
            and self.n[0] <= key.n <= self.n[1]
            and self.k[0] <= key.k <= self.k[1]
        )


@dataclass(frozen=True, slots=True)
class TunedTable:
    """Rows in the order in which they are asked. source: where they come from, for reports."""

    source: str
    rows: tuple[TunedRow, ...]

    def matching(self, key: OpKey) -> Iterator[TunedRow]:
        """Every row that speaks of `key`, the first to be preferred."""
        return (row for row in self.rows if row.matches(key))


def tuned_tables(sm: int, device_name: str) -> tuple[TunedTable, ...]:
    """The user's own table for this card, if there is one, then the shipped one.

    Raises TableError for a table that cannot be read.
    """
    own = user_table(sm, device_name)
    return (*((_read(own),) if own.exists() else ()), shipped_table(sm))


@cache
def shipped_table(sm: int) -> TunedTable:
    """The table that comes with the package for compute capability sm / 10."""
    nearest = max((known for known in SHIPPED_TABLES if known <= sm), default=SHIPPED_TABLES[0])
    return _read(SHIPPED_FOLDER / f"sm_{nearest}.yaml")


def user_table(sm: int, device_name: str) -> Path:
    """Where `tune` writes for this card: in the cache folder, one file a kind of card."""
    card = "".join(letter if letter.isalnum() else "-" for letter in device_name.lower())
    return cache_dir() / "tuned" / f"sm_{sm}-{card}.yaml"


def write_table(path: Path, rows: Sequence[TunedRow], head: str) -> None:
    """Write `rows` under the comment `head`; a reader never sees half a file."""
    lines = [f"# {line}".rstrip() for line in head.splitlines()] + ["rows:"]
    lines += [f"  - {_flow(row)}" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.replace(path)


def _flow(row: TunedRow) -> str:
    fields: dict[str, Any] = {"op": row.op}
    if row.bits:
        fields["bits"] = list(row.bits)
    fields |= {axis: list(span) for axis in _AXES if (span := getattr(row, axis)) != ANY}
    fields |= {"backend": row.backend, "evidence": row.evidence}
    return yaml.safe_dump(fields, default_flow_style=True, sort_keys=False, width=1000).strip()


def _read(path: Path) -> TunedTable:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise TableError(f"{path}: {' '.join(str(error).split())}") from None
    rows = document.get("rows") if isinstance(document, Mapping) else None
    if not isinstance(rows, list):
        raise TableError(f"{path}: no list of rows")
    return TunedTable(str(path), tuple(_row(path, at, row) for at, row in enumerate(rows, 1)))


def _row(path: Path, at: int, fields: Any) -> TunedRow:
    where = f"{path}: row {at}"
    if not isinstance(fields, Mapping) or not {"op", "backend", "evidence"} <= set(fields):
        raise TableError(f"{where}: needs op, backend and evidence")
    if unknown := sorted(set(fields) - _FIELDS):
        raise TableError(f"{where}: no field is named {unknown[0]!r}")
    bits = fields.get("bits", [])
    try:
        return TunedRow(
            str(fields["op"]),
            str(fields["backend"]),
            str(fields["evidence"]),
            tuple(int(one) for one in (bits if isinstance(bits, list) else [bits])),
            **{axis: _range(fields[axis]) for axis in _AXES if axis in fields},
        )
    except (TypeError, ValueError):
        raise TableError(f"{where}: bits are integers, m, n and k are [first, last]") from None


def _range(value: Any) -> Range:
    first, last = (value, value) if isinstance(value, int) else value
    if not int(first) <= int(last):
        raise ValueError
    return int(first), int(last)
