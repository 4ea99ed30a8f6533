"""A checkpoint folder, packed or not, as the fp32 transformers model it stands for: the oracle.

Dequantises with the tests' own code, so that our kernels and the oracle share nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.formats.base import Weight
from engine_actor.load.names import LinearSlot, hub_name, slots
from kernels.pack.packed_linear import PackedLinear
from tests.load.oracle import dequantise


def hub_model(folder: Path) -> transformers.PreTrainedModel:
    """The same weights in transformers' own implementation of the family, fp32, eager attention."""
    opened = open_checkpoint(folder)
    weights = dict(opened.weights())
    state: dict[str, torch.Tensor] = {}
    for slot in slots(opened.config):
        if not isinstance(slot, LinearSlot):
            state[hub_name(slot.name) + ".weight"] = _matrix(weights[slot.name]).float()
        elif slot.name in weights:
            state |= _split(slot, weights[slot.name])
        else:
            for part in slot.parts:
                alone = LinearSlot(part.name, (part,), slot.in_features, slot.bias)
                state |= _split(alone, weights[part.name])
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("quantization_config", None)
    config = transformers.AutoConfig.for_model(**raw)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if opened.config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    # The buffers of the rotary embedding were made on meta too and are not in a state dict.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _matrix(weight: Weight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight
    if isinstance(weight, PackedLinear):
        return torch.from_numpy(dequantise(weight))
    return weight.weight


def _split(slot: LinearSlot, weight: Weight) -> dict[str, torch.Tensor]:
    rows = [part.rows for part in slot.parts]
    names = [hub_name(part.name) for part in slot.parts]
    matrices = _matrix(weight).float().split(rows)
    state = {f"{n}.weight": m for n, m in zip(names, matrices, strict=True)}
    bias = None if isinstance(weight, torch.Tensor) else weight.bias
    if bias is not None:
        state |= {f"{n}.bias": b for n, b in zip(names, bias.float().split(rows), strict=True)}
    return state
