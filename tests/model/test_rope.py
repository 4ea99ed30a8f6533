"""Rotary frequencies and tables equal transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine_actor.model.config import ModelConfig
from engine_actor.model.layers.rope import Rotary

KINDS = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 5e5,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 1e6,
    },
    "yarn, all set": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
        "truncate": False,
        "rope_theta": 1e4,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_transformers(kind: str) -> None:
    """cos and sin of every position, the sign of the first half aside."""
    theirs = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters=dict(KINDS[kind]),
    )
    raw = {**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]}
    rotary = Rotary(ModelConfig.from_hf(raw, None), torch.device("cpu"))
    rotary.reach(4096)
    positions = torch.tensor([0, 1, 17, 511, 512, 2047, 4095])
    cos, sin = rotary.at(positions, torch.float32)
    want_cos, want_sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2
    torch.testing.assert_close(cos[:, 0], want_cos[0], rtol=0, atol=2e-3)
    torch.testing.assert_close(cos[:5, 0], want_cos[0, :5], rtol=0, atol=1e-4)
    torch.testing.assert_close(sin[:5, 0, half:], want_sin[0, :5, half:], rtol=0, atol=1e-4)
    assert torch.equal(sin[..., :half], -sin[..., half:])


def test_tables_grow_without_changing() -> None:
    """What was looked up before stays the same when longer prompts come."""
    raw = {**LlamaConfig(num_hidden_layers=1).to_dict(), "architectures": ["LlamaForCausalLM"]}
    rotary = Rotary(ModelConfig.from_hf(raw, None), torch.device("cpu"))
    rotary.reach(5)
    before = rotary.at(torch.arange(5), torch.float32)
    rotary.reach(2000)
    for old, new in zip(before, rotary.at(torch.arange(5), torch.float32), strict=True):
        assert torch.equal(old, new)
