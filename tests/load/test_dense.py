"""Plain checkpoints: every family, tied or not, sharded or not, in canonical weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_actor.errors import CheckpointError
from engine_actor.load.checkpoint import Checkpoint, open_checkpoint
from engine_actor.load.tiny import write_tiny
from engine_actor.ops import DenseLinear
from tests.load.oracle import edit_json


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Canonical weights, a linear as name and name.bias."""
    flat: dict[str, torch.Tensor] = {}
    for name, weight in open_checkpoint(folder).weights():
        if isinstance(weight, torch.Tensor):
            flat[name] = weight
            continue
        assert isinstance(weight, DenseLinear)
        flat[name] = weight.weight
        if weight.bias is not None:
            flat[f"{name}.bias"] = weight.bias
    return flat


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_rows_are_fused_in_order(tmp_path: Path, family: str) -> None:
    folder = write_tiny(tmp_path, family)
    stored, ours = load_file(folder / "model.safetensors"), _weights(folder)
    for layer in range(2):
        at, hub = f"layers.{layer}.", f"model.layers.{layer}."
        qkv = [stored[f"{hub}self_attn.{x}_proj.weight"] for x in "qkv"]
        assert torch.equal(ours[at + "qkv"], torch.cat(qkv))
        gate_up = [stored[f"{hub}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        assert torch.equal(ours[at + "gate_up"], torch.cat(gate_up))
        assert torch.equal(ours[at + "o"], stored[hub + "self_attn.o_proj.weight"])
        assert torch.equal(ours[at + "down"], stored[hub + "mlp.down_proj.weight"])
        assert torch.equal(ours[at + "attn_norm"], stored[hub + "input_layernorm.weight"])
        assert torch.equal(ours[at + "mlp_norm"], stored[hub + "post_attention_layernorm.weight"])
        assert (at + "qkv.bias" in ours) == (family == "qwen2")
        assert (at + "q_norm" in ours) == (at + "k_norm" in ours) == (family == "qwen3")
    assert torch.equal(ours["embed"], stored["model.embed_tokens.weight"])
    assert torch.equal(ours["head"], stored["lm_head.weight"])
    assert torch.equal(ours["norm"], stored["model.norm.weight"])
    fused_away = {"qwen2": 2 * (2 + 1) + 2 * 2}.get(family, 2 * (2 + 1))
    assert len(ours) == len(stored) - fused_away


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_are_kept(tmp_path: Path, dtype: str) -> None:
    folder = write_tiny(tmp_path, "qwen2", dtype=dtype)
    assert {w.dtype for w in _weights(folder).values()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_change_nothing(tmp_path: Path, shards: int) -> None:
    whole = write_tiny(tmp_path / "whole", "qwen2")
    split = write_tiny(tmp_path / "split", "qwen2", shards=shards)
    assert _same(_weights(whole), _weights(split))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", ["absent", "equal", "garbage"])
def test_tied_embeddings(tmp_path: Path, shards: int, stored: str) -> None:
    """B-18: with tie_word_embeddings the head is the embedding, whatever the file holds of it."""
    folder = write_tiny(tmp_path, shards=shards, tie_word_embeddings=True)
    plain = _weights(folder)
    if stored != "absent":
        file = next(folder.glob("*.safetensors"))
        tensors = {name: t.clone() for name, t in load_file(file).items()}
        head = plain["embed"].clone() if stored == "equal" else torch.full((304, 64), 7.0)
        save_file({**tensors, "lm_head.weight": head}, file)
        if shards > 1:
            import json

            index = folder / "model.safetensors.index.json"
            value = json.loads(index.read_text())
            value["weight_map"]["lm_head.weight"] = file.name
            index.write_text(json.dumps(value))
    assert "head" not in plain
    assert _same(_weights(folder), plain)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    """B-18, the other way round: a random head is never made up."""
    folder = write_tiny(tmp_path, tie_word_embeddings=True)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"^lm_head\.weight: missing tensor$"):
        open_checkpoint(folder)


def test_buffers_of_old_exporters_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    assert "head" in _weights(folder)


def _opened(tmp_path: Path, name: str, **changes: object) -> Checkpoint:
    return open_checkpoint(write_tiny(tmp_path / name, **changes))  # type: ignore[arg-type]


def test_what_a_checkpoint_says_of_itself(tmp_path: Path) -> None:
    opened = _opened(tmp_path, "a")
    parameters = 2 * 304 * 64 + 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    assert opened.nbytes == 4 * parameters
    assert str(opened.quantisation) == "dense: 10 dense"
    assert opened.eos_token_ids == {2, 0}
    assert opened.max_model_len == 512
    assert opened.usable_vocab_size() == 275


def test_the_fingerprint_knows_content_and_not_place(tmp_path: Path) -> None:
    prints = [
        _opened(tmp_path, name, **changes).fingerprint
        for name, changes in [
            ("a", {}),
            ("elsewhere", {}),
            ("dtype", {"dtype": "bfloat16"}),
            ("vocab", {"vocab": 320}),
            ("theta", {"rope_theta": 5e5}),
            ("packed", {"packed": True}),
        ]
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 5
