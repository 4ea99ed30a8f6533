"""compressed-tensors repositories of format `pack-quantized`: 3, 4 or 8 bits, symmetric or not.

A linear x of [N, K] in G groups: x.weight_packed i32, rows of unsigned codes q + 2^(bits-1) along
K; x.weight_scale [N, G] (or [1]); x.weight_shape [2]; asymmetric ones have x.weight_zero_point,
packed likewise along N (or plain i8[N, G]); x.weight_g_idx i32[K] where columns were reordered.
w = s * (q - z). Older versions (0.9 is one) put 32 // bits codes into a word and let none straddle;
newer ones (0.20) make a row one bit stream. At 3 bits the two differ; the shape tells which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine_actor.load.formats.base import FLOATS, Entry, Read, require_group
from engine_actor.load.formats.imported import Stored, order_of, plan
from engine_actor.load.formats.words import (
    pack_unsigned,
    signed_bytes,
    unpack_padded,
    unpack_stream,
)
from engine_actor.load.refusal import refusal
from engine_actor.load.shards import ShardSet
from engine_actor.model.config import ModelConfig
from engine_actor.ops import PackedLinear

METHOD = "compressed-tensors"
SECTION = "quantization_config"
FORMAT = "pack-quantized"
BITS = (3, 4, 8)
STRATEGIES = ("group", "channel", "tensor")
_Unpack = Callable[[torch.Tensor, int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Scheme:
    """One of config_groups. group -1 is the whole row."""

    bits: int
    group: int
    symmetric: bool
    per_tensor: bool


def plan_compressed(config: ModelConfig, shards: ShardSet, section: dict[str, Any]) -> list[Entry]:
    """Entries of a compressed-tensors checkpoint, from headers. Raises CheckpointError."""
    schemes = list(dict.fromkeys(_schemes(section)))

    def find(name: str, rows: int, columns: int) -> Stored | None:
        if f"{name}.weight_packed" not in shards.tensors:
            return None
        return _stored(name, _choose(name, rows, columns, shards, schemes), rows, columns, shards)

    return plan(config, shards, find)


def _schemes(section: dict[str, Any]) -> Iterator[_Scheme]:
    if section.get("format") != FORMAT:
        raise refusal(
            f"{SECTION}.format", f"{section.get('format')!r} cannot be read (supported: {FORMAT!r})"
        )
    for key in ("kv_cache_scheme", "transform_config"):
        if section.get(key):
            raise refusal(f"{SECTION}.{key}", "cannot be honoured")
    sparsity = section.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise refusal(f"{SECTION}.sparsity_config", "cannot be honoured")
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refusal(f"{SECTION}.config_groups", "is missing or empty")
    for label, group in groups.items():
        yield _scheme(f"{SECTION}.config_groups.{label}", group)


def _scheme(where: str, group: Any) -> _Scheme:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise refusal(where, "says nothing of weights")
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise refusal(f"{where}.{key}", "quantised activations cannot be honoured")
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if weights.get("type", "int") != "int" or type(bits) is not int or bits not in BITS:
        raise refusal(
            f"{where}.weights",
            f"{bits!r} bits of type {weights.get('type')!r} cannot be read (int: 3, 4, 8)",
        )
    if strategy not in STRATEGIES:
        raise refusal(f"{where}.weights.strategy", f"{strategy!r} cannot be read")
    size = weights.get("group_size") if strategy == "group" else -1
    size = require_group(f"{where}.weights.group_size", size)
    return _Scheme(bits, size, weights.get("symmetric", True) is True, strategy == "tensor")


def _choose(
    name: str, rows: int, columns: int, shards: ShardSet, schemes: list[_Scheme]
) -> _Scheme:
    """The scheme the shapes fit. Targets may be regular expressions of a stranger: never run."""
    packed = shards.need(f"{name}.weight_packed")
    scale = shards.need(f"{name}.weight_scale")
    symmetric = f"{name}.weight_zero_point" not in shards.tensors
    fits = [
        scheme
        for scheme in schemes
        if packed.shape in [(rows, width) for width in _widths(columns, scheme.bits)]
        and scale.shape in _scale_shapes(scheme, rows, columns)
        and scheme.symmetric == symmetric
    ]
    if not fits:
        packing = "no zero points" if symmetric else "zero points"
        raise refusal(
            name,
            f"weight_packed {list(packed.shape)}, weight_scale {list(scale.shape)} and {packing} "
            f"fit no scheme of config_groups for a [{rows}, {columns}] matrix",
        )
    return fits[0]


def _widths(count: int, bits: int) -> tuple[int, int]:
    """Words of a row as a bit stream, and with whole codes only."""
    return -(-count * bits // 32), -(-count // (32 // bits))


def _scale_shapes(scheme: _Scheme, rows: int, columns: int) -> list[tuple[int, ...]]:
    if scheme.per_tensor:
        return [(1,), (), (1, 1)]
    return [(rows, 1 if scheme.group == -1 else -(-columns // scheme.group))]


def _unpacker(stored: int, count: int, bits: int) -> _Unpack:
    return unpack_stream if stored == _widths(count, bits)[0] else unpack_padded


def _stored(name: str, scheme: _Scheme, rows: int, columns: int, shards: ShardSet) -> Stored:
    bits, group = scheme.bits, scheme.group
    groups = 1 if group == -1 else -(-columns // group)
    packed = shards.need(f"{name}.weight_packed")
    packed.require(("I32",), packed.shape)
    scale = shards.need(f"{name}.weight_scale")
    scale.require(FLOATS, scale.shape)
    shards.need(f"{name}.weight_shape").require(("I64", "I32"), (2,))
    sources = [f"{name}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape")]
    if not scheme.symmetric:
        sources.append(_checked_zeros(name, scheme, rows, groups, shards))
    if f"{name}.weight_g_idx" in shards.tensors:
        shards.need(f"{name}.weight_g_idx").require(("I32", "I64"), (columns,))
        sources.append(f"{name}.weight_g_idx")
    unpack = _unpacker(packed.shape[1], columns, bits)

    def load(read: Read) -> PackedLinear:
        if (shape := read(f"{name}.weight_shape").tolist()) != [rows, columns]:
            raise refusal(f"{name}.weight_shape", f"is {shape}, must be {[rows, columns]}")
        perm = _perm(name, read, group, groups) if sources[-1].endswith("_g_idx") else None
        words = read(f"{name}.weight_packed")
        if perm is None and unpack is unpack_stream:
            codes = signed_bytes(words, bits, columns)
        else:
            plain = unpack(words, bits, columns)
            codes = pack_unsigned(plain if perm is None else plain[:, perm.long()], bits)
        scales = read(f"{name}.weight_scale").expand(rows, groups).contiguous()
        zeros = None if scheme.symmetric else _zeros(name, read, scheme, rows, groups)
        return PackedLinear(bits, group, columns, codes, scales, zeros=zeros, perm=perm)

    return Stored(bits, group, tuple(sources), load)


def _checked_zeros(name: str, scheme: _Scheme, rows: int, groups: int, shards: ShardSet) -> str:
    source = f"{name}.weight_zero_point"
    info = shards.need(source)
    if info.dtype == "I32" and not scheme.per_tensor:
        shapes = [(height, groups) for height in _widths(rows, scheme.bits)]
        info.require(("I32",), info.shape if info.shape in shapes else shapes[0])
    else:
        info.require(("I8",), shards.need(f"{name}.weight_scale").shape)
    return source


def _perm(name: str, read: Read, group: int, groups: int) -> torch.Tensor | None:
    g_idx = read(f"{name}.weight_g_idx").to(torch.int32)
    if bool((g_idx == -1).all()):
        return None  # the writer's mark for "in order"
    return order_of(f"{name}.weight_g_idx", g_idx, len(g_idx) if group == -1 else group, groups)


def _zeros(name: str, read: Read, scheme: _Scheme, rows: int, groups: int) -> torch.Tensor | None:
    stored = read(f"{name}.weight_zero_point")
    if stored.dtype == torch.int8:
        zeros = stored.expand(rows, groups)
    else:
        unpack = _unpacker(len(stored), rows, scheme.bits)
        unsigned = unpack(stored.T.contiguous(), scheme.bits, rows).T
        zeros = (unsigned - (1 << (scheme.bits - 1))).to(torch.int8)
    return zeros.contiguous() if bool(zeros.any()) else None
