"""The strip header's unpacking, compiled for the host, against the packers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernels.jit.source import KERNELS_FOLDER
from kernels.linear.strip import to_strips
from kernels.pack.dequantise import pack_codes, unpack_codes
from kernels.pack.packed_linear import PackedLinear
from tests.kernels_cpu.layers import random_layer

pytestmark = pytest.mark.hostcc
WORDS = {4: 4, 3: 3}
"""Words of a lane's block, by bits."""


@pytest.fixture(scope="module")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is needed; deselect with -m 'not hostcc'"
    program = tmp_path_factory.mktemp("strip") / "unpack"
    source = Path(__file__).with_name("strip_unpack.cpp")
    flags = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
    command = [compiler, *flags, f"-I{KERNELS_FOLDER / 'include'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def codes_by_header(program: Path, layer: PackedLinear, folder: Path) -> torch.Tensor:
    """i8 [strips * 16, padded K] as the header unpacks the strips of `layer`."""
    words = to_strips(layer).words
    if layer.bits == 3:
        words = words.permute(0, 1, 4, 3, 2).flatten(1, 2)  # the three words of a block together
    strips, blocks = words.shape[:2]
    given, got = folder / "words", folder / "codes"
    given.write_bytes(words.contiguous().numpy().tobytes())
    subprocess.run([str(program), str(layer.bits), str(given), str(got)], check=True)
    flat = torch.frombuffer(bytearray(got.read_bytes()), dtype=torch.int8)
    # strip, block, g, t, j, c, h, element:
    # row g + 8 h, column 64 block + 16 t + 4 j + 2 c + element
    spread = flat.view(strips, blocks, 8, 4, 4, 2, 2, 2).permute(0, 6, 2, 1, 3, 4, 5, 7)
    return spread.reshape(strips * 16, blocks * 64)


@pytest.mark.parametrize("bits", [4, 3])
def test_header_unpacks_what_the_packers_wrote(unpack: Path, bits: int, tmp_path: Path) -> None:
    """Ragged N and K; every code of the layer, and zeros in the padding."""
    for seed, (n, k) in enumerate(((16, 256), (37, 700), (5, 13))):
        layer = random_layer(n, k, bits=bits, group=128, kind="symmetric", seed=seed)
        found = codes_by_header(unpack, layer, tmp_path)
        assert torch.equal(found[:n, :k], unpack_codes(layer))
        assert not found[n:].any()
        assert not found[:, k:].any()


@pytest.mark.parametrize("bits", [4, 3])
def test_header_knows_every_code_in_every_place(unpack: Path, bits: int, tmp_path: Path) -> None:
    """One layer for each value: that code everywhere, its neighbours' bits all different."""
    for code in range(-(2 ** (bits - 1)), 2 ** (bits - 1)):
        codes = torch.full((16, 256), code)
        codes[:, 1::2] = -1 - code
        layer = PackedLinear(bits, -1, 256, pack_codes(codes, bits), torch.ones(16, 1).half())
        assert torch.equal(codes_by_header(unpack, layer, tmp_path), codes.to(torch.int8))
