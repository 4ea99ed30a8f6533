"""The compiler, its cache and its errors, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kernels.jit import toolkit
from kernels.jit.compile import CompileError, architecture, compile_cubin, define_options
from kernels.jit.cubin_cache import Cubin, Resources, load_cubin, set_cubin_folder, store_cubin
from kernels.jit.kernel import CudaSource
from kernels.jit.nvrtc import nvrtc
from kernels.jit.source import included_files
from kernels.jit.toolkit import ToolkitMissing, include_folders
from tests.house_rules.sources import ROOT

SOURCE = """\
#include <cuda_fp16.h>
#include "factor.cuh"
extern "C" __global__ void scale(half* x, int n) {
    __shared__ half tile[WIDTH];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) x[threadIdx.x] = __float2half(FACTOR) * tile[n];
}
extern "C" __global__ void clear(float* x) { x[threadIdx.x] = 0.f; }
"""
ELF = b"\x7fELF"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A source with a header of its own beside it."""
    path = tmp_path / "scale.cu"
    path.write_text(SOURCE)
    (tmp_path / "factor.cuh").write_text("#define FACTOR 2.f\n")
    return path


@pytest.mark.parametrize("sm", [80, 86, 89, 90])
def test_compiles_without_a_gpu(program: Path, cubins: Path, sm: int) -> None:
    """Machine code for the asked architecture, with what each entry takes."""
    cubin = compile_cubin(program, {"WIDTH": 64}, sm)
    assert cubin.code.startswith(ELF)
    assert set(cubin.resources) == {"scale", "clear"}
    scale = cubin.of("scale")
    assert (scale.spill_bytes, scale.shared_bytes) == (0, 128)
    assert 2 < scale.registers < 32
    with pytest.raises(
        LookupError, match=r"no kernel is named 'x'; there are \['clear', 'scale'\]"
    ):
        cubin.of("x")


def test_the_key_holds_everything_that_changes_the_code(program: Path, cubins: Path) -> None:
    """Defines, architecture, the source and any header it includes."""

    def compiled(width: int = 64, sm: int = 86) -> int:
        compile_cubin(program, {"WIDTH": width}, sm)
        return len(list(cubins.iterdir()))

    assert [compiled(), compiled(), compiled(width=32), compiled(sm=80)] == [1, 1, 2, 3]
    (program.parent / "factor.cuh").write_text("#define FACTOR 3.f\n")
    assert compiled() == 4
    program.write_text(SOURCE.replace("0.f", "1.f"))
    assert compiled() == 5


