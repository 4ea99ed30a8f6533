"""AWQ repositories: quant_method `awq`, version `gemm`, 4 bits with zero points.

A linear x of [N, K] in G groups: x.qweight i32[K, N / 8] and x.qzeros i32[G, N / 8] hold eight
neighbours of N in a word, nibble j being number (0, 2, 4, 6, 1, 3, 5, 7)[j]; x.scales [G, N].
w = s * (q - z) (AutoAWQ's WQLinear_GEMM).
"""

from __future__ import annotations

from typing import Any

import torch

from engine_actor.load.formats.base import FLOATS, Entry, Read, require_group
from engine_actor.load.formats.imported import Stored, plan, signed_zeros
from engine_actor.load.formats.words import pack_unsigned, unpack_padded
from engine_actor.load.refusal import refusal
from engine_actor.load.shards import ShardSet
from engine_actor.model.config import ModelConfig
from engine_actor.ops import PackedLinear

METHOD = "awq"
SECTION = "quantization_config"
BITS = 4
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where neighbour i of a word lies: the inverse of the order above."""


def plan_awq(config: ModelConfig, shards: ShardSet, section: dict[str, Any]) -> list[Entry]:
    """Entries of an AWQ checkpoint, from headers. Raises CheckpointError."""
    group = _group(section)

    def find(name: str, rows: int, columns: int) -> Stored | None:
        if f"{name}.qweight" not in shards.tensors:
            return None
        return _stored(name, rows, columns, group, shards)

    return plan(config, shards, find)


def _group(section: dict[str, Any]) -> int:
    version = str(section.get("version") or "gemm").lower()
    if version != "gemm":
        raise refusal(f"{SECTION}.version", f"{version!r} cannot be read (supported: 'gemm')")
    bits = section.get("bits", section.get("w_bit"))
    if bits != BITS:
        raise refusal(f"{SECTION}.bits", f"{bits!r} cannot be read (AWQ has 4)")
    group = section.get("group_size", section.get("q_group_size"))
    return require_group(f"{SECTION}.group_size", group)


def _stored(name: str, rows: int, columns: int, group: int, shards: ShardSet) -> Stored:
    groups = 1 if group == -1 else -(-columns // group)
    words = -(-rows // 8)
    shards.need(f"{name}.qweight").require(("I32",), (columns, words))
    shards.need(f"{name}.qzeros").require(("I32",), (groups, words))
    shards.need(f"{name}.scales").require(FLOATS, (groups, rows))

    def load(read: Read) -> PackedLinear:
        codes = _in_order(read(f"{name}.qweight"), rows)
        zeros = _in_order(read(f"{name}.qzeros"), rows)
        return PackedLinear(
            BITS,
            group,
            columns,
            pack_unsigned(codes, BITS),
            read(f"{name}.scales").T.contiguous(),
            zeros=signed_zeros(zeros, BITS),
        )

    return Stored(BITS, group, tuple(f"{name}.{x}" for x in ("qweight", "qzeros", "scales")), load)


def _in_order(words: torch.Tensor, rows: int) -> torch.Tensor:
    """i32[X, N / 8] -> unsigned codes [N, X]."""
    nibbles = unpack_padded(words, BITS, words.shape[1] * 8).view(len(words), -1, 8)
    return nibbles[..., NIBBLES].flatten(1)[:, :rows].T.contiguous()
