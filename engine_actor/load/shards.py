"""Safetensors files of a folder: headers checked by hand first, tensors mapped afterwards.

Knows no model: only names, dtypes, shapes and bytes. A header is untrusted input, so every number
in it is held against the file's real size before any tensor is touched.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from engine_actor.load.place import require_inside
from engine_actor.load.refusal import parse_json_object, read_json_object, refusal

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
LARGEST_HEADER_BYTES = 16 << 20
"""A few thousand tensors take less than one; parsed, a header is many times its size."""
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of one tensor; `begin` and `end` count from the end of the header."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin

    def require(self, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the tensor has one of `dtypes` and exactly `shape`."""
        if self.dtype not in dtypes:
            raise refusal(self.name, f"dtype is {self.dtype}, must be {' or '.join(dtypes)}")
        if self.shape != shape:
            raise refusal(self.name, f"shape is {list(self.shape)}, must be {list(shape)}")


def read_header(path: Path) -> tuple[dict[str, TensorInfo], bytes]:
    """Tensors of one safetensors file and the header's bytes. Raises CheckpointError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise refusal(path, f"truncated: {size} bytes are no safetensors file")
            length = int.from_bytes(prefix, "little")
            if length > LARGEST_HEADER_BYTES:
                raise refusal(path, f"header of {length} bytes is over {LARGEST_HEADER_BYTES}")
            if length > size - 8:
                raise refusal(path, f"truncated: header of {length} bytes, {size - 8} are there")
            header = file.read(length)
    except OSError as error:
        raise refusal(path, f"cannot be read ({error.strerror})") from None
    entries = parse_json_object(path, header)
    entries.pop("__metadata__", None)
    tensors = {name: _tensor_info(path, name, entry) for name, entry in entries.items()}
    _require_contiguous(path, tensors, size - 8 - length)
    return tensors, header


def _tensor_info(path: Path, name: str, entry: Any) -> TensorInfo:
    if not isinstance(entry, dict):
        raise refusal(path, f"tensor {name}: its entry is not an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise refusal(path, f"tensor {name}: unknown dtype {dtype!r}")
    if not _are_sizes(shape):
        raise refusal(path, f"tensor {name}: shape {shape!r} is not a list of sizes")
    if not _are_sizes(span) or len(span) != 2 or span[0] > span[1]:
        raise refusal(path, f"tensor {name}: data_offsets {span!r} are not a span")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if span[1] - span[0] != expected:
        raise refusal(
            path,
            f"tensor {name}: {span[1] - span[0]} bytes, but {dtype} {shape} takes {expected}",
        )
    return TensorInfo(name, path, dtype, tuple(shape), span[0], span[1])


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _require_contiguous(path: Path, tensors: dict[str, TensorInfo], available: int) -> None:
    """Tensors must fill the data exactly: an overlap or a gap is a damaged or hostile file."""
    at = 0
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.end > available:
            raise refusal(
                path,
                f"truncated: tensor {info.name} ends at byte {info.end}, {available} are there",
            )
        if info.begin != at:
            word = "overlaps the tensor before it" if info.begin < at else "leaves a gap before it"
            raise refusal(path, f"tensor {info.name} {word} (starts at {info.begin}, not {at})")
        at = info.end
    if at != available:
        raise refusal(path, f"{available - at} bytes after the last tensor")


@dataclass(frozen=True, slots=True)
class ShardSet:
    """All tensors of a folder by name, and a digest of all headers and sizes."""

    tensors: dict[str, TensorInfo]
    digest: str

    @staticmethod
    def open(folder: Path) -> ShardSet:
        """Read the headers of `model.safetensors` or of the shards its index names."""
        wanted: dict[str, str] | None = None
        if (folder / SINGLE).is_file():
            files = [SINGLE]
        elif (folder / INDEX).is_file():
            wanted = _weight_map(folder)
            files = sorted(set(wanted.values()))
        else:
            raise _nothing_to_load(folder)
        digest, tensors = hashlib.sha256(), dict[str, TensorInfo]()
        for file in files:
            path = folder / file
            if not path.is_file():
                raise refusal(INDEX, f"names the shard {file}, which is not in the folder")
            require_inside(folder, path)
            found, header = read_header(path)
            digest.update(f"{file} {path.stat().st_size} ".encode() + header)
            if wanted is not None:
                found = _indexed(wanted, file, found)
            tensors |= found
        if wanted is not None and (lost := sorted(wanted.keys() - tensors.keys())):
            raise refusal(INDEX, f"tensor {lost[0]} is not in the shard {wanted[lost[0]]}")
        return ShardSet(tensors, digest.hexdigest())

    def need(self, name: str) -> TensorInfo:
        """The tensor of that name. Raises CheckpointError where it is missing."""
        info = self.tensors.get(name)
        if info is None:
            raise refusal(name, "missing tensor")
        return info

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], torch.Tensor]]:
        """A function name -> tensor. The tensors stay valid afterwards; shards open only once."""
        with ExitStack() as stack:
            handles: dict[Path, Any] = {}

            def read(name: str) -> torch.Tensor:
                path = self.tensors[name].file
                try:
                    if path not in handles:
                        handles[path] = stack.enter_context(safe_open(path, framework="pt"))
                    tensor: torch.Tensor = handles[path].get_tensor(name)
                except (SafetensorError, OSError) as error:
                    raise refusal(path, f"tensor {name} cannot be read ({error})") from None
                return tensor

            yield read


def _indexed(
    wanted: dict[str, str], file: str, found: dict[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Those of a shard's tensors that the index has there. One that it has elsewhere is a second
    copy, and which of the two is meant nobody knows: refused.
    """
    for name in found.keys() & wanted.keys():
        if wanted[name] != file:
            raise refusal(file, f"holds tensor {name} too, which the index has in {wanted[name]}")
    return {name: info for name, info in found.items() if name in wanted}


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> shard from the index. A shard is a plain file name: no path leaves the folder."""
    weight_map = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refusal(INDEX, "weight_map is missing or empty")
    for name, file in weight_map.items():
        is_plain = isinstance(file, str) and Path(file).name == file and "\\" not in file
        if not is_plain or not file.endswith(".safetensors"):
            raise refusal(
                INDEX, f"tensor {name}: shard {file!r} is not a plain .safetensors file name"
            )
    return weight_map


def _nothing_to_load(folder: Path) -> Exception:
    names = sorted(itertools.islice((entry.name for entry in folder.iterdir()), 10_000))
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        return refusal(
            folder,
            f"has only pickled weights ({pickles[0]}), which can run code and are never loaded: "
            "convert them to safetensors",
        )
    return refusal(folder, f"not a checkpoint: neither {SINGLE} nor {INDEX} is in the folder")
