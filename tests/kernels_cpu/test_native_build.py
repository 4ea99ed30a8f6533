"""Building the native library: which compiler, what name, many processes at once, no compiler."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.linear.reference import linear_reference
from kernels.native import build
from kernels.native.build import BuildError, build_library, cpu_model, find_compiler
from kernels.native.layout import NativeLinear
from kernels.native.library import NativeLibrary
from tests.kernels_cpu.layers import random_layer

FAKE = """#!{python}
import sys
if "--version" in sys.argv:
    print("{version}")
    sys.exit(0)
if "{refuses}" in sys.argv:
    print("x.cpp:1: error: what is {refuses}", file=sys.stderr)
    sys.exit(1)
with open(sys.argv[sys.argv.index("-o") + 1], "w") as out:
    for _ in range(1000):
        out.write("library of " + " ".join(a for a in sys.argv if a.startswith("-m")) + "\\n")
"""


def fake_compiler(folder: Path, refuses: str = "nothing", version: str = "1") -> tuple[str, ...]:
    """Writes a text as the library; fails where it is given the flag `refuses`."""
    script = folder / f"c++-{refuses.strip('-')}-{version}"
    script.write_text(FAKE.format(python=sys.executable, refuses=refuses, version=version))
    script.chmod(0o755)
    return (str(script),)


def test_a_library_is_named_by_all_it_depends_on(tmp_path: Path) -> None:
    """Compiler, version and CPU; the same again is not built again."""
    compiler = fake_compiler(tmp_path)
    first = build_library(tmp_path / "kept", compiler, "AVX2")
    changed = first.stat().st_mtime_ns
    assert build_library(tmp_path / "kept", compiler, "AVX2") == first
    assert first.stat().st_mtime_ns == changed
    assert build_library(tmp_path / "kept", compiler, "AVX512") != first
    newer = fake_compiler(tmp_path, version="2")
    assert build_library(tmp_path / "kept", newer, "AVX2") != first
    assert {path.suffix for path in (tmp_path / "kept").iterdir()} == {".so"}


@pytest.mark.parametrize("raw", ["é 中".encode(), b"a'b \xff"])
def test_b36_any_folder_will_do(tmp_path: Path, raw: bytes) -> None:
    """B-36: a user's name with letters of any script, spaces, or bytes that are no text at all."""
    folder = tmp_path / os.fsdecode(raw)
    made = build_library(folder / "kept", fake_compiler(tmp_path), "AVX2")
    assert made.read_text().startswith("library of ")
    assert made.parent == folder / "kept"


def test_flags_that_a_compiler_does_not_know_are_left_out(tmp_path: Path) -> None:
    made = build_library(tmp_path, fake_compiler(tmp_path, "-march=native"), "x")
    assert made.read_text().startswith("library of -mcpu=native")


def test_a_compiler_that_fails_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cannot build .* error: what is -shared$"):
        build_library(tmp_path / "kept", fake_compiler(tmp_path, "-shared"), "x")
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_complaint_in_another_encoding_is_still_one_line(tmp_path: Path) -> None:
    script = tmp_path / "c++"
    script.write_text('#!/bin/sh\nprintf "g\\377\\n"\n[ "$1" = --version ]\n')
    script.chmod(0o755)
    with pytest.raises(BuildError, match="cannot build the native kernels: no message"):
        build_library(tmp_path / "kept", (str(script),), "x")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot keep a library in"):
        build_library(tmp_path / "file" / "kept", fake_compiler(tmp_path), "x")


def test_processes_that_build_at_once_leave_one_whole_library(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path)
    code = (
        "import sys; from pathlib import Path; from kernels.native.build import build_library; "
        "print(build_library(Path(sys.argv[1]), sys.argv[2:], 'x'))"
    )
    root = Path(build.__file__).parents[2]
    command = [sys.executable, "-c", code, str(tmp_path / "kept"), *compiler]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(4)
    ]
    paths = {process.communicate()[0].strip() for process in processes}
    assert len(paths) == 1
    made = Path(paths.pop())
    assert len(made.read_text().splitlines()) == 1000
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_an_empty_library_is_built_again(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path)
    made = build_library(tmp_path / "kept", compiler, "x")
    whole = made.read_text()
    made.write_text("")
    assert build_library(tmp_path / "kept", compiler, "x") == made
    assert made.read_text() == whole


def test_what_a_killed_build_left_is_swept_away(tmp_path: Path) -> None:
    """Not what another process may be building now."""
    old, new = tmp_path / "building-old", tmp_path / "building-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "native.so").write_text("half")
    os.utime(old, (1, 1))
    made = build_library(tmp_path, fake_compiler(tmp_path), "x")
    assert made.is_file()
    assert not old.exists()
    assert (new / "native.so").read_text() == "half"


def test_which_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """$CXX first, then the path, then the wheel, then the reason."""
    there = {"g++": "/usr/bin/g++", "mine": "/opt/mine"}
    monkeypatch.setattr(build.shutil, "which", there.get)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert find_compiler("mine -m32") == ("mine", "-m32")
    assert find_compiler() == ("/usr/bin/g++",)
    with pytest.raises(BuildError, match="compiler theirs is not there"):
        find_compiler("theirs")
    assert find_compiler("  ") == ("/usr/bin/g++",)
    with pytest.raises(BuildError, match=r"\$CXX cannot be read: no closing quotation"):
        find_compiler('g++ "-m32')
    there.clear()
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        find_compiler()
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: object())
    assert find_compiler() == (sys.executable, "-m", "ziglang", "c++")


def test_unlike_cpus_get_unlike_libraries(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: A\nflags\t: avx2\nbogomips\t: 1\n\nmodel name\t: B\n")
    assert cpu_model(info).splitlines()[1:] == ["model name\t: A", "flags\t: avx2"]
    assert cpu_model(tmp_path / "none")


@pytest.mark.hostcc
def test_plain_loops_equal_the_vector_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX2 (another CPU) the same layout, within fp32 rounding of the sums."""
    monkeypatch.setattr(build, "TUNED_FLAGS", (("-fopenmp-simd",),))
    library = ctypes.CDLL(str(build_library(tmp_path, find_compiler(), "plain")))
    address, count = ctypes.c_void_p, ctypes.c_int64
    library.native_linear.argtypes = [address, address, address, count, ctypes.c_int]
    plain = NativeLibrary(tmp_path, False, library.native_linear, library.native_layers)
    for bits in (3, 4, 8):
        for kind in ("symmetric", "offsets", "zeros"):
            layer = random_layer(21, 100, bits, -1 if bits == 8 else 32, kind, bias=True)
            x = torch.randn(5, 100, generator=torch.Generator().manual_seed(bits))
            want = linear_reference(x, layer)
            error = (NativeLinear(plain, layer)(x) - want).abs().max()
            assert float(error) < 2e-3 * float(want.abs().max())
