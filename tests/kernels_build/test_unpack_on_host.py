"""kernels/include/packed_codes.cuh under g++: the packers, and bytes typed by hand (S-09, S-11)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernels.jit.source import INCLUDE_FOLDER
from kernels.pack.dequantise import pack_codes

pytestmark = pytest.mark.hostcc
# Reads "bits whole columns" and then bytes from stdin as decimal numbers, prints the codes.
PROGRAM = """
#include <cstdio>
#include <vector>
#include "packed_codes.cuh"
template <int bits, bool whole>
void print_row(const std::vector<unsigned char>& row, int columns) {
    if (row_bytes<bits>(columns) != static_cast<int>(row.size())) { std::puts("bytes"); return; }
    for (int k = 0; k < columns; k += 8) {
        int code[8];
        eight_codes<bits, whole>(row.data(), k, static_cast<int>(row.size()), code);
        for (int i = 0; i < 8 && k + i < columns; ++i) std::printf("%d ", code[i]);
    }
    std::puts("");
}
template <int bits>
void print_any(bool whole, const std::vector<unsigned char>& row, int columns) {
    whole ? print_row<bits, true>(row, columns) : print_row<bits, false>(row, columns);
}
int main() {
    int bits, whole, columns, byte, bytes;
    while (std::scanf("%d %d %d %d", &bits, &whole, &columns, &bytes) == 4) {
        std::vector<unsigned char> row(bytes);
        for (auto& b : row) { if (std::scanf("%d", &byte) != 1) return 1; b = byte; }
        if (bits == 8) print_any<8>(whole, row, columns);
        else if (bits == 4) print_any<4>(whole, row, columns);
        else print_any<3>(whole, row, columns);
    }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled with warnings as errors."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "hostcc tests need a C++ compiler: apt-get install g++"
    folder = tmp_path_factory.mktemp("host")
    (folder / "codes.cpp").write_text(PROGRAM)
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE_FOLDER}"]
    command = [compiler, *options, str(folder / "codes.cpp"), "-o", str(folder / "codes")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "codes"


def unpacked(program: Path, rows: list[tuple[int, bool, int, list[int]]]) -> list[list[int]]:
    """(bits, whole, columns, bytes) of each row -> its codes."""
    lines = [
        f"{bits} {int(whole)} {columns} {len(row)} {' '.join(map(str, row))}"
        for bits, whole, columns, row in rows
    ]
    done = subprocess.run(
        [str(program)], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    return [[int(code) for code in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("bits", "row", "codes"),
    [
        (4, [0xF7], [7, -1]),
        (4, [0x38], [-8, 3]),
        (4, [0x10, 0x32, 0x54, 0x76], [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, [0x88, 0xC6, 0xFA], [0, 1, 2, 3, -4, -3, -2, -1]),
        (3, [0xFF, 0xFF, 0xFF], [-1] * 8),
        (3, [0x04], [-4, 0]),
        (8, [0x00, 0x7F, 0x80, 0xFF], [0, 127, -128, -1]),
    ],
)
def test_golden_bytes(program: Path, bits: int, row: list[int], codes: list[int]) -> None:
    """Typed by hand: our packer had no part in them."""
    assert unpacked(program, [(bits, False, len(codes), row)]) == [codes]


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_every_group_of_bytes(program: Path, bits: int) -> None:
    """All codes in all places: random rows of every length up to 40, as our packer writes them."""
    draw = torch.Generator().manual_seed(bits)
    low = -(2 ** (bits - 1))
    rows, wanted = [], []
    for columns in range(1, 41):
        codes = torch.randint(low, -low, (25, columns), generator=draw)
        for packed, row in zip(pack_codes(codes, bits).tolist(), codes.tolist(), strict=True):
            for whole in (False, True) if columns % 8 == 0 else (False,):
                rows.append((bits, whole, columns, packed))
                wanted.append(row)
    assert unpacked(program, rows) == wanted
