"""Writes our packed folder, whole or not at all: into a temporary neighbour, then one rename.

Used by the demo's preparation and by every converter. Knows no source format.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine_actor.load.formats.base import Weight
from engine_actor.load.formats.native import FORMAT_VERSION, METHOD, SECTION
from engine_actor.load.shards import INDEX, SINGLE
from engine_actor.ops import DenseLinear, PackedLinear

SHARD_BYTES = 2 << 30
_PACKED_FIELDS = ("qweight", "scales", "offsets", "zeros", "bias", "perm")


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes `target` when the block ends well, and vanishes if it raises.

    An existing `target` is replaced; a reader that has it open keeps its files (POSIX). Two
    writers of one target need a lock of their own.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        old = target.with_name(f"{target.name}.old-{os.getpid()}")
        if target.exists():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Readable JSON, non-ASCII kept as it is."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def write_packed(
    folder: Path,
    config: Mapping[str, Any],
    weights: Iterable[tuple[str, Weight]],
    source: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json and the weights into an empty folder, at most one shard in memory.

    `config` is the Hugging Face config without quantization_config; `source` says where the
    weights come from. Call it inside atomic_folder.
    """
    linears: dict[str, dict[str, int]] = {}
    shards = _Shards(folder, shard_bytes)
    for name, weight in weights:
        shards.add(_tensors(name, weight))
        if isinstance(weight, PackedLinear):
            linears[name] = {"bits": weight.bits, "group": weight.group}
    shards.flush()
    _name_shards(folder, shards.written, shards.n_bytes)
    section = {
        "quant_method": METHOD,
        "format_version": FORMAT_VERSION,
        "source": dict(source),
        "linears": linears,
    }
    write_json(folder / "config.json", {**config, SECTION: section})


class _Shards:
    """Tensors gathered and written, one file at a time. `written`: the files and what is in each;
    n_bytes: of all tensors.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.written: list[tuple[Path, list[str]]] = []
        self.n_bytes = 0
        self._folder = folder
        self._most_bytes = most_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Tensors that stay together."""
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if self._pending and self._pending_bytes + nbytes > self._most_bytes:
            self.flush()
        self._pending |= tensors
        self._pending_bytes += nbytes
        self.n_bytes += nbytes

    def flush(self) -> None:
        """Write what was gathered."""
        path = self._folder / f"part-{len(self.written):05d}.safetensors"
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors writes 0600; a service often runs as another user
        self.written.append((path, list(self._pending)))
        self._pending.clear()
        self._pending_bytes = 0


def _tensors(name: str, weight: Weight) -> dict[str, torch.Tensor]:
    if isinstance(weight, PackedLinear):
        fields = {field: getattr(weight, field) for field in _PACKED_FIELDS}
    elif isinstance(weight, DenseLinear):
        fields = {"weight": weight.weight, "bias": weight.bias}
    else:
        fields = {"weight": weight}
    return {
        f"{name}.{k}": tensor.contiguous() for k, tensor in fields.items() if tensor is not None
    }


def _name_shards(folder: Path, shards: list[tuple[Path, list[str]]], total: int) -> None:
    """The names Hugging Face uses: one file, or numbered files and their index."""
    if len(shards) == 1:
        shards[0][0].rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
