"""A rounded layer as the named tensors of the journal, and back: `qkv.scales`, ..., norms by name.

Knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine_actor.model.config import ModelConfig
from engine_actor.ops import PackedLinear
from engine_actor.quant.stream import LINEARS

FIELDS = ("qweight", "scales", "offsets", "zeros", "bias")


def stored_tensors(
    packed: Mapping[str, PackedLinear], norms: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """On the CPU."""
    tensors = {name: norm.cpu() for name, norm in norms.items()}
    for short, linear in packed.items():
        for name in FIELDS:
            tensor = getattr(linear, name)
            if tensor is not None:
                tensors[f"{short}.{name}"] = tensor
    return tensors


def packed_linears(
    tensors: Mapping[str, torch.Tensor], grids: Mapping[str, list[int]], config: ModelConfig
) -> dict[str, PackedLinear]:
    """By short name. grids: (bits, group) likewise."""
    linears = {}
    for short in LINEARS:
        bits, group = grids[short]
        linears[short] = _packed(tensors, short, bits, group, _width(config, short))
    return linears


def _packed(
    tensors: Mapping[str, torch.Tensor], short: str, bits: int, group: int, columns: int
) -> PackedLinear:
    fields = {name: tensors.get(f"{short}.{name}") for name in FIELDS}
    qweight, scales = fields.pop("qweight"), fields.pop("scales")
    assert qweight is not None
    assert scales is not None
    return PackedLinear(bits, group, columns, qweight, scales, **fields)


def _width(config: ModelConfig, short: str) -> int:
    """K of a linear."""
    if short == "o":
        return config.n_heads * config.head_dim
    return config.intermediate if short == "down" else config.hidden
