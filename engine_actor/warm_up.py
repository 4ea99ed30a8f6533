"""The first forwards of an engine: whatever is compiled, loaded or set up lazily is so before the
first request.

Nobody owns the block that they write: every position of it is written again before it is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import torch

from configs.schema import EngineConfig
from engine_actor import ops
from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import DecodeSlot, PrefillChunk
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.layer_ops import CUDA_ATTENTION
from engine_actor.model.runner import ModelRunner
from engine_actor.model.sampler import Sampler, SampleRow
from engine_actor.work.inputs import build_decode, build_prefill

LOGGER = logging.getLogger(__name__)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Between two of these the linears of a GPU choose the kernel of one of them, as far as we saw."""
KEY = ("", 0)
SAMPLED = (
    SamplingParams(temperature=0.0),
    SamplingParams(top_p=0.9, seed=0),
    SamplingParams(top_k=2, repetition_penalty=1.1, logprobs=1, seed=0),
)
"""Every way that a row may take."""


def warm_up(runner: ModelRunner, config: EngineConfig, sampler: Sampler) -> None:
    """Run prompts of every size that gets a kernel of its own, decodes, and every kind of sampling;
    capture the graphs of short contexts. On a CPU one prompt and one decode are all.
    """
    begun, compiled = time.perf_counter(), len(ops.COMPILED_SECONDS)
    for inputs in _batches(runner, config):
        embedded = runner.embed(inputs)
        _load_attention(runner, embedded.dtype)
        hidden = runner.run_layers(embedded, inputs, 0, runner.n_layers)
        logits = runner.logits(hidden, inputs.logit_rows)
        sampler.sample(logits[:1], _rows(1))
    runner.warm_decode()
    runner.warm_prefill()
    if runner.device.type == "cuda":
        rows = max(len(SAMPLED), config.max_num_seqs)
        sampler.sample(torch.zeros(rows, runner.vocab_size, device=runner.device), _rows(rows))
    LOGGER.info(
        "warm-up: %.1f s, %d kernels compiled",
        time.perf_counter() - begun,
        len(ops.COMPILED_SECONDS) - compiled,
    )


def _batches(runner: ModelRunner, config: EngineConfig) -> Iterator[BatchInputs]:
    """Chunks of one block, as many as make the rows; then a decode."""
    block_tokens = config.kv.block_tokens
    most = min(block_tokens, config.chunk_tokens)
    for total in _sizes(config) if runner.device.type == "cuda" else [most]:
        yield build_prefill(_chunks(total, most), block_tokens, runner.device)
    yield build_decode([DecodeSlot(KEY, 0, 0, (0,), 0)], block_tokens, runner.device)


def _chunks(total: int, most: int) -> list[PrefillChunk]:
    """`total` rows, at most `most` a chunk."""
    sizes = [most] * (total // most) + ([total % most] if total % most else [])
    return [
        PrefillChunk(KEY, 0, size, (0,) * size, (0,), samples=index == len(sizes) - 1)
        for index, size in enumerate(sizes)
    ]


def _sizes(config: EngineConfig) -> list[int]:
    """Rows of a forward, the largest first: what it takes is taken in one piece."""
    most = max(config.chunk_tokens, config.max_num_seqs)
    return sorted({most, *(rows for rows in ROWS if rows < most)}, reverse=True)


def _rows(count: int) -> list[SampleRow]:
    """The first is greedy, the others are of all kinds."""
    kinds = [SAMPLED[index % len(SAMPLED)] for index in range(count)]
    return [SampleRow(KEY, params, (0,), (0,), 1) for params in kinds]


def _load_attention(runner: ModelRunner, dtype: torch.dtype) -> None:
    """Which of its kernels a step takes depends on its lengths. dtype: of the activations."""
    if runner.op_set.attention is CUDA_ATTENTION:
        bits = 8 if runner.kv.dtype == torch.int8 else 16
        head_dim, block_tokens = runner.config.head_dim, runner.kv.block_tokens
        CUDA_ATTENTION.load(head_dim, bits, dtype, block_tokens)
        ops.load_decode_heads(head_dim, bits, dtype, block_tokens, runner.config.qk_norm)
