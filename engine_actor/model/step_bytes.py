"""What one step takes beside weights and KV cache: activations, logits, tables, workspaces.

Upper bounds from shapes, 8 to 60 % above peaks on an H200 (docs/log.md) and held against such peaks
by the GPU tests. A prompt chunk's logits are those of its last rows only; prompt logprobs come in
slices and are run smaller where they do not fit. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine_actor import ops
from engine_actor.model import prefill_graphs
from engine_actor.model.card_plan import Part, Settings
from engine_actor.model.config import ModelConfig
from engine_actor.model.decode_buckets import DecodeBuckets
from engine_actor.model.decode_graphs import graph_bytes, static_bytes
from engine_actor.model.device_sampling import sampler_bytes
from engine_actor.model.ledger import MIB
from engine_actor.model.prefill_buckets import PrefillBuckets

HOPPER = 90
MULTIPROCESSORS = {True: 132, False: 84}
"""Of the largest cards, Hopper and older ones: what is split over the card is split in so many."""
ROWS_WITHOUT_SCRATCH = 64
"""Up to here a linear needs no scratch."""
SPLITS, MOST_SPLIT_BYTES = 7, 53 * MIB
"""Parts of a product that is split along K, fp32; and the most that one takes together. From the
plans of shapes from 0.5B to 8B for 16 to 132 multiprocessors.
"""
DENSE_BYTES = 64 * MIB
"""Of a linear of many rows whose weights are made dense, a slice at a time."""
FLASH_ROWS, FLASH_PARTS = 64, 4
"""Rows of a part of torch's attention, and parts for each multiprocessor where keys are split."""
ATTENTION_ROOM = 4 * MIB
"""Parts of decoded sequences, joined in the same launch."""
HEAD_SLICE_ROWS = 8192
"""An 8-bit head of more rows than its kernels take is made dense so many out-features at a time."""
SAMPLER_REST = MIB
"""Parameters, histories and replies of sampled rows."""
POSITIONS_AT_ONCE = 1024
INT8_KEY_BYTES = {"float16": 3, "bfloat16": 11, "float32": 9}
"""Of a gathered INT8 key or value: its code, what it becomes, and what lies between."""
WORKSPACE_BYTES, SMALL_WORKSPACE_BYTES = 33 * MIB, 9344 * 1024
"""Of cuBLAS and cuBLASLt for a stream, on Hopper by default and as configs.load chooses it."""
PAGE_BYTES = 14 * MIB
"""torch takes memory in pages of 12 MiB for large tensors and 2 MiB for small ones; the last of a
stream, of the graphs and of what was loaded are not full.
"""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's memory depends on beside the settings. item_bytes: of an activation. sm: of the
    card. streams: that multiply. partial_prefills: prompts in one chunk. head_bits: 0 for dense.
    head_rows: of x, that the head is read packed for.
    graphs: whether decode steps are captured; prefill_graph_rows: chunks of so many tokens at most,
    0 for none. in_strips: whether every linear of the layers is read packed at any number of rows.
    gated: whether gate and up are one linear that gives the product. in_buckets: whether decode
    steps have fixed shapes, without which nothing is captured.
    """

    model: ModelConfig
    vocab_size: int
    item_bytes: int
    head_bits: int
    head_rows: int
    sm: int
    streams: int
    partial_prefills: int
    block_tokens: int
    graphs: bool
    small_workspaces: bool = False
    in_strips: bool = False
    gated: bool = False
    prefill_graph_rows: int = 0
    in_buckets: bool = True


def step_parts(shape: StepShape, settings: Settings) -> Iterator[Part]:
    """The lines of the plan that do not depend on the checkpoint's weights or the KV pool."""
    chunk, rows = settings.chunk_tokens, settings.max_num_seqs
    yield Part("prompt chunk", prompt_bytes(shape, settings), f"{chunk} tokens, last rows' logits")
    yield Part("decoded rows", decode_bytes(shape, rows), f"{rows} sequences with their logits")
    if shape.sm and shape.in_buckets:
        buckets = DecodeBuckets.up_to(rows, settings.max_model_len)
        fixed = static_bytes(buckets, shape.vocab_size, shape.block_tokens, shape.model.head_dim)
        yield Part("decode buckets", fixed, f"up to {buckets.rows[-1]} rows", True)
        if shape.graphs:
            nbytes = graph_bytes(buckets, row_bytes(shape))
            yield Part("decode graphs", nbytes, f"{len(buckets)} at most, made with use")
        if shape.prefill_graph_rows:
            yield from _prefill_graph_parts(shape, settings)
    yield Part("sampler", sampler_bytes(rows, shape.vocab_size) + SAMPLER_REST)
    yield Part("position tables", table_bytes(shape.model, settings.max_model_len), "", True)
    streams = multiplying(shape)
    if not shape.in_strips or rows > shape.head_rows:
        yield Part("library workspaces", workspace_bytes(shape), f"{streams} streams")
    yield Part("allocator's pages", (streams + 1) * PAGE_BYTES, f"of {streams + 1} streams", True)


