"""Tiny random checkpoints of every family, their canonical weights, and batches over paged KV.

transformers is the oracle; nothing of the engine's loader is used, so that both cannot be wrong
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers

from engine_actor import ops
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.config import ModelConfig
from engine_actor.model.runner import ModelRunner, build_runner

BLOCK = 4
COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def oracle(family: str, seed: int = 0, **changes: object) -> transformers.PreTrainedModel:
    """A random fp32 model whose logits have clear gaps."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **options, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.2))
            if parameter.ndim == 1:
                parameter += 1.0
    return model


def hf_dict(model: transformers.PreTrainedModel) -> dict[str, object]:
    """config.json as transformers would save it."""
    return {
        **model.config.to_diff_dict(),
        **model.config.to_dict(),
        "architectures": [type(model).__name__],
    }


def canonical(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor | ops.DenseLinear]:
    """The weights by our names, q|k|v and gate|up fused."""
    state = model.state_dict()
    weights: dict[str, torch.Tensor | ops.DenseLinear] = {
        "embed": state["model.embed_tokens.weight"],
        "norm": state["model.norm.weight"],
    }
    if not model.config.tie_word_embeddings:
        weights["head"] = ops.DenseLinear(state["lm_head.weight"])

    def fused(prefix: str, *names: str) -> ops.DenseLinear:
        rows = [state[f"{prefix}.{name}.weight"] for name in names]
        biases = [state.get(f"{prefix}.{name}.bias") for name in names]
        bias = None if biases[0] is None else torch.cat(biases)
        return ops.DenseLinear(torch.cat(rows), bias)

    for i in range(model.config.num_hidden_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        weights[f"{ours}.attn_norm"] = state[f"{theirs}.input_layernorm.weight"]
        weights[f"{ours}.mlp_norm"] = state[f"{theirs}.post_attention_layernorm.weight"]
        weights[f"{ours}.qkv"] = fused(f"{theirs}.self_attn", "q_proj", "k_proj", "v_proj")
        weights[f"{ours}.o"] = fused(f"{theirs}.self_attn", "o_proj")
        weights[f"{ours}.gate_up"] = fused(f"{theirs}.mlp", "gate_proj", "up_proj")
        weights[f"{ours}.down"] = fused(f"{theirs}.mlp", "down_proj")
        for norm in ("q_norm", "k_norm"):
            if f"{theirs}.self_attn.{norm}.weight" in state:
                weights[f"{ours}.{norm}"] = state[f"{theirs}.self_attn.{norm}.weight"]
    return weights


def runner_for(model: transformers.PreTrainedModel, numerics: str, blocks: int = 64) -> ModelRunner:
    """Our runner over the oracle's weights."""
    config = ModelConfig.from_hf(hf_dict(model), None)
    runner = build_runner(config, canonical(model), numerics=numerics, block_tokens=BLOCK)
    runner.resize_kv(blocks)
    return runner


@dataclass(frozen=True)
class Part:
    """Positions start..start+len(ids)-1 of a sequence that lives in `blocks`."""

    ids: Sequence[int]
    start: int
    blocks: Sequence[int]


def batch(parts: Sequence[Part], block: int = BLOCK) -> BatchInputs:
    """One forward over several sequences' parts."""
    ids = [i for part in parts for i in part.ids]
    places = [(part, part.start + i) for part in parts for i in range(len(part.ids))]
    ends = torch.tensor([len(part.ids) for part in parts]).cumsum(0) - 1
    widest = max(len(part.blocks) for part in parts)
    tables = [list(part.blocks) + [0] * (widest - len(part.blocks)) for part in parts]
    return BatchInputs(
        ids=torch.tensor(ids),
        positions=torch.tensor([p for _, p in places]),
        slots=torch.tensor([part.blocks[p // block] * block + p % block for part, p in places]),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        logit_rows=ends,
        q_lens=tuple(len(part.ids) for part in parts),
        kv_lens=tuple(part.start + len(part.ids) for part in parts),
        block_lists=tuple(tuple(part.blocks) for part in parts),
        block_tokens=block,
    )


def forward(
    runner: ModelRunner, inputs: BatchInputs, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits [R, vocab] of one whole forward; default: the last row of each sequence."""
    hidden = runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)
    return runner.logits(hidden, inputs.logit_rows if rows is None else rows)
