"""What a checkpoint's weights take on a GPU once every layer is prepared, from headers alone.

W3 and W4 linears are re-laid in strips and their stored form is let go; 8-bit and dense ones stay
as they are. The embedding keeps its stored form, and a tied head in 8 bits reads the same bytes.
Knows shapes and bits; reads no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from engine_actor import ops
from engine_actor.load.formats.base import Entry
from engine_actor.load.names import LinearSlot, VectorSlot, slots
from engine_actor.model.config import ModelConfig

NORM_BYTES = 4
"""Norms are kept in fp32."""
TABLES = ("embed", "head")
GROUPED_HEAD_ROWS, CHANNEL_HEAD_ROWS, STRIP_HEAD_ROWS = 16, 256, 1 << 20
"""Of x that kernels read a packed head for: 8 bits in groups, with one scale a row; strips."""
SMALL_GROUP = 64
"""Of an embedding that `quantize --embedding-bits 4` makes."""
ALIGNMENT = 512
"""What torch's allocator rounds a tensor up to."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """resident: after loading. loading: beside it while the layer that needs most is prepared."""

    resident: int
    loading: int

    @property
    def peak(self) -> int:
        """Never more than this, from the first weight to the last."""
        return self.resident + self.loading


@dataclass(frozen=True, slots=True)
class _Piece:
    """rows: 0 for a vector of `columns` values."""

    name: str
    rows: int
    columns: int


def weight_bytes(
    config: ModelConfig, entries: Iterable[Entry], item_bytes: int, exact: bool = False
) -> WeightBytes:
    """For activations of item_bytes; exact: every linear is made dense in fp32. Entries that belong
    to no slot count as they are stored.
    """
    pieces = {piece.name: piece for piece in _pieces(config)}
    resident = loading = 0
    for entry in entries:
        piece = pieces.get(entry.name, _Piece(entry.name, 0, entry.nbytes // NORM_BYTES))
        for kept, beside in _forms(entry, piece, config, item_bytes, exact):
            resident += _rounded(kept)
            loading = max(loading, beside)
    return WeightBytes(resident, loading)


def with_small_embedding(
    config: ModelConfig, entries: Iterable[Entry], weights: WeightBytes
) -> WeightBytes | None:
    """What would be taken with an embedding in 4 bits; None where it is not in 8 or is the head."""
    found = next((entry for entry in entries if entry.name == "embed"), None)
    if config.tie_embeddings or found is None or found.bits != 8:
        return None
    rows, columns = config.vocab_size, config.hidden
    small = rows * (-(-columns // 2) + 2 * -(-columns // SMALL_GROUP))
    return replace(weights, resident=weights.resident - _rounded(found.nbytes) + _rounded(small))


def all_in_strips(config: ModelConfig, entries: Iterable[Entry]) -> bool:
    """Whether every linear of the layers is re-laid, and so read packed at any number of rows."""
    pieces = {piece.name: piece for piece in _pieces(config) if piece.rows}
    linears = [entry for entry in entries if entry.name in pieces and entry.name not in TABLES]
    return bool(linears) and all(
        entry.bits and _refuse_strips(entry, pieces[entry.name]) is None for entry in linears
    )


def head_of(config: ModelConfig, entries: Iterable[Entry]) -> tuple[int, int]:
    """(bits of the head, rows of x that it is read packed for)."""
    name = "embed" if config.tie_embeddings else "head"
    entry = next((entry for entry in entries if entry.name == name), None)
    if entry is None or not entry.bits:
        return 0, 0
    piece = _Piece(name, config.vocab_size, config.hidden)
    if entry.bits != 8:
        return entry.bits, 0 if _refuse_strips(entry, piece) else STRIP_HEAD_ROWS
    is_one_scale = _group(entry, piece) == config.hidden
    return 8, CHANNEL_HEAD_ROWS if is_one_scale else GROUPED_HEAD_ROWS


def has_gated(entries: Iterable[Entry]) -> bool:
    """Whether gate and up are stored as one linear."""
    return any(entry.name.endswith(".gate_up") for entry in entries)


def _forms(
    entry: Entry, piece: _Piece, config: ModelConfig, item_bytes: int, exact: bool
) -> Iterator[tuple[int, int]]:
    """(bytes that stay, bytes that are needed beside them for a moment)."""
    if not piece.rows:
        yield NORM_BYTES * piece.columns, entry.nbytes
        return
    linear = _exact if exact else _linear
    if entry.name != "embed":
        yield linear(entry, piece, item_bytes)
        return
    stored = _stored(entry, piece)
    yield stored, 0
    if config.tie_embeddings and (exact or entry.bits != 8):
        kept, beside = linear(entry, piece, item_bytes)
        # A dense table in the activations' dtype is the head as well.
        is_shared = not entry.bits and kept == entry.nbytes
        yield (0, 0) if is_shared else (kept, max(0, beside - stored))


def _exact(entry: Entry, piece: _Piece, item_bytes: int) -> tuple[int, int]:
    scratch = ops.DENSE_SCRATCH_BYTES if entry.bits else 0
    return 4 * piece.rows * piece.columns, _stored(entry, piece) + scratch


def _linear(entry: Entry, piece: _Piece, item_bytes: int) -> tuple[int, int]:
    stored = _stored(entry, piece)
    if not entry.bits:
        kept = piece.rows * piece.columns * item_bytes
        return kept, entry.nbytes if kept != entry.nbytes else 0
    if _refuse_strips(entry, piece) is not None:
        return stored, 0
    group = _group(entry, piece)
    words, scales = ops.strip_bytes(entry.bits, group, piece.rows, piece.columns)
    # Offsets, zero points and biases become half precision, whatever they were.
    rest = stored - _codes_and_scales(entry, piece)
    return words + scales + min(2 * rest, rest + scales), stored + ops.STRIP_SCRATCH_BYTES


def _stored(entry: Entry, piece: _Piece) -> int:
    """On the device before it is prepared. A format's own codes may be smaller than ours."""
    return max(entry.nbytes, _codes_and_scales(entry, piece))


def _codes_and_scales(entry: Entry, piece: _Piece) -> int:
    if not entry.bits:
        return 0
    group = _group(entry, piece)
    return piece.rows * (-(-piece.columns * entry.bits // 8) + 2 * -(-piece.columns // group))


def _group(entry: Entry, piece: _Piece) -> int:
    return piece.columns if entry.group == -1 else entry.group


def _refuse_strips(entry: Entry, piece: _Piece) -> str | None:
    return ops.refuse_strips(entry.bits, _group(entry, piece), piece.columns)


def _pieces(config: ModelConfig) -> Iterator[_Piece]:
    """Every name an entry may have: a fused linear, or the parts it is stored in."""
    for slot in slots(config):
        if isinstance(slot, VectorSlot):
            yield _Piece(slot.name, 0, slot.size)
            continue
        assert isinstance(slot, LinearSlot)
        for part in slot.parts:
            yield _Piece(part.name, part.rows, slot.in_features)
        yield _Piece(slot.name, slot.rows, slot.in_features)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
