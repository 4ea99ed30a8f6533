"""Layers whose products carry the norms, with products made of torch: the order of their parts, and
who norms what where only some of them can."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_actor import ops
from engine_actor.model import carried
from engine_actor.model.carried import CarriedLayer, CarriedLayers, _Carriers
from kernels.elementwise.op import rms_norm_reference

WIDTH, EPS, ROWS = 64, 1e-5, 3


def leave(stream: torch.Tensor, weight: torch.Tensor, carry: ops.Carry) -> None:
    carry.x.copy_(stream * weight * carry.lifts[0].unsqueeze(1))
    carry.squares.copy_(stream.square().view(len(stream), -1, 16).sum(-1))


class Product:
    """As StripFew, in fp32: x in `carry` is the stream times the weight and the lift."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() @ self.weight.T

    def normed(self, carry: ops.Carry) -> torch.Tensor:
        factor = (carry.squares.sum(1) / WIDTH + EPS).rsqrt()
        carry.lifts[1].copy_(factor.log2().floor().exp2())
        y = self(carry.x) * (factor / carry.lifts[0]).unsqueeze(1)
        carry.taken()
        return y

    def add_to(self, carry: ops.Carry, x: torch.Tensor, next_weight: torch.Tensor) -> None:
        carry.stream += self(x)
        leave(carry.stream, next_weight, carry)


class Tanh:
    """In the place of attention."""

    def __init__(self, o: Product) -> None:
        self.o = o

    def attend(self, projected: torch.Tensor, kv: Any, step: Any) -> torch.Tensor:
        return torch.tanh(projected) + kv


def leave_first(
    stream: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    squares: torch.Tensor,
    lift: torch.Tensor,
) -> None:
    lift.copy_((stream.square().mean(1) + eps).rsqrt().log2().floor().exp2())
    leave(stream, weight, ops.Carry(stream, out, squares, [lift, lift], eps))


def layer() -> tuple[CarriedLayer, list[Product]]:
    products = [Product(torch.randn(WIDTH, WIDTH) / 8) for _ in range(4)]
    qkv, o, gate_up, down = products
    attn_weight, mlp_weight = torch.rand(2, WIDTH) + 0.5

    def add_mlp_norm(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        x += delta
        return rms_norm_reference(x, mlp_weight, EPS)

    made: Any = CarriedLayer
    attention = Tanh(o)
    parts = (attn_weight, mlp_weight, EPS, qkv, attention, o, add_mlp_norm, gate_up, gate_up, down)
    return made(*parts), products


@pytest.mark.parametrize("folded", [(True, True), (False, False), (True, False)])
def test_as_with_norms_apart(folded: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried.ops, "leave_norm", leave_first)
    torch.manual_seed(1)
    made = [layer() for _ in folded]
    products: Any = _Carriers
    carriers = [
        products(qkv, down, o if both else None, gate_up if both else None)
        for (_, (qkv, o, gate_up, down)), both in zip(made, folded, strict=True)
    ]
    stream, kv = torch.randn(ROWS, WIDTH) * 20, [0.5, -0.5]
    want = stream.clone()
    for index, (one, (qkv, o, gate_up, down)) in enumerate(made):
        attended = torch.tanh(qkv(rms_norm_reference(want, one.attn_weight, EPS))) + kv[index]
        want += o(attended)
        delta = down(gate_up(rms_norm_reference(want, one.mlp_weight, EPS)))
        if index + 1 < len(made):
            want += delta
    step: Any = None
    got = CarriedLayers([one for one, _ in made], carriers).run(stream, kv, step)
    torch.testing.assert_close(stream, want, rtol=2e-3, atol=2e-2)
    torch.testing.assert_close(got, delta, rtol=2e-3, atol=2e-2)


def test_not_on_a_cpu() -> None:
    assert CarriedLayers.of([layer()[0]], ROWS, torch.randn(ROWS, WIDTH)) is None
