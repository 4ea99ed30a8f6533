"""Which dtypes a model runs in, by device, numerics and what its checkpoint holds."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine_actor.load.tiny import tiny_config
from engine_actor.model.config import ModelConfig
from engine_actor.model.precision import Precision, choose_precision

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def _chosen(device: str, published: str, packed: bool, numerics: str = "fast") -> Precision:
    config = dataclasses.replace(ModelConfig.from_hf(tiny_config(), None), dtype=published)
    return choose_precision(
        config, torch.device(device), numerics, "auto", "off", "auto", packed=packed
    )


@pytest.mark.parametrize(
    ("published", "packed", "activations", "residual"),
    [
        ("float16", True, HALF, HALF),
        ("float16", False, HALF, HALF),
        ("bfloat16", False, BRAIN, BRAIN),
        ("bfloat16", True, HALF, FULL),
        ("float32", True, FULL, FULL),
    ],
)
def test_on_a_gpu(
    published: str, packed: bool, activations: torch.dtype, residual: torch.dtype
) -> None:
    """Packed linears multiply fp16 whatever was published; what they add up to needs bf16's range,
    and dense ones keep it."""
    chosen = _chosen("cuda", published, packed)
    assert (chosen.hidden_dtype, chosen.residual_dtype) == (activations, residual)
    assert chosen.kv_dtype == chosen.linears.dtype == chosen.head.dtype == activations


@pytest.mark.parametrize(
    ("device", "numerics"), [("cpu", "fast"), ("cpu", "exact"), ("cuda", "exact")]
)
def test_elsewhere_all_is_fp32(device: str, numerics: str) -> None:
    """Packed or not."""
    for packed in (False, True):
        chosen = _chosen(device, "bfloat16", packed, numerics)
        assert {chosen.hidden_dtype, chosen.residual_dtype, chosen.kv_dtype} == {FULL}
