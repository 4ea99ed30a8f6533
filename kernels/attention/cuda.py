"""Attention on CUDA: decoded rows through paged_decode.cu, prompts through torch's flash attention.

Both read the paged cache, fp16, bf16 or INT8; neither ever holds a [queries, keys] matrix. The plan
carries device tensors at fixed addresses, so that a CUDA graph can be replayed with other lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from kernels.attention.cuda_prompt import PromptRun, attend_prompts, prompt_runs
from kernels.attention.gather import load_gather
from kernels.attention.op import AttentionPlan, Segment, on_device, spans
from kernels.jit.kernel import CudaSource, Kernel, Variant
from kernels.pack.int8_kv import Int8KV, stored
from kernels.spec.device import device_info
from kernels.spec.op import OpKey
from kernels.spec.registry import refuse_all_but_half

SOURCE = CudaSource("attention/paged_decode.cu")
ENTRY = "paged_decode"
TILE_TOKENS = 16
HEADS_AT_ONCE = 8
HEAD_DIMS = (64, 96, 128)
DTYPES = {torch.float16: 0, torch.bfloat16: 1}
PART_HEADER = 2 * HEADS_AT_ONCE
"""fp32 values in front of a split's sums: each head's highest score and its total."""
ABSENT = -1
"""In a word of partial sums, as an integer: nothing was left there yet (split_softmax.cuh)."""
FEW_WARPS = 8
WARPS = {16: 8, 8: 16}
"""Of a block that has a multiprocessor for itself, by bits of the cache: as many as the registers
allow, so that enough loads are on their way."""
LONG_SHARE = 64
"""Tiles from which a block is better off with a multiprocessor for itself."""
WHOLE = 16
"""Tiles of a sequence that is never split: the second round of its warps costs less than a join."""
MOST_SPLITS = 256
"""The weights of more would not fit where the sums of a block's warps were."""


