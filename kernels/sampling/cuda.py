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
BLOCKS_A_ROW = 32
ROW_STATE_BYTES = 4 * (2 * 2048 + 4)
"""draw.cu's RowState."""

SHIPPED = tuple(
    Variant(source, entry, {}, max_registers=64, threads=THREADS)
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
    """Up to `rows` rows of logits of `width` at a time."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows = rows
        self.width = width
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.finite = torch.zeros(rows, dtype=torch.uint8, device=device)
        self._best = torch.zeros(rows, dtype=torch.int64, device=device)
        self._ranked = torch.zeros(rows, dtype=torch.int64, device=device)
        self._counters = torch.zeros(rows, dtype=torch.int32, device=device)
        self._states = torch.zeros(rows * ROW_STATE_BYTES, dtype=torch.uint8, device=device)
        self._candidates = torch.empty(rows * width, device=device)
        self._cutoffs = torch.empty(rows, device=device)
        self._sums = torch.empty(rows * BLOCKS_A_ROW, dtype=torch.int32, device=device)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """tokens i64[R] of fp32 logits [R, width], a view that the next call overwrites; the
        lowest index among equals. `finite` says of each row whether its maximum is a number.
        """
        return self._argmax(logits, self.tokens)

    def _argmax(self, logits: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        rows = logits.shape[0]
        _kernel("argmax_rows").launch(
            (BLOCKS_A_ROW, rows, 1),
            (THREADS, 1, 1),
            logits,
            into,
            self.finite,
            self._ranked,
            self._counters,
            self.width,
        )
        return into[:rows]

    def edit(
        self,
        logits: torch.Tensor,
        edits: torch.Tensor,
        ids: torch.Tensor,
        values: torch.Tensor,
        counts: torch.Tensor | None,
    ) -> torch.Tensor:
        """fp32 logits [R, width] with each row's edits and divided by its temperature, a new
        tensor. edits, ids, values: pack_edits() on the device; counts i32[slots, width].
        """
        out = torch.empty_like(logits)
        _kernel("edit_logits").launch(
            (-(-self.width // EDIT_CHUNK), logits.shape[0], 1),
            (THREADS, 1, 1),
            logits,
            out,
            edits,
            counts,
            ids,
            values,
            self.width,
        )
        return out

    def count(self, counts: torch.Tensor, edits: torch.Tensor, rows: int) -> None:
        """Add the last tokens of the first `rows` rows (at most 1024) to their counts."""
        block = (-(-rows // 32) * 32, 1, 1)
        _kernel("count_tokens").launch(
            (1, 1, 1), block, counts, edits, self.tokens, rows, self.width
        )

    def draw(self, logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """tokens i64[R], a view that the next call overwrites, from edited fp32 logits [R, width]:
        greedy rows take the argmax, the others a draw from the softmax. draws: pack_draws() on the
        device.
        """
        best = self._argmax(logits, self._best)
        return self.draw_from(torch.softmax(logits, dim=-1), draws, best)

    def draw_from(
        self, probabilities: torch.Tensor, draws: torch.Tensor, best: torch.Tensor
    ) -> torch.Tensor:
        """draw() for fp32 probabilities [R, width] and the argmax of greedy rows."""
        rows = probabilities.shape[0]
        grid, block = (BLOCKS_A_ROW, rows, 1), (THREADS, 1, 1)
        _kernel("histogram").launch(grid, block, probabilities, draws, self._states, self.width)
        _kernel("find_cutoff").launch(
            grid,
            block,
            probabilities,
            draws,
            self._states,
            self._candidates,
            self._cutoffs,
            self.width,
        )
        _kernel("draw_tokens").launch(
            grid,
            block,
            probabilities,
            draws,
            self._states,
            self._cutoffs,
            self._sums,
            best,
            self.tokens,
            self.finite,
            self.width,
        )
        return self.tokens[:rows]
