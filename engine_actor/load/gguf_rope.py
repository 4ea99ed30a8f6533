"""How a GGUF file says that its rotary embedding is scaled, as config.json would say it.

Two ways: keys (only `linear` is honoured) and a tensor of factors per pair, which is how llama.cpp
keeps the llama3 rule. Knows no weights beyond that tensor.
"""

from __future__ import annotations

import struct
from typing import Any

from engine_actor.load.formats.gguf import GgufFile
from engine_actor.load.refusal import refusal
from engine_actor.model.rope_config import RopeScaling, inverse_frequencies

FREQUENCIES = "rope_freqs.weight"
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of every published Llama 3.x. The file keeps only what follows from them."""


def rope_section(file: GgufFile, name: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling` of the config.json. Raises CheckpointError for a rule we cannot name."""
    kind = file.metadata.get(f"{name}.rope.scaling.type", "none")
    if FREQUENCIES in file.tensors:
        if kind != "none":
            raise refusal(FREQUENCIES, f"comes together with rope.scaling.type {kind!r}")
        return _llama3(file, theta, head_dim)
    if kind == "none":
        return None
    if kind != "linear":
        raise refusal(f"{name}.rope.scaling.type", f"{kind!r} cannot be read (supported: linear)")
    return {"rope_type": "linear", "factor": file.value(f"{name}.rope.scaling.factor", float)}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    tensor = file.tensors[FREQUENCIES]
    if tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise refusal(FREQUENCIES, f"must be F32 [{head_dim // 2}]")
    found = struct.unpack(f"<{head_dim // 2}f", file.read(FREQUENCIES))
    factor = round(max(found), 4)
    section: dict[str, Any] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    if factor >= 1:
        scaling = RopeScaling(
            "llama3",
            factor,
            _LLAMA3["original_max_position_embeddings"],  # type: ignore[arg-type]
            _LLAMA3["low_freq_factor"],
            _LLAMA3["high_freq_factor"],
        )
        plain = inverse_frequencies(theta, head_dim, None)
        scaled = inverse_frequencies(theta, head_dim, scaling)
        expected = [a / b for a, b in zip(plain, scaled, strict=True)]
        if all(abs(a - b) <= 1e-4 * b for a, b in zip(found, expected, strict=True)):
            return section
    raise refusal(FREQUENCIES, "its factors are not those of Llama 3's rule")
