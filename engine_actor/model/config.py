"""ModelConfig: what a config.json means to us, typed, or a refusal that names the key.

Reads the file's dict itself, so that the engine neither pays for nor breaks on modelling imports.
Knows no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_actor.errors import CheckpointError
from engine_actor.model.registry import FAMILIES, family_of
from engine_actor.model.rope_config import RopeScaling, read_rope

DTYPES = ("float32", "float16", "bfloat16")
_HONOURED = frozenset(
    {
        "architectures",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        "attention_dropout",  # training only, as are the next two
        "hidden_dropout",
        "initializer_range",
        "bad_words_ids",  # defaults of generation that generation_config.json repeats
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "finetuning_task",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_length",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "prefix",
        "problem_type",
        "quantization_config",  # the checkpoint reader's business
        "return_dict",
        "task_specific_params",
        "tokenizer_class",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model.

    hidden, head_dim, intermediate: widths. vocab_size: rows of the embedding that the model defines
    (a checkpoint may store more). rms_eps: added to the mean square. max_model_len: positions.
    eos_token_ids: every id that ends a text. sliding_window: keys a row sees, itself included; None
    for all. dtype: of the published weights, one of DTYPES.
    """

    family: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None
    dtype: str

    @classmethod
    def from_hf(cls, config: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
        """From the dicts of config.json and, if there is one, generation_config.json.

        Raises CheckpointError naming the key that is missing, of the wrong kind, or not honoured.
        """
        family_name = _family(config)
        family = family_of(family_name)
        _require_honoured(config, family.KEYS, {**_NEUTRAL, **family.NEUTRAL})
        traits = family.traits(config)
        heads = _integer(config, "num_attention_heads")
        hidden = _integer(config, "hidden_size")
        kv_heads = _integer(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {heads} is not a multiple of"
                f" num_key_value_heads {kv_heads}"
            )
        theta, scaling = read_rope(config)
        return cls(
            family=family_name,
            n_layers=_integer(config, "num_hidden_layers"),
            hidden=hidden,
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=_head_dim(config, hidden, heads),
            intermediate=_integer(config, "intermediate_size"),
            vocab_size=_integer(config, "vocab_size"),
            rms_eps=_epsilon(config),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=_flag(config, "tie_word_embeddings", False),
            qkv_bias=traits.qkv_bias,
            qk_norm=traits.qk_norm,
            max_model_len=_integer(config, "max_position_embeddings"),
            eos_token_ids=_eos(config, generation),
            sliding_window=traits.sliding_window,
            dtype=_dtype(config),
        )


def _family(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError("config.json: architectures is missing")
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    raise CheckpointError(
        f"config.json: architectures {names!r} is not supported; there are {sorted(FAMILIES)}"
    )


def _require_honoured(
    config: dict[str, Any], family_keys: frozenset[str], neutral: dict[str, tuple[Any, ...]]
) -> None:
    for key, values in neutral.items():
        value = config.get(key)
        if value is not None and value not in values:
            raise CheckpointError(
                f"config.json: {key} = {value!r} is not supported; it must be {values[0]!r}"
            )
    known = _HONOURED | _WITHOUT_EFFECT | family_keys | neutral.keys()
    for key, value in config.items():
        # An unknown key that is switched off (null, false, empty) asks for nothing.
        if key not in known and not key.startswith("_") and value not in (None, False, [], {}, ""):
            raise CheckpointError(f"config.json: {key} = {value!r} is not known to this engine")
    # Windows that only some layers have are not built; transformers writes the list out anyway.
    layers = config.get("layer_types") or []
    if not isinstance(layers, list):
        raise CheckpointError(f"config.json: layer_types must be a list, got {layers!r}")
    kinds = {str(kind) for kind in layers} - {"full_attention"}
    if kinds:
        raise CheckpointError(f"config.json: layer_types with {sorted(kinds)} is not supported")


def _integer(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            raise CheckpointError(f"config.json: {key} is missing")
        return default
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _flag(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, got {value!r}")
    return value


def _head_dim(config: dict[str, Any], hidden: int, heads: int) -> int:
    if config.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"config.json: head_dim is missing and hidden_size {hidden} is not a multiple of"
            f" num_attention_heads {heads}"
        )
    head_dim = _integer(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim must be even, got {head_dim}")
    return head_dim


def _epsilon(config: dict[str, Any]) -> float:
    value = config.get("rms_norm_eps")
    if value is None:
        raise CheckpointError("config.json: rms_norm_eps is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise CheckpointError(f"config.json: rms_norm_eps must be in (0, 1), got {value!r}")
    return float(value)


def _eos(config: dict[str, Any], generation: dict[str, Any] | None) -> tuple[int, ...]:
    """Every id either file names: a chat model often ends by a second one that only
    generation_config.json lists.
    """
    found: list[int] = []
    for name, section in (("generation_config.json", generation), ("config.json", config)):
        value = (section or {}).get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if type(token) is not int or token < 0:
                raise CheckpointError(f"{name}: eos_token_id must be ids, got {value!r}")
            if token not in found:
                found.append(token)
    return tuple(found)


def _dtype(config: dict[str, Any]) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"config.json: torch_dtype must be one of {DTYPES}, got {value!r}")
    return name
