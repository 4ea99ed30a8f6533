"""Rotary embedding as a config.json describes it, old form and new, and its frequencies.

Old form: `rope_theta` and `rope_scaling`; since transformers 5 one dict `rope_parameters`. Types we
can prove equal to transformers are built (default, linear, llama3, yarn); others are refused.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from engine_actor.errors import CheckpointError

DEFAULT_THETA = 10000.0
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
        }
    ),
}
_REQUIRED: dict[str, frozenset[str]] = {
    **_KEYS,
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
LARGEST = sys.float_info.max
"""An int may be larger than any float."""
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A scaled rotary embedding. `kind`: linear, llama3 or yarn; other fields as in config.json."""

    kind: str
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0


def read_rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling or None). Raises CheckpointError naming the key."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    section = config.get(name) or {}
    if not isinstance(section, dict):
        raise CheckpointError(f"config.json: {name} must be an object, got {section!r}")
    kind = section.get("rope_type", section.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS:
        raise CheckpointError(f"config.json: {name}.rope_type {kind!r} is not supported")
    for key, value in section.items():
        if key not in _KEYS[kind] | _COMMON and value is not None:
            raise CheckpointError(f"config.json: {name}.{key} is not supported with type {kind!r}")
    if section.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"config.json: {name}.partial_rotary_factor must be 1")
    theta = _number(
        section.get("rope_theta", config.get("rope_theta")), "rope_theta", DEFAULT_THETA
    )
    return theta, _scaling(kind, section, name)


def _scaling(kind: str, section: dict[str, Any], name: str) -> RopeScaling | None:
    if kind == "default":
        return None
    missing = sorted(key for key in _REQUIRED[kind] if section.get(key) is None)
    if missing:
        raise CheckpointError(f"config.json: {name}.{missing[0]} is missing for type {kind!r}")
    given = {key: section[key] for key in _KEYS[kind] if section.get(key) is not None}
    for key, value in given.items():
        if key != "truncate":
            _number(value, f"{name}.{key}", 0.0)
    return RopeScaling(kind=kind, **given)


def _number(value: Any, name: str, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise CheckpointError(f"config.json: {name} must be a positive number, got {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    """An integer of thousands of digits is refused by repr itself."""
    return "a huge one" if isinstance(value, int) and abs(value) > LARGEST else repr(value)


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> list[float]:
    """Radians per position of each of the head_dim / 2 pairs."""
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain]
    if scaling.kind == "llama3":
        return [_llama3(f, scaling) for f in plain]
    return _yarn(plain, theta, head_dim, scaling)


def _llama3(frequency: float, s: RopeScaling) -> float:
    """Long waves are stretched, short ones kept, those between blended."""
    wave = 2 * math.pi / frequency
    original = s.original_max_position_embeddings
    if wave < original / s.high_freq_factor:
        return frequency
    if wave > original / s.low_freq_factor:
        return frequency / s.factor
    share = (original / wave - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1 - share) * frequency / s.factor + share * frequency


def _yarn(plain: list[float], theta: float, head_dim: int, s: RopeScaling) -> list[float]:
    """Pairs that turn often within the trained context are kept, slow ones stretched."""

    def pair_of(rotations: float) -> float:
        waves = s.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(theta))

    low, high = pair_of(s.beta_fast), pair_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    blended = []
    for i, frequency in enumerate(plain):
        stretched = min(max((i - low) / width, 0.0), 1.0)
        blended.append(frequency * (1 - stretched) + frequency / s.factor * stretched)
    return blended
