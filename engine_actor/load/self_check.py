"""Does a checkpoint that loads look like a language model? Cheap statistics while it streams past.

Every fault below leaves shapes and dtypes right and the text garbage. None is judged by an absolute
number where it can be helped: the weights are read as they came and as the fault's inverse would
have them, and a warning names the fault whose inverse fits clearly better. Knows no format.

Shift: codes minus zero point average nearly 0, and 1 where zero points are off by one. Rows: a
group with a larger scale than its row's others has smaller codes (one outlier made both), unless
codes sit beside foreign scales. Columns: how large the columns of gate and up are follows the norm
before them, and those of down follow the rows of up, unless columns changed places. Turn: columns
of o follow the rows of v; in a transposed o its rows do. Heads: rows of q and k grow or shrink with
the frequency RoPE gives them, so both halves of a head are alike, unless pairs lie interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import torch

from engine_actor.load.formats.base import Weight
from engine_actor.load.refusal import refusal
from engine_actor.load.weight_sample import (
    ORDERS,
    Sample,
    alike,
    halves_apart,
    reorder,
    row_sizes,
    sample,
)
from engine_actor.model.config import ModelConfig
from engine_actor.ops import DenseLinear, PackedLinear

MOST_LAYERS = 6
SHIFT = 0.65
"""Codes. Healthy ones are within 0.15, signed scales included, and uniform ones at 0.5 where no
zero point is in their middle; the fault is 1.
"""
SMALLEST, LARGEST = 1e-3, 1e3
"""Of a matrix's typical row length; trained ones lie between 0.1 and 10."""
HALVES = 0.2
"""Share of the variance that is the halves' difference. Healthy: below 0.01; interleaved: 0.5."""
CLEARLY = 3.0
"""How many times better an inverse must fit."""


def require_sane(name: str, weight: Weight) -> None:
    """Raise CheckpointError, one line, where a weight or scale is NaN or infinite, or where `perm`
    would read outside of x.
    """
    if isinstance(weight, PackedLinear):
        if weight.perm is not None:
            every = torch.arange(weight.in_features, dtype=weight.perm.dtype)
            if not torch.equal(weight.perm.sort().values, every):
                raise refusal(name, "its perm is no permutation of the columns")
        tensors = (weight.scales, weight.offsets, weight.bias)
    elif isinstance(weight, DenseLinear):
        tensors = (weight.weight, weight.bias, None)
    else:
        tensors = (weight, None, None)
    for tensor in tensors:
        if tensor is None or not tensor.numel():
            continue
        # Both carry NaN along, and no mask as large as the weights is made.
        low, high = torch.aminmax(tensor)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise refusal(name, "has a value that is not finite")


@dataclass
class SelfCheck:
    """Give it every weight in order with `take`; `warnings` are its findings, one line each."""

    config: ModelConfig
    _shifts: list[float] = field(default_factory=list)
    _rows: list[dict[str, float]] = field(default_factory=list)
    _columns: list[dict[str, float]] = field(default_factory=list)
    _turns: list[dict[str, float]] = field(default_factory=list)
    _heads: list[dict[str, float]] = field(default_factory=list)
    _odd: list[str] = field(default_factory=list)
    _layer: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str, weight: Weight) -> None:
        """Raises CheckpointError where a value is not finite."""
        require_sane(name, weight)
        parts = name.split(".")
        if len(parts) != 3 or not self._is_chosen(int(parts[1])):
            return
        leaf = parts[2]
        if isinstance(weight, torch.Tensor):
            self._layer[leaf] = weight.float().abs().clamp(min=1e-9).log()
        elif isinstance(weight, PackedLinear):
            self._take_packed(name, leaf, weight)

    def _is_chosen(self, index: int) -> bool:
        """At most MOST_LAYERS of them, spread over the depth; the first is unlike all others."""
        step = max(1, self.config.n_layers // MOST_LAYERS)
        return index % step == step // 2

    def _take_packed(self, name: str, leaf: str, layer: PackedLinear) -> None:
        seen = sample(layer)
        length = float(seen.weights.square().mean().sqrt()) * layer.in_features**0.5
        if not SMALLEST < length < LARGEST:
            self._odd.append(f"{name} has rows of length {length:.1e}")
            return
        self._shifts.append(seen.shift)
        if seen.coherence:
            self._rows.append(seen.coherence)
        self._compare(leaf, layer, seen)

    def _compare(self, leaf: str, layer: PackedLinear, seen: Sample) -> None:
        sizes = row_sizes(layer)
        config = self.config
        q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        if leaf in ("qkv", "v"):
            # Every query head of a group reads the same value head.
            v = sizes[-kv_rows:].view(config.n_kv_heads, 1, config.head_dim)
            repeat = config.n_heads // config.n_kv_heads
            self._layer["v"] = v.expand(-1, repeat, -1).reshape(-1)
        if leaf in ("qkv", "q", "k"):
            self._compare_heads(sizes[: q_rows + kv_rows] if leaf == "qkv" else sizes)
            self._compare_columns("attn_norm", seen)
        elif leaf in ("gate_up", "up", "gate"):
            self._layer["up"] = sizes[-config.intermediate :]
            self._compare_columns("mlp_norm", seen)
        elif leaf == "down":
            self._compare_columns("up", seen)
        elif leaf == "o" and "v" in self._layer:
            v = self._layer["v"]
            turned = alike(sizes, v) if len(sizes) == len(v) else 0.0
            self._turns.append({"": alike(seen.columns, v), "turned": turned})

    def _compare_columns(self, reference: str, seen: Sample) -> None:
        if reference not in self._layer:
            return
        target = self._layer[reference]
        self._columns.append({name: alike(reorder(seen.columns, name), target) for name in ORDERS})

    def _compare_heads(self, sizes: torch.Tensor) -> None:
        heads = sizes.view(-1, self.config.head_dim)
        self._heads.append(
            {
                "": 1 - halves_apart(heads),
                "apart": 1 - halves_apart(torch.cat([heads[:, 0::2], heads[:, 1::2]], 1)),
            }
        )

    def warnings(self) -> list[str]:
        """What looks wrong, one printable line each; empty for a healthy checkpoint."""
        found = [f"{self._odd[0]} ({len(self._odd)} such linears)"] if self._odd else []
        if self._shifts and abs(shift := median(self._shifts)) > SHIFT:
            side = "low" if shift > 0 else "high"
            found.append(f"codes average {shift:+.2f}: zero points look one too {side}")
        if name := _better(self._rows, 0.3):
            found.append(f"codes do not belong to their rows' scales: they look {ORDERS[name]}")
        if name := _better(self._columns, 0.1):
            found.append(f"columns are out of place: they look {ORDERS[name]}")
        if _better(self._turns, 0.05):
            found.append("o looks transposed")
        if _mean(self._heads, "apart") - _mean(self._heads, "") > HALVES:
            found.append("rows of q and k look interleaved for another rotary embedding")
        return [f"{line}; the model will speak garbage" for line in found]


def _better(scores: list[dict[str, float]], least: float) -> str:
    """The name whose mean score is at least `least` and clearly above that of "", else ""."""
    if not scores:
        return ""
    means = {name: _mean(scores, name) for name in scores[0]}
    best = max(means, key=lambda name: means[name])
    return best if means[best] >= least and means[best] > CLEARLY * means[""] else ""


def _mean(scores: list[dict[str, float]], name: str) -> float:
    return sum(one[name] for one in scores) / max(1, len(scores))
