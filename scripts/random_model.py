"""Models of a given shape with random weights, made in memory on the device, and engines of them.

What a step costs depends on shapes and bits, not on the weights' values: a bench needs no files.
The engine is built as the server builds it, with every setting of `engine:`. Scales keep
activations near one and logits at a deviation of 8 (tied: 3), so that nothing overflows half
precision and the two best tokens rarely come close. Not for texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.schema import AppArgs
from engine_actor.build import choose_device, engine_around
from engine_actor.engine import Engine
from engine_actor.load.checkpoint import Checkpoint, Quantisation
from engine_actor.load.formats.base import Entry, Read, Weight
from engine_actor.load.names import LinearSlot, Slot, VectorSlot, slots
from engine_actor.model.config import ModelConfig
from engine_actor.ops import PackedLinear

LOGIT_DEVIATION, TIED_DEVIATION = 8.0, 3.0
"""Of a tied head less: beside a residual that still holds the last token's row, that token would
win every step.
"""
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "float16",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """`config` as in a config.json. `bits` of every linear of the layers but those that `leaf_bits`
    names (by the last part of their canonical name); `group` columns share a scale. Embedding and
    head (`embed`, `head`) are in 8 bits where not named. 8 bits have one scale a row.
    """

    name: str
    config: dict[str, Any]
    bits: int = 4
    leaf_bits: Mapping[str, int] = field(default_factory=dict)
    group: int = 128


_TINY = {
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}
_3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", _QWEN2 | _TINY, group=32),
        Shape("3b", _QWEN2 | _3B),
        Shape("3b-w3", _QWEN2 | _3B, bits=3),
        Shape("7b", _QWEN2 | _7B),
        Shape("7b-mixed", _QWEN2 | _7B, leaf_bits={"gate_up": 3, "down": 3}),
        Shape("7b-4gib", _QWEN2 | _7B, leaf_bits={"gate_up": 3, "down": 3, "embed": 4}),
    )
}
"""Qwen2.5's shapes. `7b-mixed`: the MLP in W3, the rest in W4; `7b-4gib` the same with a W4
embedding, without which it leaves a card of 4 GiB no room for a cache. `tiny` is for tests."""


class RandomCheckpoint(Checkpoint):
    """A checkpoint whose weights are drawn when they are asked for, nowhere stored."""

    __slots__ = ()

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """(canonical name, weight), already on the device."""
        for entry in self.entries:
            weight = entry.load(_reads_nothing)
            assert not isinstance(weight, dict)
            yield entry.name, weight


def random_engine(
    shape: str | Shape,
    engine: Mapping[str, Any] | None = None,
    *,
    max_model_len: int | None = None,
    seed: int = 0,
) -> Engine:
    """An engine of random weights, stepped by its caller. `engine`: settings of `engine:`, a
    setting that is None stays at its default. Raises CheckpointError where it does not fit.
    """
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    given = {name: value for name, value in (engine or {}).items() if value is not None}
    source = {"path": shape.name, "served_name": shape.name, "max_model_len": max_model_len}
    args = AppArgs.model_validate({"model": source, "engine": given})
    return engine_around(args, random_checkpoint(shape, choose_device(args.engine.device), seed))


def random_checkpoint(shape: Shape, device: torch.device, seed: int = 0) -> RandomCheckpoint:
    """The same seed gives the same weights on the same kind of device."""
    config = ModelConfig.from_hf(shape.config, None)
    draw = torch.Generator(device).manual_seed(seed)
    entries = tuple(_entry(slot, shape, draw) for slot in slots(config))
    packed = [(entry.bits, entry.group) for entry in entries if entry.bits]
    counts = {kind: packed.count(kind) for kind in packed}
    return RandomCheckpoint(
        folder=Path(shape.name),
        config=config,
        quantisation=Quantisation("random", tuple((*kind, n) for kind, n in counts.items())),
        nbytes=sum(entry.nbytes for entry in entries),
        fingerprint=f"random {shape.name} {seed}",
        source=_NoFile(),
        entries=entries,
    )


class _NoFile:
    """There is nothing to read."""

    digest = ""

    def reading(self) -> Any:
        raise NotImplementedError("random weights are read from nowhere")


def _reads_nothing(name: str) -> torch.Tensor:
    raise NotImplementedError(f"{name} is read from nowhere")


def _entry(slot: Slot, shape: Shape, draw: torch.Generator) -> Entry:
    if isinstance(slot, VectorSlot):
        return Entry(slot.name, (), 4 * slot.size, partial(_norm, slot, draw))
    leaf = slot.name.rpartition(".")[2]
    bits = shape.leaf_bits.get(leaf, 8 if leaf in ("embed", "head") else shape.bits)
    group = -1 if bits == 8 else shape.group
    groups = 1 if group == -1 else -(-slot.in_features // group)
    nbytes = slot.rows * (-(-slot.in_features * bits // 8) + 2 * groups + 4 * slot.bias)
    std = deviation(leaf, shape.config["tie_word_embeddings"]) / math.sqrt(slot.in_features)
    load = partial(_packed, slot, bits, group, std, draw)
    return Entry(slot.name, (), nbytes, load, bits, group)


def deviation(leaf: str, tied: bool) -> float:
    """Of a linear's outputs where its inputs deviate by one. What layers add to the residual is
    halved, and with it the rounding errors of half precision in the logits.
    """
    if leaf in ("embed", "head"):
        return TIED_DEVIATION if tied else LOGIT_DEVIATION
    return 0.5 if leaf in ("o", "down") else 1.0


def _norm(slot: VectorSlot, draw: torch.Generator, read: Read) -> torch.Tensor:
    return 1 + 0.1 * torch.randn(slot.size, generator=draw, device=draw.device)


def _packed(
    slot: LinearSlot, bits: int, group: int, std: float, draw: torch.Generator, read: Read
) -> PackedLinear:
    """Random codes, scales of both signs: any bytes are valid codes, so nothing is packed."""
    rows, columns, device = slot.rows, slot.in_features, draw.device
    if columns * bits % 8:
        raise ValueError(f"{columns} codes of {bits} bits do not fill whole bytes")
    groups = 1 if group == -1 else -(-columns // group)
    shape = (rows, columns * bits // 8)
    codes = torch.randint(0, 256, shape, generator=draw, device=device, dtype=torch.uint8)
    spread = std / (2**bits / math.sqrt(12))  # uniform codes deviate by range / sqrt(12)
    sizes = spread * (0.5 + torch.rand(rows, groups, generator=draw, device=device))
    signs = torch.randint(0, 2, (rows, groups), generator=draw, device=device) * 2 - 1
    bias = torch.randn(rows, generator=draw, device=device) * 0.5 if slot.bias else None
    scales = (sizes * signs).to(torch.float16)
    return PackedLinear(bits, group, columns, codes, scales, bias=bias)


def shortened(shape: Shape, n_layers: int) -> Shape:
    """The same widths with fewer layers, for a quick check on a device."""
    return replace(
        shape,
        name=f"{shape.name}-{n_layers}-layers",
        config={**shape.config, "num_hidden_layers": n_layers},
    )
