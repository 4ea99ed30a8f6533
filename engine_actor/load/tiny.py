"""Random two-layer checkpoints of each family with a byte-level tokenizer. For tests only.

A random model is a fair double where equality is tested: its head is wide enough that the best
two logits rarely come close. Nothing in the product imports this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_actor.load.formats.base import Weight
from engine_actor.load.names import LinearSlot, VectorSlot, hub_name, slots
from engine_actor.load.shards import INDEX, SINGLE
from engine_actor.load.writer import write_json, write_packed
from engine_actor.model.config import ModelConfig
from engine_actor.ops import PackedLinear

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
VOCAB = 304
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = "Ġ t,h e,Ġt he,i n,Ġ a,e r,o n,r e,n d,Ġa nd,Ġ s,o u,i s,e n,l l,a t"
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def tiny_config(family: str = "llama", vocab: int = VOCAB, **overrides: Any) -> dict[str, Any]:
    """A Hugging Face config.json of two layers, hidden 64, 4 heads over 2 KV heads."""
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "dtype": "float32",
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return {**config, **overrides}


def write_tiny(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    vocab: int = VOCAB,
    packed: bool = False,
    bits: int = 4,
    group: int = 32,
    kind: str = "symmetric",
    head_std: float = 1.0,
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write a checkpoint into `folder` (made where missing) and return it.

    packed: our format, linears of `bits` (4 or 3) in `group`s, `kind` symmetric, offsets or zeros,
    embedding and head of 8 bits; else dense in the config's dtype over `shards` files. `head_std`
    is the head's standard deviation (1.0: logits of deviation 8, a median gap of about 2).
    `overrides` go into config.json. `vocab` may exceed the tokenizer's 275 ids: padding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = tiny_config(family, vocab, **overrides)
    config = ModelConfig.from_hf(raw, None)
    draw = torch.Generator().manual_seed(seed)
    if packed:
        weights = _packed_weights(config, draw, bits, group, kind, head_std)
        write_packed(folder, raw, weights, {"format": "random", "seed": seed})
    else:
        tensors = _dense_tensors(config, draw, head_std, _DTYPES[raw["dtype"]])
        _save_dense(folder, tensors, shards)
        write_json(folder / "config.json", raw)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0]})
    write_byte_tokenizer(folder)
    return folder


def _std(slot: LinearSlot, head_std: float) -> float:
    """Keeps activations near one. A tied head is the embedding itself. What layers add to the
    residual is halved, and with it the rounding errors of half precision in the logits.
    """
    if slot.name in ("embed", "head"):
        return head_std
    gain = 0.5 if slot.name.endswith((".o", ".down")) else 1.0
    return gain / math.sqrt(slot.in_features)


def _dense_tensors(
    config: ModelConfig, draw: torch.Generator, head_std: float, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for slot in slots(config):
        if isinstance(slot, VectorSlot):
            tensors[hub_name(slot.name) + ".weight"] = 1 + 0.1 * torch.randn(
                slot.size, generator=draw
            )
            continue
        for part in slot.parts:
            weight = torch.randn(part.rows, slot.in_features, generator=draw)
            tensors[hub_name(part.name) + ".weight"] = weight * _std(slot, head_std)
            if slot.bias:
                tensors[hub_name(part.name) + ".bias"] = torch.randn(part.rows, generator=draw)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _save_dense(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        names = list(tensors)[number::shards]
        save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})


def _packed_weights(
    config: ModelConfig, draw: torch.Generator, bits: int, group: int, kind: str, head_std: float
) -> Iterator[tuple[str, Weight]]:
    for slot in slots(config):
        if isinstance(slot, VectorSlot):
            yield slot.name, 1 + 0.1 * torch.randn(slot.size, generator=draw)
        elif slot.name in ("embed", "head"):
            yield slot.name, random_packed(slot, draw, 8, 32, "symmetric", head_std)
        else:
            yield slot.name, random_packed(slot, draw, bits, group, kind, _std(slot, head_std))


def random_packed(
    slot: LinearSlot, draw: torch.Generator, bits: int, group: int, kind: str, std: float
) -> PackedLinear:
    """Random codes, scales of both signs. Any bytes are valid codes, so nothing is packed here."""
    rows, columns = slot.rows, slot.in_features
    if columns * bits % 8:
        raise ValueError(f"{columns} codes of {bits} bits do not fill whole bytes")
    groups = 1 if group == -1 else -(-columns // group)
    codes = torch.randint(0, 256, (rows, columns * bits // 8), generator=draw, dtype=torch.uint8)
    spread = std / (2**bits / math.sqrt(12))  # uniform codes deviate by range / sqrt(12)
    scales = spread * (0.5 + torch.rand(rows, groups, generator=draw))
    signs = torch.randint(0, 2, (rows, groups), generator=draw) * 2 - 1
    offsets = zeros = None
    if kind == "offsets":
        offsets = (std * 0.2 * torch.randn(rows, groups, generator=draw)).to(torch.float16)
    elif kind == "zeros":
        zeros = torch.randint(-2, 3, (rows, groups), generator=draw, dtype=torch.int8)
    bias = torch.randn(rows, generator=draw) if slot.bias else None
    return PackedLinear(
        bits, group, columns, codes, (scales * signs).to(torch.float16), offsets, zeros, bias
    )


def write_byte_tokenizer(folder: Path) -> None:
    """Three specials, 256 bytes, 16 merges: 275 ids. Every text has tokens, most are one byte."""
    merges = [(left, right) for left, right in (pair.split(" ") for pair in _MERGES.split(","))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *alphabet, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[1],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
