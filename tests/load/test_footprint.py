"""Bytes on a GPU from headers, against the weights themselves prepared in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_actor.load.checkpoint import Checkpoint, open_checkpoint
from engine_actor.load.footprint import weight_bytes
from engine_actor.load.tiny import write_tiny
from engine_actor.ops import (
    DENSE_SCRATCH_BYTES,
    STRIP_SCRATCH_BYTES,
    DenseLinear,
    PackedLinear,
)
from kernels.linear.strip import refuse_strips, to_strips

ITEM = 2


def rounded(size: int) -> int:
    return -(-size // 512) * 512


def prepared(weight: torch.Tensor | DenseLinear | PackedLinear) -> int:
    """As the CUDA dispatcher keeps it; a linear is one tensor here."""
    if isinstance(weight, torch.Tensor):
        return rounded(4 * weight.numel())
    if isinstance(weight, DenseLinear):
        return rounded(ITEM * weight.weight.numel())
    if refuse_strips(weight.bits, weight.group_size, weight.in_features) is not None:
        return rounded(weight.nbytes)
    strips = to_strips(weight)
    bias = 0 if strips.bias is None else 2 * strips.bias.numel()
    return rounded(strips.nbytes + bias)


def by_hand(opened: Checkpoint) -> int:
    total = 0
    for name, weight in opened.weights():
        if name != "embed":
            total += prepared(weight)
            continue
        assert not isinstance(weight, torch.Tensor)
        total += rounded(weight.nbytes)
        is_packed = isinstance(weight, PackedLinear)
        if opened.config.tie_embeddings and not (is_packed and weight.bits == 8):
            total += prepared(weight)
    return total


@pytest.mark.parametrize(
    "model",
    [
        {"packed": True},
        {"packed": True, "family": "qwen2"},
        {"packed": True, "tie_word_embeddings": True},
        {"family": "qwen3", "dtype": "float32"},
    ],
)
def test_it_is_what_the_layers_take(tmp_path: Path, model: dict[str, Any]) -> None:
    opened = open_checkpoint(write_tiny(tmp_path, **({"family": "llama"} | model)))
    found = weight_bytes(opened.config, opened.entries, ITEM)
    # A bias kept in fp32 in the file counts once more than it takes.
    assert by_hand(opened) <= found.resident <= 1.05 * by_hand(opened)
    assert found.peak > found.resident


def test_the_largest_layer_is_there_twice_for_a_moment(tmp_path: Path) -> None:
    opened = open_checkpoint(write_tiny(tmp_path, "llama", packed=True))
    largest = max(entry.nbytes for entry in opened.entries if entry.bits in (3, 4))
    assert weight_bytes(opened.config, opened.entries, ITEM).loading == (
        largest + STRIP_SCRATCH_BYTES
    )


def test_exact_numerics_make_everything_dense(tmp_path: Path) -> None:
    opened = open_checkpoint(write_tiny(tmp_path, "llama", packed=True))
    fast = weight_bytes(opened.config, opened.entries, 4)
    exact = weight_bytes(opened.config, opened.entries, 4, exact=True)
    assert exact.resident > 3 * fast.resident
    # Made dense in parts: no second copy of the largest layer lies beside it.
    largest = max(entry.nbytes for entry in opened.entries)
    assert exact.loading <= largest + DENSE_SCRATCH_BYTES
