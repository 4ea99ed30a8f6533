"""Tensor maps: how Hopper's tensor memory accelerator finds boxes in a matrix (sm_90 and newer).

The driver encodes them; a kernel takes one by value as `const __grid_constant__`. Knows no kernel.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from kernels.jit import driver

_BYTES, _ALIGNMENT = 128, 64
_FLOAT16, _RANK = 6, 2
_NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _ZEROS_OUTSIDE = 0, 3, 3, 0
_ELEMENT_BYTES = 2


def tensor_map(x: torch.Tensor, box_rows: int) -> bytes:
    """The map of contiguous fp16 x [M, K] in boxes of `box_rows` (up to 256) rows by 64 columns.

    Boxes lie in shared memory as rows of 128 bytes in 128-byte swizzle; outside of x they hold
    zeros. K must be a multiple of 8. Raises LaunchError with the driver's reason.
    """
    return _encode(x.data_ptr(), x.shape[0], x.shape[1], box_rows)


@lru_cache(maxsize=1024)
def _encode(address: int, rows: int, columns: int, box_rows: int) -> bytes:
    """Only numbers go in, so a map stays right for whatever tensor lies there later."""
    room = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    aligned = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
    status = driver.driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        ctypes.c_int(_FLOAT16),
        ctypes.c_uint(_RANK),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * _RANK)(columns, rows),
        (ctypes.c_uint64 * (_RANK - 1))(columns * _ELEMENT_BYTES),
        (ctypes.c_uint32 * _RANK)(64, box_rows),
        (ctypes.c_uint32 * _RANK)(1, 1),
        ctypes.c_int(_NO_INTERLEAVE),
        ctypes.c_int(_SWIZZLE_128),
        ctypes.c_int(_PROMOTE_256),
        ctypes.c_int(_ZEROS_OUTSIDE),
    )
    driver.check(status, f"a map of fp16 [{rows}, {columns}] in boxes of {box_rows} rows")
    return ctypes.string_at(aligned, _BYTES)
