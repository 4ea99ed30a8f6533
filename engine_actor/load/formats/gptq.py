"""GPTQ repositories: quant_method `gptq`, 3, 4 or 8 bits, both zero conventions, act-order.

A linear x of [N, K] in G groups: x.qweight i32[K * bits / 32, N] and x.qzeros i32[G, N * bits / 32]
are little-endian bit streams along K and N of unsigned codes, x.scales [G, N], x.g_idx i32[K].
w = s * (q - z). `checkpoint_format` gptq (or none) stores z - 1, gptq_v2 stores z (format and both
conventions: AutoGPTQ's and GPTQModel's own pack routines).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine_actor.load.formats.base import FLOATS, Entry, Read, require_group
from engine_actor.load.formats.imported import Stored, order_of, plan, signed_zeros
from engine_actor.load.formats.words import pack_unsigned, signed_bytes, unpack_stream
from engine_actor.load.refusal import refusal
from engine_actor.load.shards import ShardSet
from engine_actor.model.config import ModelConfig
from engine_actor.ops import PackedLinear

METHOD = "gptq"
SECTION = "quantization_config"
BITS = (3, 4, 8)
_STORED_LESS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what was subtracted from a zero point before it was stored."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "pack_dtype": ("int32",),
    "is_marlin_format": (False,),
    "rotation": ("",),
    "adapter": (),
    "lora": (),
}
"""Keys that change what the tensors mean, and the values under which they do not."""


@dataclass(frozen=True, slots=True)
class _Settings:
    bits: int
    group: int
    symmetric: bool
    stored_less: int
    varied: bool


def plan_gptq(config: ModelConfig, shards: ShardSet, section: dict[str, Any]) -> list[Entry]:
    """Entries of a GPTQ checkpoint, from headers. Raises CheckpointError."""
    settings = _settings(section)

    def find(name: str, rows: int, columns: int) -> Stored | None:
        if f"{name}.qweight" not in shards.tensors:
            return None
        return _stored(name, rows, columns, shards, settings)

    return plan(config, shards, find)


def _settings(section: dict[str, Any]) -> _Settings:
    for key, allowed in _ONLY.items():
        if section.get(key) is not None and section[key] not in allowed:
            raise refusal(f"{SECTION}.{key}", f"{section[key]!r} cannot be read")
    name = section.get("checkpoint_format") or "gptq"
    if not isinstance(name, str) or name not in _STORED_LESS:
        raise refusal(
            f"{SECTION}.checkpoint_format", f"{name!r} cannot be read (supported: gptq, gptq_v2)"
        )
    bits, group = section.get("bits"), section.get("group_size", -1)
    if type(bits) is not int or bits not in BITS:
        raise refusal(f"{SECTION}.bits", f"{bits!r} cannot be read (supported: 3, 4, 8)")
    group = require_group(f"{SECTION}.group_size", group)
    symmetric = section.get("sym", False) is True
    return _Settings(bits, group, symmetric, _STORED_LESS[name], bool(section.get("dynamic")))


def _stored(name: str, rows: int, columns: int, shards: ShardSet, settings: _Settings) -> Stored:
    bits, group = settings.bits, settings.group
    if settings.varied:  # `dynamic` gives layers their own bits and group: the shapes say which
        bits, group = _from_shapes(name, columns, shards)
    groups = 1 if group == -1 else -(-columns // group)
    shards.need(f"{name}.qweight").require(("I32",), (-(-columns * bits // 32), rows))
    shards.need(f"{name}.qzeros").require(("I32",), (groups, -(-rows * bits // 32)))
    shards.need(f"{name}.scales").require(FLOATS, (groups, rows))
    sources = [f"{name}.qweight", f"{name}.qzeros", f"{name}.scales"]
    if f"{name}.g_idx" in shards.tensors:
        shards.need(f"{name}.g_idx").require(("I32",), (columns,))
        sources.append(f"{name}.g_idx")
    has_order = len(sources) == 4

    def load(read: Read) -> PackedLinear:
        perm = None
        if has_order:
            width = columns if group == -1 else group
            perm = order_of(f"{name}.g_idx", read(f"{name}.g_idx"), width, groups)
        return PackedLinear(
            bits,
            group,
            columns,
            _codes(read(f"{name}.qweight"), bits, columns, perm),
            read(f"{name}.scales").T.contiguous(),
            zeros=_zeros(f"{name}.qzeros", read(f"{name}.qzeros"), bits, rows, settings),
            perm=perm,
        )

    return Stored(bits, group, tuple(sources), load)


def _from_shapes(name: str, columns: int, shards: ShardSet) -> tuple[int, int]:
    codes, scales = shards.need(f"{name}.qweight"), shards.need(f"{name}.scales")
    height = codes.shape[0] if codes.shape else 0
    bits = next((b for b in BITS if -(-columns * b // 32) == height), 0)
    groups = scales.shape[0] if scales.shape else 0
    if not bits or not groups or columns % groups:
        raise refusal(
            name, f"shapes {list(codes.shape)} and {list(scales.shape)} fit no bits and group"
        )
    return bits, -1 if groups == 1 else columns // groups


def _codes(words: torch.Tensor, bits: int, columns: int, perm: torch.Tensor | None) -> torch.Tensor:
    """u8[N, ceil(columns * bits / 8)], columns sorted by group."""
    by_row = words.T.contiguous()
    if perm is None:
        return signed_bytes(by_row, bits, columns)
    codes = unpack_stream(by_row, bits, columns)
    return pack_unsigned(codes[:, perm.long()], bits)


def _zeros(
    name: str, words: torch.Tensor, bits: int, rows: int, settings: _Settings
) -> torch.Tensor | None:
    """i8[N, G] or None where all are the middle. A stored z - 1 wraps: 0 is kept as all ones."""
    stored = unpack_stream(words, bits, rows)
    zeros = (stored + settings.stored_less) & ((1 << bits) - 1)
    signed = signed_zeros(zeros.T, bits)
    if signed is not None and settings.symmetric and bool((signed == signed[0, 0]).all()):
        value, middle = int(zeros[0, 0]), 1 << (bits - 1)
        if abs(value - middle) == 1:
            other = "gptq_v2" if value > middle else "gptq"
            raise refusal(
                name,
                f"sym is true, but every zero point reads {value} instead of {middle}: "
                f"checkpoint_format should be {other!r}",
            )
    return signed
