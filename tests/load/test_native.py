"""Our packed folder: what is written is what is read, bit for bit, or nothing is there."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.formats.base import Weight, can_fuse, fuse_packed
from engine_actor.load.names import LinearSlot, Part, slots
from engine_actor.load.tiny import random_packed, tiny_config, write_byte_tokenizer, write_tiny
from engine_actor.load.writer import atomic_folder, write_packed
from engine_actor.model.config import ModelConfig
from engine_actor.ops import DenseLinear, PackedLinear
from tests.load.oracle import dequantise


def _equal(a: Weight, b: Weight) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, torch.Tensor):
            if not (isinstance(y, torch.Tensor) and x.dtype == y.dtype and torch.equal(x, y)):
                return False
        elif x != y:
            return False
    return True


def _draw(rows: int = 16, columns: int = 64, bits: int = 4, group: int = 32) -> PackedLinear:
    slot = LinearSlot("x", (Part("x", rows),), columns)
    return random_packed(slot, torch.Generator().manual_seed(rows), bits, group, "offsets", 0.1)


def _write(folder: Path, raw: dict[str, object], weights: dict[str, Weight], size: int) -> None:
    with atomic_folder(folder) as partial:
        write_packed(partial, raw, weights.items(), {"format": "test"}, shard_bytes=size)
        write_byte_tokenizer(partial)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    ("bits", "group", "kind"),
    [(4, 32, "symmetric"), (4, -1, "zeros"), (4, 48, "offsets"), (3, 64, "symmetric")],
)
def test_round_trip(tmp_path: Path, family: str, bits: int, group: int, kind: str) -> None:
    first = write_tiny(tmp_path / "a", family, packed=True, bits=bits, group=group, kind=kind)
    opened = open_checkpoint(first)
    weights = dict(opened.weights())
    raw = json.loads((first / "config.json").read_text())
    del raw["quantization_config"]
    _write(tmp_path / "b", raw, weights, 1 << 30)
    again = dict(open_checkpoint(tmp_path / "b").weights())
    assert list(again) == list(weights)
    assert all(_equal(again[name], weights[name]) for name in weights)
    assert opened.nbytes == sum(
        w.numel() * w.element_size() if isinstance(w, torch.Tensor) else w.nbytes
        for w in weights.values()
    )
    assert opened.quantisation.kinds == ((bits, group, 8), (8, 32, 2))


def test_many_shards_read_the_same(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "a", packed=True)
    weights = dict(open_checkpoint(source).weights())
    _write(tmp_path / "b", tiny_config(), weights, 9000)
    files = sorted(path.name for path in (tmp_path / "b").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    again = dict(open_checkpoint(tmp_path / "b").weights())
    assert all(_equal(again[name], weights[name]) for name in weights)


def test_parts_that_cannot_be_fused_are_kept_apart(tmp_path: Path) -> None:
    """q in 4 bits, k in 8, v dense: three linears, each whole."""
    config = ModelConfig.from_hf(tiny_config(), None)
    weights = dict(open_checkpoint(write_tiny(tmp_path / "a", packed=True)).weights())
    del weights["layers.0.qkv"]
    weights["layers.0.q"] = _draw(64)
    weights["layers.0.k"] = _draw(32, bits=8)
    weights["layers.0.v"] = DenseLinear(torch.randn(32, 64), None)
    _write(tmp_path / "b", tiny_config(), weights, 1 << 30)
    again = dict(open_checkpoint(tmp_path / "b").weights())
    assert again.keys() == weights.keys()
    assert all(_equal(again[name], weights[name]) for name in weights)
    assert {"layers.0.q", "layers.1.qkv"} <= again.keys()
    assert sum(1 for _ in slots(config)) == len(again) - 2


def test_perm_and_wide_offsets_are_kept(tmp_path: Path) -> None:
    weights = dict(open_checkpoint(write_tiny(tmp_path / "a", packed=True)).weights())
    layer = _draw(64)
    assert layer.offsets is not None
    perm = torch.randperm(64, dtype=torch.int32)
    weights["layers.0.o"] = replace(layer, offsets=layer.offsets.float(), perm=perm)
    _write(tmp_path / "b", tiny_config(), weights, 1 << 30)
    again = dict(open_checkpoint(tmp_path / "b").weights())
    assert _equal(again["layers.0.o"], weights["layers.0.o"])


def test_fused_rows_are_the_parts_rows() -> None:
    parts = [_draw(16), _draw(8), _draw(24)]
    assert can_fuse(parts)
    rows = torch.cat([torch.from_numpy(dequantise(part)) for part in parts])
    assert torch.equal(torch.from_numpy(dequantise(fuse_packed(parts))), rows)


def test_wide_offsets_of_one_part_widen_the_whole() -> None:
    a, b = _draw(16), _draw(8)
    assert a.offsets is not None
    fused = fuse_packed([replace(a, offsets=a.offsets.float()), b])
    assert fused.offsets is not None
    assert fused.offsets.dtype == torch.float32
    rows = torch.cat([torch.from_numpy(dequantise(part)) for part in (a, b)])
    assert torch.equal(torch.from_numpy(dequantise(fused)), rows)


@pytest.mark.parametrize(
    "other",
    [
        _draw(8, group=64),
        _draw(8, bits=8),
        replace(_draw(8), offsets=None),
        replace(_draw(8), perm=torch.arange(64, dtype=torch.int32)),
    ],
)
def test_unlike_parts_are_not_fused(other: PackedLinear) -> None:
    assert not can_fuse([_draw(16), other])


def _fail_to_write(target: Path) -> None:
    with atomic_folder(target) as partial:
        (partial / "config.json").write_text("{}")
        raise RuntimeError("disk full")


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(RuntimeError, match="disk full"):
        _fail_to_write(target)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(RuntimeError, match="disk full"):
        _fail_to_write(target)
    assert [path.name for path in target.iterdir()] == ["old"]
    with atomic_folder(target) as partial:
        (partial / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
