"""Whole engines on the CUDA layer kernels: the CPU tokens, families, chunks beside decodes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_actor.core.plan import PrefillChunk
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import write_tiny
from engine_actor.model.layer_ops import CUDA_ATTENTION, LayerShape, explain_layer
from engine_actor.model.runner import build_runner
from engine_actor.work.inputs import build_prefill
from tests.engine.real_engine import BLOCK, Loaded, load, texts

pytestmark = pytest.mark.gpu

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2", "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3, norms of heads": {"family": "qwen3"},
    "mistral, sliding window": {"family": "mistral", "sliding_window": 24},
    "packed": {"family": "llama", "packed": True, "head_dim": 128},
    "packed, bf16": {"family": "llama", "packed": True, "head_dim": 128, "dtype": "bfloat16"},
}


def loaded(folder: Path, device: str, numerics: str, **model: Any) -> Loaded:
    settings = {"head_dim": 64, "dtype": "float16", "hidden_size": 128, "seed": 3} | model
    return load(write_tiny(folder, **settings), numerics, device)


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, 270) for _ in range(draw.randint(1, 70))] for _ in range(count)]


def shortfall(cpu: Loaded, prompt: Sequence[int], text: Sequence[int]) -> float:
    """How far below the reference's best logit the text's tokens lie at most, each after what came
    before it in the text itself: a tie decided the other way does not count for what follows.
    """
    blocks = tuple(range(-(-(len(prompt) + len(text)) // BLOCK)))
    cpu.runner.resize_kv(len(blocks))
    tokens = (*prompt, *text[:-1])
    chunk = PrefillChunk(("c", 0), 0, len(tokens), tokens, blocks, True)
    inputs = build_prefill([chunk], BLOCK, cpu.runner.device)
    hidden = cpu.runner.run_layers(cpu.runner.embed(inputs), inputs, 0, cpu.runner.n_layers)
    rows = torch.arange(len(prompt) - 1, len(tokens))
    logits = cpu.runner.logits(hidden, rows)
    chosen = logits.gather(1, torch.tensor(text).unsqueeze(1))
    return float((logits.amax(1, keepdim=True) - chosen).max())


@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_give_the_cpus_tokens(tmp_path: Path, name: str) -> None:
    """Greedy, a crowd whose prompts come in chunks beside decodes, and each row alone. Logits have
    a deviation of 8; half precision moves them by some hundredths.
    """
    gpu = loaded(tmp_path, "cuda", "fast", **MODELS[name])
    assert gpu.runner.op_set.attention is CUDA_ATTENTION
    cpu = loaded(tmp_path, "cpu", "exact", **MODELS[name])
    crowd = prompts(9)
    together = texts(gpu.engine(prefill_chunk_tokens=16), crowd, 20)
    alone = [texts(gpu.engine(), [prompt], 20)[0] for prompt in crowd[:3]]
    for prompt, text in zip([*crowd, *crowd[:3]], [*together, *alone], strict=True):
        assert shortfall(cpu, prompt, text) < 0.2


def test_an_int8_cache(tmp_path: Path) -> None:
    """Half the bytes, tokens close to the reference's best; it grows and keeps what it holds."""
    cpu = loaded(tmp_path, "cpu", "exact")
    opened = open_checkpoint(tmp_path)
    runner = build_runner(
        opened.config,
        opened.weights(),
        device="cuda",
        kv_dtype="int8",
        block_tokens=BLOCK,
        used_vocab=cpu.runner.vocab_size,
    )
    runner.resize_kv(3)
    assert runner.kv.layers[0].nbytes == 3 * BLOCK * 2 * 2 * (64 + 2)
    gpu = dataclasses.replace(cpu, runner=runner)
    crowd = prompts(9)
    for prompt, text in zip(crowd, texts(gpu.engine(), crowd, 20), strict=True):
        assert shortfall(cpu, prompt, text) < 0.6


def test_a_model_without_kernels_takes_the_general_ops(tmp_path: Path) -> None:
    """fp32 and heads of 16: the reasons are told."""
    other = loaded(tmp_path, "cuda", "fast", head_dim=16, dtype="float32")
    assert other.runner.op_set.attention is not CUDA_ATTENTION
    shape = LayerShape(other.runner.device, other.runner.kv.dtype, 16, 16)
    assert [verdict.refusal for verdict in explain_layer(shape)] == [
        None,
        "computes in half precision, not float32",
        "holds half precision, not float32",
        "holds half precision, not float32",
    ]
    assert len(texts(other.engine(), prompts(3), 4)) == 3
