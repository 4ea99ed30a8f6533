"""Whole packed models of every family: compiled layers beside fp32, and when they step aside."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine_actor import ops
from engine_actor.model.config import ModelConfig
from engine_actor.model.runner import ModelRunner, Weight, build_runner
from kernels.linear import cpu_native
from tests.model.test_runner import quantised
from tests.model.tiny_models import (
    BLOCK,
    FAMILIES,
    Part,
    batch,
    canonical,
    forward,
    hf_dict,
    oracle,
)

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
IDS = [5, 77, 3, 12, 60, 1, 1, 44, 90, 2, 8]
PLACE = [4, 1, 7]


def model_of(family: str) -> tuple[ModelConfig, dict[str, Weight], dict[str, Weight]]:
    """(config, packed weights with a W8 table, the same values dense)."""
    model = oracle(family, **SHAPE)
    packed: dict[str, Weight] = {}
    for name, weight in canonical(model).items():
        if isinstance(weight, ops.DenseLinear):
            bits = 8 if name == "head" else 4
            packed[name] = dataclasses.replace(quantised(weight.weight, bits), bias=weight.bias)
        else:
            packed[name] = quantised(weight, 8) if name == "embed" else weight
    dense: dict[str, Weight] = {
        name: ops.DenseLinear(ops.dequantise(weight), weight.bias)
        if isinstance(weight, ops.PackedLinear)
        else weight
        for name, weight in packed.items()
    }
    return ModelConfig.from_hf(hf_dict(model), None), packed, dense


def runner_of(config: ModelConfig, weights: dict[str, Weight], **options: str) -> ModelRunner:
    """With a few blocks of cache; without a dense copy no timing decides who runs."""
    runner = build_runner(config, weights, block_tokens=BLOCK, dense_prefill_copy="off", **options)
    runner.resize_kv(16)
    return runner


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Of all rows of one prompt, then of one decoded token: [len(IDS), vocab]."""
    rows = torch.arange(len(IDS) - 1)
    prompt = forward(runner, batch([Part(IDS[:-1], 0, PLACE)]), rows)
    last = forward(runner, batch([Part(IDS[-1:], len(IDS) - 1, PLACE)]))
    return torch.cat((prompt, last))


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_equal_fp32(family: str) -> None:
    """Biases, norms on heads, a window, tied or not: far closer than a bf16 kernel could be."""
    config, packed, dense = model_of(family)
    want = logits_of(runner_of(config, dense, numerics="exact"))
    runner = runner_of(config, packed)
    assert runner.layer_kernels == "compiled layers up to 64 rows, op by op beyond"
    assert (logits_of(runner) - want).abs().max() < 2e-3 * want.abs().max()


def test_norms_that_the_model_does_not_have_are_not_applied() -> None:
    """A checkpoint may bring q_norm and k_norm to a family without them: as op by op, they are left
    out, also where only one of them came."""
    config, packed, _ = model_of("llama")
    want = logits_of(runner_of(config, packed))
    strays = {
        f"layers.{i}.{name}": torch.linspace(0.2, 3.0, config.head_dim)
        for i, name in enumerate(["q_norm", "k_norm"])
    }
    assert torch.equal(logits_of(runner_of(config, {**packed, **strays})), want)


def test_the_same_bits_alone_and_in_any_batch() -> None:
    """Few rows of a packed model: what runs beside a sequence changes nothing in it."""
    config, packed, _ = model_of("qwen3")
    runner = runner_of(config, packed)
    alone = logits_of(runner)
    other = Part([9, 9, 9], 0, [11])
    forward(runner, batch([Part(IDS[:4], 0, PLACE), other]))
    forward(runner, batch([Part([6], 3, [11]), Part(IDS[4:-1], 4, PLACE)]))
    both = forward(runner, batch([Part([6], 4, [11, 12]), Part(IDS[-1:], len(IDS) - 1, PLACE)]))
    assert torch.equal(both[1], alone[-1])


def test_the_reasons_for_going_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off, exact, another cache, dense weights, no compiler: said, and it runs."""
    config, packed, dense = model_of("llama")
    kinds = {
        "native_kernels: off": runner_of(config, packed, native_kernels="off"),
        "numerics: exact": runner_of(config, packed, numerics="exact"),
        "the KV cache is not fp32": runner_of(config, packed, kv_dtype="fp16"),
        "a linear runs on another kernel": runner_of(config, dense),
    }
    monkeypatch.setattr(cpu_native, "why_not_native", lambda: "no C++ compiler")
    monkeypatch.setattr("kernels.native.layers.native_library", lambda: "no C++ compiler")
    kinds["no C++ compiler"] = runner_of(config, packed)
    want = logits_of(runner_of(config, dense, numerics="exact"))
    for reason, runner in kinds.items():
        assert runner.layer_kernels == f"op by op ({reason})"
        assert (logits_of(runner) - want).abs().max() < 0.1 * want.abs().max()
