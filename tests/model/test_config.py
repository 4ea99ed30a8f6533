"""config.json: what is honoured, what is refused and by which name."""

from __future__ import annotations

import pytest
import transformers

from engine_actor.errors import CheckpointError
from engine_actor.model.config import ModelConfig
from engine_actor.model.rope_config import RopeScaling

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}
NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def read(**changes: object) -> ModelConfig:
    """BASE with changes; a None removes the key."""
    return ModelConfig.from_hf({**BASE, **changes}, None)


def test_defaults_of_a_bare_config() -> None:
    """What an old config.json leaves out."""
    config = read()
    assert config == ModelConfig(
        family="llama",
        n_layers=2,
        hidden=64,
        n_heads=4,
        n_kv_heads=4,
        head_dim=16,
        intermediate=128,
        vocab_size=100,
        rms_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        max_model_len=256,
        eos_token_ids=(),
        sliding_window=None,
        dtype="float32",
    )


@pytest.mark.parametrize("family", NAMES)
def test_what_transformers_writes_is_read(family: str) -> None:
    """Every key of its own config of the family is known to us."""
    theirs = getattr(transformers, f"{NAMES[family]}Config")(num_hidden_layers=2)
    raw = {**theirs.to_dict(), "architectures": [f"{NAMES[family]}ForCausalLM"]}
    config = ModelConfig.from_hf(raw, None)
    assert config.family == family
    assert config.hidden == theirs.hidden_size
    assert config.qkv_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")
    assert config.sliding_window == (4096 if family == "mistral" else None)


def test_head_dim_may_be_null_or_its_own() -> None:
    """Qwen2 leaves it null; Qwen3 has another than hidden / heads."""
    assert read(head_dim=None).head_dim == 16
    assert read(head_dim=32).head_dim == 32


def test_both_forms_of_rope() -> None:
    """Before and since transformers 5."""
    old = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    new = read(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5})
    assert (old.rope_theta, old.rope_scaling) == (5e5, RopeScaling("linear", 4.0))
    assert old == new
    assert read(rope_theta=1e6, rope_scaling=None).rope_theta == 1e6


def test_every_eos_id_of_both_files() -> None:
    """generation_config.json often names a second one; order is theirs, then config.json's."""
    config = ModelConfig.from_hf({**BASE, "eos_token_id": 2}, {"eos_token_id": [7, 2, 9]})
    assert config.eos_token_ids == (7, 2, 9)
    assert ModelConfig.from_hf({**BASE, "eos_token_id": [3, 4]}, None).eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps must be in \(0, 1\), got 0"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; it must be 'silu'"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"num_local_experts": 8}, "num_local_experts = 8 is not known to this engine"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not known"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"torch_dtype": "int8"}, "torch_dtype must be one of"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be ids, got '</s>'"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic' is not supported",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing for type 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be a positive number"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_parameters.original_max_position_embeddings is missing",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}},
            "rope_scaling.mscale is not supported with type 'linear'",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
            "use_sliding_window = True is not supported",
        ),
    ],
)
def test_refusals_name_the_key(changes: dict[str, object], message: str) -> None:
    """One line, before any weight is read."""
    with pytest.raises(CheckpointError, match=message) as refused:
        read(**changes)
    assert "\n" not in str(refused.value)


def test_a_key_that_is_switched_off_asks_for_nothing() -> None:
    """Unknown but null, false or empty: as if it were not there."""
    assert read(future_trick=False, other=None, more=[], _name_or_path="x") == read()
