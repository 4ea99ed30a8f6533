"""GGUF headers that lie about counts, lengths, types and places: refused, nothing allocated."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.errors import CheckpointError
from engine_actor.load.formats.gguf import GgufFile

HUGE = 2**63


def _string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def _key(name: bytes, kind: int, value: bytes) -> bytes:
    return _string(name) + struct.pack("<I", kind) + value


def _tensor(name: bytes, shape: list[int], kind: int, offset: int = 0) -> bytes:
    head = _string(name) + struct.pack("<I", len(shape))
    return head + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)


def _file(
    keys: list[bytes], tensors: list[bytes], data: int = 0, counts: tuple[int, int] | None = None
) -> bytes:
    n_tensors, n_keys = counts or (len(tensors), len(keys))
    body = struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, n_keys) + b"".join(keys + tensors)
    return body + bytes(-len(body) % 32 + data)


GOOD = _file(
    [_key(b"a", 8, _string(b"x")), _key(b"b", 9, struct.pack("<IQ2I", 4, 2, 5, 6))],
    [_tensor(b"w", [32, 2], 3)],
    data=40,
)

CASES = [
    (b"", "bad.gguf: cannot be read (cannot mmap an empty file)"),
    (b"GGU", "bad.gguf: truncated: the header at byte 0, the file has 3"),
    (b"GGML" + bytes(40), "bad.gguf: not a GGUF file"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "bad.gguf: GGUF version 50331648 cannot be read"),
    (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "bad.gguf: GGUF version 1 cannot be read"),
    (
        _file([], [], counts=(HUGE, 1)),
        f"bad.gguf: absurd: 1 keys and {HUGE} tensors",
    ),
    (
        _file([], [], counts=(9, 1)),
        "bad.gguf: truncated: 1 keys and 9 tensors at byte 24, the file has 32",
    ),
    (_file([], [], counts=(0, HUGE)), f"bad.gguf: absurd: {HUGE} keys and 0 tensors"),
    (
        _file([_string(b"abc", HUGE)], [], data=64),
        f"bad.gguf: absurd: metadata key 0 has {HUGE} bytes of text, at most 16777216 do",
    ),
    (
        _file([_string(b"abc", 1000)], [], data=64),
        "bad.gguf: truncated: metadata key 0 at byte 32",
    ),
    (_file([_key(b"a", 13, b"")], [], data=64), "bad.gguf: a has the unknown type 13"),
    (_file([_key(b"a\n", 77, b"")], [], data=64), "bad.gguf: a\\n has the unknown type 77"),
    (
        _file([_key(b"a", 9, struct.pack("<IQ", 9, 1))], [], data=64),
        "bad.gguf: a is an array of arrays",
    ),
    (
        _file([_key(b"a", 9, struct.pack("<IQ", 8, HUGE))], [], data=64),
        f"bad.gguf: absurd: a has {HUGE} values, at most 4194304 do",
    ),
    (
        _file([_key(b"a", 9, struct.pack("<IQ", 8, 1000))], [], data=64),
        "bad.gguf: truncated: a at byte 49",
    ),
    (
        _file([_key(b"a", 9, struct.pack("<IQ", 10, HUGE))], [], data=64),
        f"bad.gguf: absurd: a has {HUGE} values, at most 4194304 do",
    ),
    (
        _file([_key(b"a", 9, struct.pack("<IQ", 10, 1000))], [], data=64),
        "bad.gguf: truncated: a at byte 49",
    ),
    (
        _file([_key(b"a", 9, struct.pack("<IQ", 8, 1) + _string(b"", HUGE))], [], data=64),
        "bad.gguf: truncated: a at byte 49",
    ),
    (_file([_key(b"a", 0, b"\1")] * 2, [], data=64), "bad.gguf: metadata key a comes twice"),
    (_file([_key(b"\xff", 0, b"\1")], [], data=64), "bad.gguf: metadata key 0 is not UTF-8"),
    (
        _file([_key(b"general.alignment", 4, struct.pack("<I", 0))], [], data=64),
        "general.alignment: 0 is not an alignment",
    ),
    (_file([], [_tensor(b"w", [1], 0)] * 2, data=64), "bad.gguf: tensor w comes twice"),
    (_file([], [_tensor(b"w", [1] * 5, 0)], data=64), "w: 5 dimensions in bad.gguf"),
    (_file([], [_tensor(b"w", [], 0)], data=64), "w: 0 dimensions in bad.gguf"),
    (
        _file([], [_tensor(b"w", [256], 10)], data=256),
        "w: GGUF tensor type Q2_K cannot be read (supported: F32, F16, BF16, Q4_0, Q4_1, "
        "Q5_0, Q5_1, Q8_0, Q3_K, Q4_K, Q5_K, Q6_K); take another file of the model, a Q4_K_M say",
    ),
    (_file([], [_tensor(b"w", [256], 17)], data=256), "w: GGUF tensor type IQ2_XS cannot be read"),
    (_file([], [_tensor(b"w", [256], 99)], data=256), "w: GGUF tensor type type 99 cannot be read"),
    (_file([], [_tensor(b"w", [33], 3)], data=256), "w: row of 33 values is not whole Q4_1 blocks"),
    (
        _file([], [_tensor(b"w", [HUGE, HUGE], 0)], data=64),
        f"bad.gguf: truncated: tensor w ends at byte {96 + HUGE * HUGE * 4} of 160",
    ),
    (
        _file([], [_tensor(b"v", [8], 0), _tensor(b"w", [8], 0, 28)], data=64),
        "bad.gguf: tensor w overlaps v",
    ),
    (
        _file([], [_tensor(b"w", [4], 0, HUGE)], data=64),
        f"bad.gguf: truncated: tensor w ends at byte {64 + HUGE + 16} of 128",
    ),
]


@pytest.mark.parametrize(("content", "message"), CASES)
def test_a_hostile_header_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        GgufFile(path)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_good_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(GOOD)
    with GgufFile(path) as file:
        assert file.metadata == {"a": "x", "b": [5, 6]}
        assert file.tensors["w"].shape == (2, 32)
        assert len(file.read("w")) == 40


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "fuzz.gguf"


def _opens_or_refuses(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    message = ""
    try:
        with GgufFile(path) as file:
            assert all(t.begin + t.nbytes <= len(content) for t in file.tensors.values())
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message


def test_every_truncation_is_refused(scratch: Path) -> None:
    for size in range(len(GOOD)):
        scratch.write_bytes(GOOD[:size])
        with pytest.raises(CheckpointError):
            GgufFile(scratch)


@given(at=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
def test_any_changed_byte_opens_or_is_refused(scratch: Path, at: int, value: int) -> None:
    """Never another exception, never a tensor that reaches past the end."""
    _opens_or_refuses(scratch, GOOD[:at] + bytes([value]) + GOOD[at + 1 :])


@given(content=st.binary(max_size=200))
def test_any_bytes_after_the_magic_open_or_are_refused(scratch: Path, content: bytes) -> None:
    _opens_or_refuses(scratch, b"GGUF\3\0\0\0" + content)
