"""Sampling on CUDA with no host in between: argmax.cu, edit.cu and draw.cu.

A DeviceArgmax or DeviceSampler owns the room its kernels meet in, at fixed addresses, so a step can
be captured in a graph. One belongs to one stream: its counters are zero only between launches.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import torch

from kernels.jit.kernel import CudaSource, Kernel, Variant

ARGMAX = CudaSource("sampling/argmax.cu")
EDIT = CudaSource("sampling/edit.cu")
DRAW = CudaSource("sampling/draw.cu")
THREADS = 256
EDIT_CHUNK = 4096
CHUNK_PART_WORDS = 3
"""draw.cuh's ChunkPart, in 4-byte words."""
BLOCKS_A_ROW = 32
MOST_BLOCKS = 128
"""Of an argmax over few rows: a thread's reads wait for one another."""
ROW_STATE_BYTES = 4 * (2 * 2048 + 4)
"""draw.cu's RowState."""

SHIPPED = tuple(
    # find_cutoff puts two words aside on sm_90: written and read, 16 bytes.
    Variant(source, entry, {}, max_registers=64, threads=THREADS, spill_bytes=16)
    for source, entry in (
        (ARGMAX, "argmax_rows"),
        (EDIT, "edit_logits"),
        (EDIT, "count_history"),
        (DRAW, "histogram"),
        (DRAW, "find_cutoff"),
        (DRAW, "draw_tokens"),
    )
)


@cache
def _kernel(entry: str) -> Kernel:
    return next(variant.kernel() for variant in SHIPPED if variant.entry == entry)


@dataclass(slots=True, eq=False)
class Outcome:
    """Where up to R rows of a batch are told: tokens i64[R], finite u8[R] (whether the row has a
    finite maximum; else its token is any id), both views of `packed` u8[9 R], one copy to the host.
    Where there is `host`, u8[9 R] of page-locked memory, it is told the same at once. The token of
    row r also goes to by_slot[slots[r]], i64 both, where there is one.
    """

    tokens: torch.Tensor
    finite: torch.Tensor
    packed: torch.Tensor
    by_slot: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    host: torch.Tensor | None = None

    def places(self) -> tuple[object, ...]:
        """As include/told.cuh has them. The host's by address: a launch takes no tensor that torch
        calls the CPU's.
        """
        host: tuple[object, object] = (None, None)
        if self.host is not None:
            at = self.host.data_ptr()
            host = struct.pack("P", at), struct.pack("P", at + 8 * self.tokens.shape[0])
        return (self.tokens, self.finite, *host, self.by_slot, self.slots)


def new_outcome(rows: int, device: torch.device) -> Outcome:
    """For batches of up to so many rows, not written yet."""
    packed = torch.empty(9 * rows, dtype=torch.uint8, device=device)
    return Outcome(packed[: 8 * rows].view(torch.int64), packed[8 * rows :], packed)


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """RowPacker.packed() on the device, and where its lists begin."""

    packed: torch.Tensor
    biases_at: int
    ids_at: int


class DeviceArgmax:
    """Up to `rows` rows at a time."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._ranked = torch.zeros(rows, dtype=torch.int64, device=device)
        self._counters = torch.zeros(rows, dtype=torch.int32, device=device)

    def __call__(self, logits: torch.Tensor, outcome: Outcome) -> None:
        """Of every row of fp32 logits [R, width], whose rows may be apart; the lowest index among
        equals, a NaN above all.
        """
        rows, width = logits.shape
        _kernel("argmax_rows").launch(
            (max(BLOCKS_A_ROW, MOST_BLOCKS // rows), rows, 1),
            (THREADS, 1, 1),
            logits,
            self._ranked,
            self._counters,
            *outcome.places(),
            width,
            logits.stride(0),
        )


class DeviceSampler:
    """Up to `rows` rows of logits of `width` at a time. probabilities: of the rows drawn last, fp32
    [rows, width]. Raises torch.OutOfMemoryError where there is no room_bytes().
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows = rows
        self.width = width
        self.edited = torch.empty(rows, width, device=device)
        self.probabilities = torch.empty(rows, width, device=device)
        # A draw looks for its cutoff when the logits have become probabilities.
        self._candidates = self.edited
        self._chunks = -(-width // EDIT_CHUNK)
        self._parts = torch.empty(rows * self._chunks * CHUNK_PART_WORDS, device=device)
        self._states = torch.zeros(rows * ROW_STATE_BYTES, dtype=torch.uint8, device=device)
        self._cutoffs = torch.empty(rows, device=device)
        self._sums = torch.empty(rows * BLOCKS_A_ROW, dtype=torch.int32, device=device)

    def count(self, sent: Sent, first: int, rows: int, counts: torch.Tensor) -> None:
        """Into counts i32[.., width], all zero, what was sent of the histories of rows `first` to
        first + rows - 1.
        """
        _kernel("count_history").launch(
            (rows, 1, 1), (THREADS, 1, 1), sent.packed, counts, first, sent.ids_at, self.width
        )

    def edit(
        self,
        logits: torch.Tensor,
        sent: Sent,
        first: int,
        rows: int,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """fp32 [rows, width]: the rows of fp32 logits [.., width], which may be apart, that belong
        to rows `first` to first + rows - 1 of those sent, edited and divided by their temperature.
        A view that the next draw overwrites.
        """
        _kernel("edit_logits").launch(
            (self._chunks, rows, 1),
            (THREADS, 1, 1),
            logits,
            self.edited,
            sent.packed,
            counts,
            self._parts,
            first,
            sent.biases_at,
            self.width,
            logits.stride(0),
        )
        return self.edited[:rows]

    def draw(self, sent: Sent, first: int, rows: int, outcome: Outcome) -> None:
        """Tokens from the logits edited last, once: greedy rows take their argmax, the others a
        draw from the softmax. first, rows: as edit() was given them.
        """
        grid, block = (BLOCKS_A_ROW, rows, 1), (THREADS, 1, 1)
        _kernel("histogram").launch(
            grid,
            block,
            self.edited,
            self._parts,
            sent.packed,
            self.probabilities,
            self._states,
            first,
            self.width,
            self._chunks,
        )
        _kernel("find_cutoff").launch(
            grid,
            block,
            self.probabilities,
            sent.packed,
            self._states,
            self._candidates,
            self._cutoffs,
            first,
            self.width,
        )
        _kernel("draw_tokens").launch(
            grid,
            block,
            self.probabilities,
            sent.packed,
            self._states,
            self._cutoffs,
            self._sums,
            self._parts,
            *outcome.places(),
            first,
            self.width,
            self._chunks,
        )


def room_bytes(rows: int, width: int) -> int:
    """Of a DeviceSampler."""
    chunks = -(-width // EDIT_CHUNK)
    return rows * (8 * width + 4 * CHUNK_PART_WORDS * chunks + ROW_STATE_BYTES + 4 + 128)