def test_a_kept_cubin_is_not_compiled_again(
    program: Path, cubins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process of a machine starts without a compiler run."""
    first = compile_cubin(program, {"WIDTH": 64}, 86)
    monkeypatch.setattr(type(nvrtc()), "compile", None)
    assert compile_cubin(program, {"WIDTH": 64}, 86) == first


@pytest.mark.parametrize("damage", [b"", b"deepinfer-cubin-1\n{}\n", b"junk"])
def test_a_damaged_file_is_compiled_again(program: Path, cubins: Path, damage: bytes) -> None:
    """Half a file, an old form, or nothing."""
    first = compile_cubin(program, {"WIDTH": 64}, 86)
    (kept,) = cubins.iterdir()
    kept.write_bytes(damage)
    assert load_cubin(kept.stem) is None
    assert compile_cubin(program, {"WIDTH": 64}, 86) == first
    kept.write_bytes(kept.read_bytes()[:-1])
    assert load_cubin(kept.stem) is None


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, cubins: Path) -> None:
    """The kernel runs all the same."""
    (tmp_path / "file").write_text("")
    set_cubin_folder(tmp_path / "file" / "cubins")
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept"):
        store_cubin("key", Cubin(b"", {"f": Resources(1, 0, 0)}))


def test_processes_at_once(program: Path, cubins: Path) -> None:
    """Four processes that start with an empty folder end with one file and the same code."""
    script = f"""
        import hashlib
        from pathlib import Path
        from kernels.jit.compile import compile_cubin
        from kernels.jit.cubin_cache import set_cubin_folder
        set_cubin_folder(Path({str(cubins)!r}))
        code = compile_cubin(Path({str(program)!r}), {{"WIDTH": 64}}, 86).code
        print(hashlib.sha256(code).hexdigest())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    printed = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * 4, printed
    assert len({out for out, _ in printed}) == 1
    assert [path.suffix for path in cubins.iterdir()] == [".cubin"]


def test_errors_show_the_line(program: Path, cubins: Path) -> None:
    """File, line, the compiler's words, the line's text, and under which defines."""
    program.write_text(SOURCE.replace("= 0.f", "= nothing"))
    with pytest.raises(CompileError) as raised:
        compile_cubin(program, {"WIDTH": 64}, 86)
    head, where, line = str(raised.value).splitlines()
    assert head == "scale.cu does not compile for sm_86 with WIDTH=64"
    assert where == '  scale.cu:9: error: identifier "nothing" is undefined'
    assert line.strip().startswith('extern "C" __global__ void clear')
    (program.parent / "factor.cuh").write_text("#define FACTOR 2.f\nint f( { }\n")
    with pytest.raises(CompileError, match=r"factor.cuh:2: error: [^\n]*\n *int f\( \{ \}"):
        compile_cubin(program, {"WIDTH": 64}, 86)


def test_an_architecture_newer_than_nvrtc_is_named(program: Path, cubins: Path) -> None:
    """Not the compiler's "invalid value for --gpu-architecture"."""
    with pytest.raises(CompileError, match=r"does not know sm_999; it knows .*86"):
        compile_cubin(program, {"WIDTH": 64}, 999)


def test_missing_headers_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one sentence a user needs."""
    include_folders.cache_clear()
    monkeypatch.setattr(toolkit, "_roots", lambda: iter(()))
    with pytest.raises(ToolkitMissing, match=r"cuda_fp16.h was not found: install nvidia-cuda-nv"):
        include_folders()
    monkeypatch.undo()
    include_folders.cache_clear()
    assert (include_folders()[0] / "cuda_fp16.h").exists()


@pytest.mark.parametrize("raw", ["é 中".encode(), b"a'b \xff"])
def test_b36_any_folder_will_do(program: Path, tmp_path: Path, raw: bytes) -> None:
    """B-36: a user's name with letters of any script, spaces, or bytes that are no text at all; the
    source, its header and the cache all lie there."""
    folder = tmp_path / os.fsdecode(raw)
    folder.mkdir()
    for path in (program, program.with_name("factor.cuh")):
        path.rename(folder / path.name)
    set_cubin_folder(folder / "cubins")
    try:
        cubin = compile_cubin(folder / program.name, {"WIDTH": 64}, 86)
        assert set(cubin.resources) == {"scale", "clear"}
        assert len(list((folder / "cubins").iterdir())) == 1
        assert compile_cubin(folder / program.name, {"WIDTH": 64}, 86).code == cubin.code
    finally:
        set_cubin_folder(None)


def test_headers_of_headers_are_found(program: Path) -> None:
    """Ours and CUDA's, each once."""
    names = [path.name for path in included_files(program, include_folders())]
    assert {"scale.cu", "factor.cuh", "cuda_fp16.h", "cuda_fp16.hpp"} <= set(names)
    assert len(names) == len(set(names))


def test_hopper_gets_its_own_instructions() -> None:
    """wgmma needs sm_90a; equal defines make equal options."""
    assert [architecture(sm) for sm in (86, 90)] == ["sm_86", "sm_90a"]
    assert (
        define_options({"B": 1, "A": 2}) == define_options({"A": 2, "B": 1}) == ["-DA=2", "-DB=1"]
    )


def test_a_kernel_costs_nothing_before_it_is_used() -> None:
    """Backends are module-level objects: making one must not look for a compiler."""
    script = """
        import sys
        from kernels.jit.kernel import CudaSource
        CudaSource("no/such.cu").kernel("f", {"A": 1}, shared_bytes=1024)
        assert "cupy" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, check=True)
    kernel = CudaSource("no/such.cu").kernel("f", {"B": 1, "A": 2})
    assert repr(kernel) == "no/such.cu:f(A=2, B=1)"