def variant(
    head_dim: int, kv_bits: int, bf16: int, block_tokens: int = 16, warps: int = FEW_WARPS
) -> Variant:
    """The compiled kernel for one kind of cache, with its budget."""
    defines = {
        "HEAD_DIM": head_dim,
        "KV_BITS": kv_bits,
        "BF16": bf16,
        "BLOCK_TOKENS": block_tokens,
        "WARPS": warps,
        "MIN_BLOCKS": WARPS[kv_bits] // warps,
    }
    return Variant(
        SOURCE,
        ENTRY,
        defines,
        max_registers=168 if kv_bits == 16 else 128,
        max_shared_bytes=80 * 1024,
        threads=32 * warps,
        shared_bytes=4 * warps * HEADS_AT_ONCE * (head_dim + head_dim // 8),
    )


SHIPPED = tuple(
    variant(head_dim, kv_bits, bf16, warps=warps)
    for head_dim in HEAD_DIMS
    for kv_bits in (16, 8)
    for bf16 in (0, 1)
    for warps in sorted({FEW_WARPS, WARPS[kv_bits]})
)


@cache
def _kernel(head_dim: int, kv_bits: int, bf16: int, block_tokens: int, warps: int) -> Kernel:
    return variant(head_dim, kv_bits, bf16, block_tokens, warps).kernel()


@dataclass(slots=True)
class DecodeTensors:
    """The decoded rows of one forward, as the kernel reads them.

    tables i32[B, width]; lengths i32[B], 0 for a padding row, whose output becomes zeros; rows
    i32[B] or None where sequence i is row i. longest: keys that any of them may have while these
    tensors live; it decides the split: a graph captured at `longest` serves shorter ones, and
    longer ones slowly.
    Use them once before a capture: that takes the kernels' rooms outside the graph's own memory.
    """

    tables: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor | None
    longest: int
    rooms: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def room(self, units: int, splits: int, head_dim: int) -> torch.Tensor:
        """Partial sums, all of them absent; the layers, which run one after another, share them."""
        key = (units, splits, head_dim)
        if key not in self.rooms:
            part = PART_HEADER + HEADS_AT_ONCE * head_dim
            words = self.lengths.shape[0] * units * splits * part if splits > 1 else 1
            self.rooms[key] = torch.full(
                (words,), ABSENT, dtype=torch.int32, device=self.lengths.device
            )
        return self.rooms[key]


@dataclass(frozen=True, slots=True)
class CudaPlan(AttentionPlan):
    """decode: the segments of one row each. prompts: the others, a call each."""

    decode: DecodeTensors | None = None
    prompts: tuple[PromptRun, ...] = ()


def plan_attention_cuda(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_lists: Sequence[Sequence[int]],
    block_tokens: int,
    device: torch.device,
    window: int | None = None,
) -> CudaPlan:
    """One segment per sequence; one copy to the device for all decoded rows, one for the prompts
    of a call."""
    segments = [
        Segment(*span[:4], None, span[4], None, None)
        for span in spans(q_lens, kv_lens, block_lists, block_tokens, window)
    ]
    decoded = [segment for segment in segments if segment.q_len == 1]
    prompts = prompt_runs(segments, block_tokens, device, window is not None)
    decode = decode_tensors(decoded, bool(prompts), device) if decoded else None
    return CudaPlan(tuple(segments), (), (), block_tokens, window, decode, prompts)


def static_plan_cuda(
    tables: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    block_tokens: int,
    window: int | None = None,
) -> CudaPlan:
    """For rows 0, 1, ... that all are decodes and whose content changes under the plan. tables,
    lengths, longest: see DecodeTensors."""
    decode = DecodeTensors(tables, lengths, None, longest)
    return CudaPlan((), (), (), block_tokens, window, decode)


def decode_tensors(
    decoded: Sequence[Segment], among_prompts: bool, device: torch.device
) -> DecodeTensors:
    """The kernel's tensors for these segments. among_prompts: rows are not numbered 0, 1, ..."""
    width = max(len(segment.blocks) for segment in decoded)
    count = len(decoded)
    numbers = [segment.kv_len for segment in decoded]
    numbers += [segment.first_row for segment in decoded]
    for segment in decoded:
        numbers += (*segment.blocks, *(0,) * (width - len(segment.blocks)))
    packed = on_device(torch.tensor(numbers, dtype=torch.int32), device)
    return DecodeTensors(
        packed[2 * count :].view(count, width),
        packed[:count],
        packed[count : 2 * count] if among_prompts else None,
        max(segment.kv_len for segment in decoded),
    )


@dataclass(frozen=True, slots=True)
class Split:
    """tiles: of 16 tokens, that a block takes of a sequence. warps: of the block."""

    tiles: int
    warps: int


def tiles_of(longest: int, window: int | None) -> int:
    """Tiles that hold a sequence of up to `longest` keys; a window may begin within one."""
    return -(-min(longest, window or longest) // TILE_TOKENS) + (window is not None)


def units_of(queries: int, kv_heads: int) -> int:
    """Blocks that share a sequence's rows of so many query heads, for one split."""
    return kv_heads * -(-queries // kv_heads // HEADS_AT_ONCE)


def split_of(tiles: int, units: int, multiprocessors: int, kv_bits: int) -> Split:
    """How sequences of up to `tiles` tiles are cut. units: (sequence, KV head) pairs.

    All blocks of a batch should run in one wave; where that would leave a block less than about the
    square root of its sequence's tiles, joining many small parts costs more than it brings.
    """
    wide = _fair(tiles, units, multiprocessors)
    if wide >= LONG_SHARE:
        # Where not all can begin at once anyway, two small blocks share a multiprocessor.
        return Split(wide, WARPS[kv_bits] if units <= multiprocessors else FEW_WARPS)
    if tiles <= WHOLE:
        return Split(tiles, FEW_WARPS)
    places = multiprocessors * WARPS[kv_bits] // FEW_WARPS
    return Split(_fair(tiles, units, places), FEW_WARPS)


def _fair(tiles: int, units: int, places: int) -> int:
    """Whole rounds of a block's warps."""
    fair = -(-tiles // max(1, places // units))
    rounds = max(-(-fair // FEW_WARPS), math.isqrt(tiles) // FEW_WARPS, 1)
    return max(rounds, -(-tiles // (MOST_SPLITS * FEW_WARPS))) * FEW_WARPS


class CudaAttention:
    """Attention for one shape of heads and cache; the AttentionFn of an OpSet."""

    name = "cuda.paged"

    def __init__(self) -> None:
        self._multiprocessors = 0

    def load(self, head_dim: int, kv_bits: int, dtype: torch.dtype, block_tokens: int = 16) -> None:
        """Compile and load every kernel that such a cache may call for: nothing may be loaded in a
        graph's capture, and which kernel a step takes depends on its lengths."""
        for warps in {FEW_WARPS, WARPS[kv_bits]}:
            _kernel(head_dim, kv_bits, DTYPES[dtype], block_tokens, warps).load()
        load_gather(kv_bits, dtype)

    def refuse(self, key: OpKey) -> str | None:
        """None where it can; else why not. See op.ATTENTION for the axes."""
        if reason := refuse_all_but_half(
            key, "sums depend on how a sequence is split", "computes in"
        ):
            return reason
        if key.k not in HEAD_DIMS:
            return f"heads of {key.k} are not among {HEAD_DIMS}"
        if key.n % TILE_TOKENS:
            return f"blocks of {key.n} tokens are not whole tiles of {TILE_TOKENS}"
        return None

    def __call__(
        self, q: torch.Tensor, kv: torch.Tensor | Int8KV, plan: AttentionPlan
    ) -> torch.Tensor:
        """q [T, heads, head_dim] -> [T, heads * head_dim], both in the activations' dtype."""
        assert isinstance(plan, CudaPlan)
        if plan.decode is None and len(plan.prompts) == 1:
            return attend_prompts(q, kv, plan.prompts[0], plan.window).flatten(1)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if plan.decode is not None:
            self.decode(q, kv, plan.decode, out, plan.block_tokens, plan.window)
        for run in plan.prompts:
            out[run.first : run.last] = attend_prompts(q, kv, run, plan.window).flatten(1)
        return out

    def decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor | Int8KV,
        step: DecodeTensors,
        out: torch.Tensor,
        block_tokens: int,
        window: int | None,
        split: Split | None = None,
    ) -> None:
        """Write the decoded rows of out [T, heads * head_dim]. split: for benches."""
        codes, scales, bits = stored(kv)
        kv_heads, head_dim = codes.shape[3], codes.shape[4]
        group = q.shape[1] // kv_heads
        units = units_of(q.shape[1], kv_heads)
        count = step.lengths.shape[0]
        most = tiles_of(step.longest, window)
        split = split or split_of(most, units * count, self._processors(q.device), bits)
        splits = -(-most // split.tiles)
        partial = step.room(units, splits, head_dim)
        kernel = _kernel(head_dim, bits, DTYPES[q.dtype], block_tokens, split.warps)
        kernel.launch(
            (units, splits, count),
            (32 * split.warps, 1, 1),
            q,
            codes,
            scales,
            step.tables,
            step.lengths,
            step.rows,
            out,
            partial,
            kv_heads,
            group,
            step.tables.shape[1],
            split.tiles,
            window or 0,
            launch_dependents=True,
        )

    def _processors(self, device: torch.device) -> int:
        if not self._multiprocessors:
            self._multiprocessors = device_info(device).multiprocessors
        return self._multiprocessors
