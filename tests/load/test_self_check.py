"""Garbled checkpoints that load: each fault is injected into the demo's real layers and named.

The healthy ones are the same layers, quantised in seven ways that people use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from engine_actor.errors import CheckpointError
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.formats.base import Weight
from engine_actor.load.self_check import SelfCheck
from engine_actor.load.tiny import write_tiny
from engine_actor.model.config import ModelConfig
from engine_actor.ops import DenseLinear, PackedLinear, dequantise, pack_codes

AWQ, AWQ_BACK = (0, 2, 4, 6, 1, 3, 5, 7), (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass
class Model:
    """The layers the self-check looks at, as matrices, and all norms."""

    config: ModelConfig
    linears: dict[str, torch.Tensor]
    norms: dict[str, torch.Tensor]


@dataclass
class Codes:
    """One linear between quantising and packing: signed q [N, K], z and s [N, G]."""

    name: str
    q: torch.Tensor
    z: torch.Tensor
    s: torch.Tensor


@pytest.fixture(scope="module")
def demo(demo_folder: Path) -> Model:
    opened = open_checkpoint(demo_folder)
    check = SelfCheck(opened.config)
    linears: dict[str, torch.Tensor] = {}
    norms: dict[str, torch.Tensor] = {}
    for name, weight in opened.weights():
        parts = name.split(".")
        if len(parts) != 3 or not check._is_chosen(int(parts[1])):
            continue
        if isinstance(weight, torch.Tensor):
            norms[name] = weight
        elif isinstance(weight, PackedLinear):
            linears[name] = dequantise(weight)
    return Model(opened.config, linears, norms)


def _quantise(name: str, w: torch.Tensor, bits: int, group: int, how: str) -> Codes:
    high = 1 << (bits - 1)
    x = w.view(len(w), -1, group)
    if how == "zeros":
        low, top = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
        s = (top - low) / (2 * high - 1)
    elif how == "signed":  # the code -2^(bits-1) has the largest value, whatever its sign
        s = -x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1) / high
    else:
        s = x.abs().amax(-1) / (high - 1)
    s = torch.where(s.abs() < 1e-7, torch.full_like(s, 1e-7), s).half().float()
    z = (-low / s).round() - high if how == "zeros" else torch.zeros_like(s)
    q = ((x / s.unsqueeze(-1)).round() + z.unsqueeze(-1)).clamp(-high, high - 1)
    return Codes(name, q.flatten(1).to(torch.int16), z, s)


def _warnings(
    model: Model,
    bits: int,
    group: int,
    how: str,
    garble: Callable[[Codes, int], Codes] = lambda codes, bits: codes,
    bend: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, w: w,
) -> list[str]:
    """What the self-check says of the model after quantising. garble: of codes, bend: before."""
    check = SelfCheck(model.config)
    for name, norm in model.norms.items():
        check.take(name, norm)
        prefix = name.removesuffix("_norm")
        followers = ("qkv", "o") if prefix.endswith("attn") else ("gate_up", "down")
        for leaf in followers:
            linear = f"{name.rsplit('.', 1)[0]}.{leaf}"
            codes = garble(
                _quantise(linear, bend(linear, model.linears[linear]), bits, group, how), bits
            )
            size, half = codes.q.shape[1], codes.s.half()
            zeros = codes.z.to(torch.int8) if how == "zeros" or bool(codes.z.any()) else None
            check.take(
                linear,
                PackedLinear(bits, group, size, pack_codes(codes.q, bits), half, zeros=zeros),
            )
    return check.warnings()


METHODS = [
    (4, 32, "signed"),
    (4, 64, "absmax"),
    (4, 64, "zeros"),
    (4, 192, "absmax"),
    (3, 64, "absmax"),
    (3, 32, "signed"),
    (8, 64, "absmax"),
]
FOUR = METHODS[1:3]


@pytest.mark.parametrize(("bits", "group", "how"), METHODS)
def test_healthy_ones_pass(demo: Model, bits: int, group: int, how: str) -> None:
    assert _warnings(demo, bits, group, how) == []


def test_the_demo_as_it_is_passes(demo_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in open_checkpoint(demo_folder).weights():
        pass
    assert caplog.records == []


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
def test_random_models_are_not_accused(tmp_path: Path, family: str, kind: str) -> None:
    opened = open_checkpoint(write_tiny(tmp_path / "tiny", family, packed=True, kind=kind))
    check = SelfCheck(opened.config)
    for name, weight in opened.weights():
        check.take(name, weight)
    assert check.warnings() == []


@pytest.mark.parametrize(("bits", "group", "how"), METHODS)
@pytest.mark.parametrize(("by", "side"), [(1, "high"), (-1, "low")])
def test_zero_points_off_by_one(
    demo: Model, bits: int, group: int, how: str, by: int, side: str
) -> None:
    """GPTQ's two conventions. A zero point one too high makes every weight one scale too low."""

    def garble(codes: Codes, bits: int) -> Codes:
        return replace(codes, z=(codes.z + by).clamp(-128, 127))

    found = _warnings(demo, bits, group, how, garble)
    assert len(found) == 1
    assert f"zero points look one too {side}; the model will speak garbage" in found[0]


