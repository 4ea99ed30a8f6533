"""GGUF files: metadata and where each tensor lies. Little endian, versions 2 and 3.

Knows no model and no block layout beyond its size. Every count and length comes from the file, so
each is held against the bytes that are really there before anything is allocated.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from engine_actor.load.refusal import refusal

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LARGEST_ALIGNMENT = 1 << 20
LONGEST_NAME = 1024
MOST_DIMENSIONS = 4
MOST_ENTRIES = 1 << 16
"""Keys, or tensors, of one file."""
MOST_VALUES = 1 << 22
"""Of one array; the largest vocabularies have 2^18. As Python objects they take ten times more."""
LONGEST_TEXT = 16 << 20
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
BLOCKS = {
    **{"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20)},
    **{"Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)},
    **{"Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)},
}
"""Types we read: values and bytes of one block."""
_TYPE_NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"},
    **{22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor; `shape` is outermost first, as torch has it (the file says it the other way)."""

    name: str
    type: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class GgufFile:
    """An opened file: `metadata` (strings, numbers, lists of them) and `tensors` by name."""

    def __init__(self, path: Path) -> None:
        """Parse the header. Raises CheckpointError with one line that names the key or tensor."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: mmap of an empty file
            raise refusal(path, f"cannot be read ({error})") from None
        try:
            header = _Header(path, self._map)
            self.metadata, self.tensors = header.parse()
            self.header_bytes = header.end
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()

    @property
    def digest(self) -> str:
        """Changes with the header and with the size of the file, hexadecimal."""
        return hashlib.sha256(self._map[: self.header_bytes] + b"%d" % len(self._map)).hexdigest()

    def read(self, name: str) -> bytes:
        """A copy of a tensor's bytes."""
        tensor = self.tensors[name]
        return self._map[tensor.begin : tensor.begin + tensor.nbytes]

    def need(self, name: str) -> GgufTensor:
        """The tensor of that name. Raises CheckpointError where it is missing."""
        if name not in self.tensors:
            raise refusal(name, "missing tensor")
        return self.tensors[name]

    def value(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """A metadata value of the given Python type. Raises CheckpointError naming the key."""
        value = self.metadata.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            state = "missing" if value is None else f"has the wrong type {type(value).__name__}"
            raise refusal(key, f"{state} in {self.path.name}")
        return value


class _Header:
    """A cursor over the mapped file that never reads past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size = path, data, len(data)
        self._at, self._what = 0, "the header"

    @property
    def end(self) -> int:
        """Bytes read so far."""
        return self._at

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._take(4) != MAGIC:
            raise refusal(self._path, "not a GGUF file")
        version = self._unpack("<I")
        if version not in VERSIONS:
            raise refusal(self._path, f"GGUF version {version} cannot be read (supported: 2, 3)")
        n_tensors, n_keys = self._unpack("<Q"), self._unpack("<Q")
        if max(n_tensors, n_keys) > MOST_ENTRIES:
            raise refusal(self._path, f"absurd: {n_keys} keys and {n_tensors} tensors")
        # 12 and 24 bytes are the least that one key and one tensor take.
        self._require(n_keys * 12 + n_tensors * 24, f"{n_keys} keys and {n_tensors} tensors")
        metadata = self._metadata(n_keys)
        described = self._described(n_tensors)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= LARGEST_ALIGNMENT:
            raise refusal("general.alignment", f"{alignment!r} is not an alignment")
        base = -(-self._at // alignment) * alignment
        tensors = {name: self._place(name, base, *rest) for name, rest in described.items()}
        self._require_apart(tensors)
        return metadata, tensors

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for number in range(count):
            self._what = f"metadata key {number}"
            key = self._string()
            self._what = key
            if key in metadata:
                raise refusal(self._path, f"metadata key {key} comes twice")
            metadata[key] = self._value(self._unpack("<I"))
        return metadata

    def _described(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        described: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for number in range(count):
            self._what = f"tensor {number}"
            name = self._string()
            self._what = name
            if name in described or len(name) > LONGEST_NAME:
                raise refusal(self._path, f"tensor {name} comes twice or has too long a name")
            dimensions = self._unpack("<I")
            if not 1 <= dimensions <= MOST_DIMENSIONS:
                raise refusal(name, f"{dimensions} dimensions in {self._path.name}")
            shape = tuple(self._unpack("<Q") for _ in range(dimensions))
            described[name] = (shape[::-1], self._unpack("<I"), self._unpack("<Q"))
        return described

    def _place(
        self, name: str, base: int, shape: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        type_name = _TYPE_NAMES.get(kind, f"type {kind}")
        if type_name not in BLOCKS:
            known = ", ".join(BLOCKS)
            why = f"GGUF tensor type {type_name} cannot be read (supported: {known})"
            raise refusal(name, f"{why}; take another file of the model, a Q4_K_M say")
        values, block_bytes = BLOCKS[type_name]
        if shape[-1] % values:
            raise refusal(name, f"row of {shape[-1]} values is not whole {type_name} blocks")
        nbytes = math.prod(shape) // values * block_bytes
        if base + offset + nbytes > self._size:
            raise refusal(
                self._path,
                f"truncated: tensor {name} ends at byte {base + offset + nbytes} of {self._size}",
            )
        return GgufTensor(name, type_name, shape, base + offset, nbytes)

    def _require_apart(self, tensors: dict[str, GgufTensor]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.begin):
            if tensor.begin < end:
                raise refusal(self._path, f"tensor {tensor.name} overlaps {before}")
            end, before = tensor.begin + tensor.nbytes, tensor.name

    def _require(self, count: int, what: str) -> None:
        if count > self._size - self._at:
            raise refusal(
                self._path, f"truncated: {what} at byte {self._at}, the file has {self._size}"
            )

    def _take(self, count: int) -> bytes:
        self._require(count, self._what)
        self._at += count
        return self._data[self._at - count : self._at]

    def _unpack(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        raw = self._take(self._at_most(self._unpack("<Q"), LONGEST_TEXT, "bytes of text"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise refusal(self._path, f"{self._what} is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._unpack(f"<{self._code(kind)}")

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise refusal(self._path, f"{self._what} has the unknown type {kind}")
        return _SCALARS[kind]

    def _array(self) -> list[Any]:
        kind, count = self._unpack("<I"), self._unpack("<Q")
        self._at_most(count, MOST_VALUES, "values")
        if kind == _ARRAY:
            raise refusal(self._path, f"{self._what} is an array of arrays")
        if kind == _STRING:
            self._require(count * 8, self._what)
            return self._strings(count)
        code = self._code(kind)
        self._require(count * struct.calcsize(f"<{code}"), self._what)
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))

    def _at_most(self, count: int, most: int, what: str) -> int:
        if count > most:
            raise refusal(self._path, f"absurd: {self._what} has {count} {what}, at most {most} do")
        return count

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has 1e5 strings, so this loop keeps its state in locals."""
        data, at, end = self._data, self._at, self._size
        length_at: Callable[[Any, int], tuple[int]] = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(count):
            begin = at + 8
            stop = begin + length_at(data, at)[0] if begin <= end else end + 1
            if stop > end:
                self._require(stop - self._at, self._what)
            # Some vocabularies hold raw bytes; a replacement would make two tokens one.
            strings.append(data[begin:stop].decode("utf-8", "surrogateescape"))
            at = stop
        self._at = at
        return strings
