"""Foreign checkpoints through the whole model: the logits transformers has on the same matrices.

K = 576 in groups of 128, whose last group is short; columns reordered by act-order, for q, k and v
each in its own way.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_actor.core.plan import PrefillChunk
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.model.runner import build_runner
from engine_actor.work.inputs import build_prefill
from tests.hub_reference import hub_model
from tests.load.foreign import awq, compressed, gptq, write_foreign
from tests.load.foreign_checks import WIDE, draw_with

IDS = (1, 17, 202, 33, 94, 5, 250, 77)
GROUP = {"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": False, "desc_act": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "a": {
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": False,
                "strategy": "group",
                "group_size": 128,
            }
        }
    },
}
CASES = {
    "gptq, 3 bits, act-order": (GROUP, gptq, draw_with(3, 128, False, True)),
    "gptq, 4 bits": ({**GROUP, "bits": 4}, gptq, draw_with(4, 128, False)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        awq,
        draw_with(4, 128, False),
    ),
    "compressed-tensors, 8 bits": (
        COMPRESSED,
        partial(compressed, symmetric=False),
        draw_with(8, 128, False),
    ),
}


@pytest.mark.parametrize(("numerics", "tolerance"), [("exact", 1e-4), ("fast", 6e-2)])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers_own(
    tmp_path: Path, case: str, numerics: str, tolerance: float
) -> None:
    """Tolerance relative to the spread of the logits; fast has bf16 activations."""
    section, pack, draw = CASES[case]
    write_foreign(tmp_path, section, pack, draw, family="qwen2", **_sizes())
    opened = open_checkpoint(tmp_path)
    runner = build_runner(
        opened.config,
        opened.weights(),
        device="cpu",
        numerics=numerics,
        block_tokens=16,
        dense_prefill_copy="off",
    )
    runner.resize_kv(1)
    chunk = PrefillChunk(("t", 1), 0, len(IDS), IDS, (0,), samples=True)
    inputs = build_prefill([chunk], 16, runner.device)
    hidden = runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)
    logits = runner.logits(hidden, torch.arange(len(IDS))).float()
    with torch.inference_mode():
        expected = hub_model(tmp_path)(torch.tensor([IDS])).logits[0]
    assert float((logits - expected).abs().max()) <= tolerance * float(expected.std())


def _sizes() -> dict[str, Any]:
    return {**WIDE, "intermediate_size": 192}