def _reordered(values: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    order = torch.arange(values.shape[-1]).view(-1, len(block))[:, list(block)].reshape(-1)
    return values[..., order]


ORDERS = [
    (AWQ, "in AWQ's order of eight"),
    (AWQ_BACK, "in the inverse of AWQ's order of eight"),
    ((1, 0), "swapped in pairs (the other nibble first)"),
    (tuple(range(7, -1, -1)), "reversed in eights (the highest nibble of a word first)"),
]
HALVES = [
    (tuple(half * 16 + i for i in range(16) for half in (0, 1)), "mixed from halves of 32"),
    (tuple(range(0, 32, 2)) + tuple(range(1, 32, 2)), "in halves of 32"),
]


@pytest.mark.parametrize(("bits", "group", "how"), FOUR)
@pytest.mark.parametrize(("block", "words"), ORDERS)
def test_rows_in_another_order_than_their_scales(
    demo: Model, bits: int, group: int, how: str, block: tuple[int, ...], words: str
) -> None:
    """B-17: an AWQ file whose words are not in AWQ's order. Zero points come in the same order."""

    def garble(codes: Codes, bits: int) -> Codes:
        return replace(codes, q=_reordered(codes.q.T, block).T, z=_reordered(codes.z.T, block).T)

    found = _warnings(demo, bits, group, how, garble)
    assert found == [
        f"codes do not belong to their rows' scales: they look {words}; the model will speak "
        "garbage"
    ]


@pytest.mark.parametrize(("bits", "group", "how"), [METHODS[1], METHODS[5]])
@pytest.mark.parametrize(("block", "words"), [*ORDERS, *HALVES])
def test_columns_in_another_order(
    demo: Model, bits: int, group: int, how: str, block: tuple[int, ...], words: str
) -> None:
    """The other nibble first, another word order, GGUF's halves: all within one group."""
    found = _warnings(
        demo, bits, group, how, lambda codes, _: replace(codes, q=_reordered(codes.q, block))
    )
    assert len(found) == 1
    assert found[0].startswith(f"columns are out of place: they look {words}")


@pytest.mark.parametrize(("bits", "group", "how"), METHODS)
def test_a_transposed_square(demo: Model, bits: int, group: int, how: str) -> None:
    """Shapes refuse every other transposed matrix."""

    def bend(name: str, w: torch.Tensor) -> torch.Tensor:
        return w.T.contiguous() if name.endswith(".o") else w

    found = _warnings(demo, bits, group, how, bend=bend)
    assert found == ["o looks transposed; the model will speak garbage"]


@pytest.mark.parametrize(("bits", "group", "how"), METHODS)
def test_heads_left_as_llama_cpp_has_them(demo: Model, bits: int, group: int, how: str) -> None:
    """A converter that forgot to undo the row order of a GGUF file's q and k."""
    config = demo.config
    rotated = (config.n_heads + config.n_kv_heads) * config.head_dim

    def bend(name: str, w: torch.Tensor) -> torch.Tensor:
        if not name.endswith(".qkv"):
            return w
        heads = w[:rotated].view(-1, 2, config.head_dim // 2, w.shape[1]).transpose(1, 2)
        return torch.cat([heads.reshape(rotated, -1), w[rotated:]])

    found = _warnings(demo, bits, group, how, bend=bend)
    assert len(found) == 1
    assert found[0].startswith("rows of q and k look interleaved")


def test_scales_of_another_size(demo: Model) -> None:
    """Bytes of another float read as f16."""
    found = _warnings(demo, 4, 64, "absmax", lambda codes, _: replace(codes, s=codes.s * 2e4))
    assert len(found) == 1
    assert "has rows of length" in found[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 8,
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
            "intermediate_size": 8,
            "vocab_size": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8,
        },
        None,
    )
    bad = torch.ones(8, 8, dtype=torch.float16)
    bad[3, 5] = value
    scales = bad[:, 3:6].contiguous()
    packed = PackedLinear(4, 3, 8, torch.zeros(8, 4, dtype=torch.uint8), scales)
    whole = replace(packed, scales=torch.ones(8, 3, dtype=torch.float16))
    cases: list[Weight] = [
        bad[3],
        DenseLinear(bad),
        DenseLinear(torch.ones(8, 8), bad[3]),
        packed,
        replace(whole, offsets=scales),
        replace(whole, bias=bad[3]),
    ]
    for weight in cases:
        with pytest.raises(CheckpointError, match=r"^embed: has a value that is not finite$"):
            SelfCheck(config).take("embed", weight)
    SelfCheck(config).take("embed", whole)
