"""Sampling on CUDA with no host in between: argmax.cu, edit.cu and draw.cu.

A DeviceSampler owns the room its kernels meet in, at fixed addresses, so a step can be captured in
a graph. One belongs to one stream: its counters are zero only between launches.
"""

from __future__ import annotations

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
ROW_STATE_BYTES = 4 * (2 * 2048 + 4)
"""draw.cu's RowState."""

SHIPPED = tuple(
    # find_cutoff puts two words aside on sm_90: written and read, 16 bytes.
    Variant(source, entry, {}, max_registers=64, threads=THREADS, spill_bytes=16)
    for source, entry in (
        (ARGMAX, "argmax_rows"),
        (EDIT, "edit_logits"),
        (EDIT, "count_tokens"),
        (DRAW, "histogram"),
        (DRAW, "find_cutoff"),
        (DRAW, "draw_tokens"),
    )
)


@cache
def _kernel(entry: str) -> Kernel:
    return next(variant.kernel() for variant in SHIPPED if variant.entry == entry)


class DeviceSampler:
    """Up to `rows` rows of logits of `width` at a time. Everything it gives out is a view that its
    next call overwrites. probabilities: of the rows drawn last, fp32 [rows, width].
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows = rows
        self.width = width
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.finite = torch.zeros(rows, dtype=torch.uint8, device=device)
        self.edited = torch.empty(rows, width, device=device)
        self.probabilities = torch.empty(rows, width, device=device)
        self._chunks = -(-width // EDIT_CHUNK)
        self._parts = torch.empty(rows * self._chunks * CHUNK_PART_WORDS, device=device)
        self._ranked = torch.zeros(rows, dtype=torch.int64, device=device)
        self._counters = torch.zeros(rows, dtype=torch.int32, device=device)
        self._states = torch.zeros(rows * ROW_STATE_BYTES, dtype=torch.uint8, device=device)
        self._candidates = torch.empty(rows * width, device=device)
        self._cutoffs = torch.empty(rows, device=device)
        self._sums = torch.empty(rows * BLOCKS_A_ROW, dtype=torch.int32, device=device)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """tokens i64[R] of fp32 logits [R, width]; the lowest index among equals. `finite` says of
        each row whether its maximum is a number.
        """
        rows = logits.shape[0]
        _kernel("argmax_rows").launch(
            (BLOCKS_A_ROW, rows, 1),
            (THREADS, 1, 1),
            logits,
            self.tokens,
            self.finite,
            self._ranked,
            self._counters,
            self.width,
        )
        return self.tokens[:rows]

    def edit(
        self,
        logits: torch.Tensor,
        edits: torch.Tensor,
        ids: torch.Tensor,
        values: torch.Tensor,
        counts: torch.Tensor | None,
    ) -> torch.Tensor:
        """fp32 logits [R, width] with each row's edits and divided by its temperature. edits, ids,
        values: pack_edits() on the device; counts i32[slots, width].
        """
        rows = logits.shape[0]
        _kernel("edit_logits").launch(
            (self._chunks, rows, 1),
            (THREADS, 1, 1),
            logits,
            self.edited,
            edits,
            counts,
            ids,
            values,
            self._parts,
            self.width,
        )
        return self.edited[:rows]

    def count(self, counts: torch.Tensor, edits: torch.Tensor, rows: int) -> None:
        """Add the last tokens of the first `rows` rows (at most 1024) to their counts."""
        block = (-(-rows // 32) * 32, 1, 1)
        _kernel("count_tokens").launch(
            (1, 1, 1), block, counts, edits, self.tokens, rows, self.width
        )

    def draw(self, draws: torch.Tensor, rows: int) -> torch.Tensor:
        """tokens i64[rows] from the logits edited last: greedy rows take their argmax, the others a
        draw from the softmax. draws: pack_draws() on the device. `finite` as for argmax().
        """
        grid, block = (BLOCKS_A_ROW, rows, 1), (THREADS, 1, 1)
        _kernel("histogram").launch(
            grid,
            block,
            self.edited,
            self._parts,
            draws,
            self.probabilities,
            self._states,
            self.width,
            self._chunks,
        )
        _kernel("find_cutoff").launch(
            grid,
            block,
            self.probabilities,
            draws,
            self._states,
            self._candidates,
            self._cutoffs,
            self.width,
        )
        _kernel("draw_tokens").launch(
            grid,
            block,
            self.probabilities,
            draws,
            self._states,
            self._cutoffs,
            self._sums,
            self._parts,
            self.tokens,
            self.finite,
            self.width,
            self._chunks,
        )
        return self.tokens[:rows]
