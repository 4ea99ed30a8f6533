"""Decoder layers over a few rows in one call of the native library: norms, linears, rotation, the
write to the paged cache, attention and the gated activation, without a Python op between them.

Knows the C structs and which layers fit them; knows no model family and no scheduler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.native.layout import NativeLinear
from kernels.native.library import native_library

MOST_ROWS = 64
"""Beyond it torch's attention and dense products win."""
MOST_QUERIES = 32
"""Query heads of a KV head, as in attention.h."""
_Address = ctypes.c_void_p


class _Shape(ctypes.Structure):
    """As `Shape` in attention.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("intermediate", "block_tokens", "window")),
        ("eps", ctypes.c_float),
        ("query_scale", ctypes.c_float),
    )


class _Layer(ctypes.Structure):
    """As `Layer` in layers.cpp."""

    _fields_ = (
        *((name, _Address) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")),
        ("qkv", _Address * 3),
        ("o", _Address),
        ("gate_up", _Address * 2),
        ("down", _Address),
    )


class _Step(ctypes.Structure):
    """As `Step` in attention.h."""

    _fields_ = (
        *((name, _Address) for name in ("x", "positions", "slots", "sequences", "tables")),
        ("table_width", ctypes.c_int64),
        ("cos", _Address),
        ("sin", _Address),
        ("rows", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class NativeShape:
    """What all layers share. window: keys a row sees, None for all."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    block_tokens: int
    window: int | None
    eps: float
    query_scale: float


@dataclass(frozen=True, slots=True)
class NativeLayerWeights:
    """One layer: what its linears run for few rows, and its norms (fp32, on the CPU)."""

    qkv: Sequence[object]
    o: object
    gate_up: Sequence[object]
    down: object
    attn_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None

    @property
    def linears(self) -> tuple[object, ...]:
        """All of them."""
        return (*self.qkv, self.o, *self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class NativeStep:
    """The rows of one forward: positions and slots i64[T], tables i32[B, W]; sequences i32[T] says
    whose table a row reads, None where row r reads table r. cos, sin: fp32 [positions, head_dim].
    """

    positions: torch.Tensor
    slots: torch.Tensor
    sequences: torch.Tensor | None
    tables: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def refuse_layers(
    shape: NativeShape, layers: Sequence[NativeLayerWeights], kv_dtype: torch.dtype
) -> str | None:
    """Why the layers cannot run in one call, or None."""
    library = native_library()
    if isinstance(library, str):
        return library
    if kv_dtype != torch.float32:
        return "the KV cache is not fp32"
    if shape.head_dim % 8:
        return f"head_dim {shape.head_dim} is not a multiple of 8"
    if shape.heads // shape.kv_heads > MOST_QUERIES:
        return f"more than {MOST_QUERIES} query heads share a KV head"
    for linear in (linear for layer in layers for linear in layer.linears):
        if not isinstance(linear, NativeLinear):
            return "a linear runs on another kernel"
        if linear.permutes:
            return "a linear reads its input in another order (act-order)"
    return None


class NativeLayers:
    """Layers that refuse_layers() lets pass. Called from one thread at a time."""

    def __init__(self, shape: NativeShape, layers: Sequence[NativeLayerWeights]) -> None:
        library = native_library()
        assert not isinstance(library, str)
        self._library = library
        self._kept = tuple(layers)
        values = (getattr(shape, name) or 0 for name in NativeShape.__slots__)
        self._shape = _Shape(*values)
        self._layers = (_Layer * len(layers))(*(_layer_struct(layer) for layer in layers))
        self._starts = [
            ctypes.addressof(self._layers) + i * ctypes.sizeof(_Layer) for i in range(len(layers))
        ]

    def run(
        self, x: torch.Tensor, kv: Sequence[torch.Tensor], step: NativeStep, first: int, last: int
    ) -> None:
        """Layers first..last-1 over x fp32 [T, hidden], in place; kv: all layers' caches. Raises
        MemoryError before anything is changed.
        """
        if first == last:
            return
        count = last - first
        caches = (_Address * count)(*(cache.data_ptr() for cache in kv[first:last]))
        sequences = step.sequences
        rows = _Step(
            x.data_ptr(),
            step.positions.data_ptr(),
            step.slots.data_ptr(),
            None if sequences is None else sequences.data_ptr(),
            step.tables.data_ptr(),
            step.tables.shape[1],
            step.cos.data_ptr(),
            step.sin.data_ptr(),
            x.shape[0],
        )
        library = self._library
        if library.layers(
            ctypes.addressof(self._shape),
            self._starts[first],
            count,
            ctypes.addressof(caches),
            ctypes.addressof(rows),
            library.threads(),
        ):
            raise MemoryError("no memory for the activations of a native step")


def _layer_struct(layer: NativeLayerWeights) -> _Layer:
    def addresses(linears: Sequence[object]) -> list[int]:
        return [linear.address for linear in linears if isinstance(linear, NativeLinear)]

    norms = (layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    return _Layer(
        *(None if norm is None else norm.data_ptr() for norm in norms),
        (_Address * 3)(*addresses(layer.qkv)),
        *addresses([layer.o]),
        (_Address * 2)(*addresses(layer.gate_up)),
        *addresses([layer.down]),
    )