def _prefill_graph_parts(shape: StepShape, settings: Settings) -> Iterator[Part]:
    sequences = ops.StagedPrompts.SEQUENCES
    most = min(settings.chunk_tokens, shape.prefill_graph_rows)
    buckets = PrefillBuckets.up_to(most, settings.max_model_len, sequences)
    fixed = prefill_graphs.static_bytes(
        buckets, shape.vocab_size, shape.block_tokens, shape.model.head_dim
    )
    rows, keys = buckets.most_rows, buckets.most_keys
    yield Part("prefill buckets", fixed, f"up to {rows} rows", True)
    largest = replace(settings, chunk_tokens=rows, max_model_len=keys)
    peak = prompt_bytes(replace(shape, partial_prefills=sequences), largest)
    nbytes = prefill_graphs.graph_bytes(buckets, peak)
    yield Part("prefill graphs", nbytes, f"{len(buckets)}, made at the start")


def prompt_bytes(shape: StepShape, settings: Settings) -> int:
    """Peak of a chunk at the end of the longest prompt."""
    model, tokens = shape.model, settings.chunk_tokens
    hidden, queries = model.hidden, model.n_heads * model.head_dim
    keys = 2 * model.n_kv_heads * model.head_dim
    mlp = 2 * hidden + (1 if shape.gated else 3) * model.intermediate
    attention = hidden + keys + 4 * queries
    each = INT8_KEY_BYTES[model.dtype] if settings.int8_kv else shape.item_bytes
    seen = max(settings.max_model_len, ops.JOINED_KEYS * tokens)
    gathered = seen * keys * each + _flash_bytes(shape, tokens)
    logits = min(tokens, shape.partial_prefills) * _logit_bytes(shape)
    rows = tokens * shape.item_bytes
    peak = max(rows * mlp + _scratch_bytes(shape, tokens), rows * attention + gathered)
    return 3 * rows * hidden + peak + logits


def _scratch_bytes(shape: StepShape, rows: int) -> int:
    """Of a linear."""
    if rows <= ROWS_WITHOUT_SCRATCH:
        return 0
    if not shape.in_strips:
        return DENSE_BYTES
    model = shape.model
    width = max(model.hidden, (model.n_heads + 2 * model.n_kv_heads) * model.head_dim)
    return min(MOST_SPLIT_BYTES, SPLITS * 4 * max(rows, 2 * ROWS_WITHOUT_SCRATCH) * width)


def _flash_bytes(shape: StepShape, rows: int) -> int:
    """Sums of keys that are split between multiprocessors, fp32."""
    parts = FLASH_PARTS * _multiprocessors(shape)
    return 4 * parts * min(rows, FLASH_ROWS) * shape.model.head_dim


def _multiprocessors(shape: StepShape) -> int:
    return MULTIPROCESSORS[shape.sm >= HOPPER]


def decode_bytes(shape: StepShape, rows: int) -> int:
    """Peak of a decode batch."""
    model = shape.model
    head = 0
    if shape.head_bits == 8 and rows > shape.head_rows:
        head = HEAD_SLICE_ROWS * model.hidden * (8 + shape.item_bytes)
        head += rows * shape.vocab_size * shape.item_bytes
    return rows * (row_bytes(shape) + 4 * shape.vocab_size) + head + ATTENTION_ROOM


def table_bytes(model: ModelConfig, max_model_len: int) -> int:
    """Cosines and sines of every position. The halves that they are joined from are gone before the
    first step.
    """
    positions = -(-max_model_len // POSITIONS_AT_ONCE) * POSITIONS_AT_ONCE
    return 2 * positions * model.head_dim * 4


def workspace_bytes(shape: StepShape) -> int:
    """cuBLAS's, one a stream that multiplies."""
    is_small = shape.sm < HOPPER or shape.small_workspaces
    return multiplying(shape) * (SMALL_WORKSPACE_BYTES if is_small else WORKSPACE_BYTES)


def multiplying(shape: StepShape) -> int:
    """Streams that products run on; graphs of a kind are captured on one of their own."""
    return shape.streams + shape.graphs + bool(shape.prefill_graph_rows)


def row_bytes(shape: StepShape) -> int:
    """Activations of one decoded row, and its logits as the head gives them."""
    model = shape.model
    queries, keys = model.n_heads * model.head_dim, 2 * model.n_kv_heads * model.head_dim
    width = 5 * model.hidden + 2 * queries + keys
    width += (1 if shape.gated else 3) * model.intermediate
    return (width + shape.vocab_size) * shape.item_bytes


def _logit_bytes(shape: StepShape) -> int:
    """Of one row: as the head gives them, and in fp32."""
    return shape.vocab_size * (shape.item_bytes + 4)
