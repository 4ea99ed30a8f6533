"""Uniform numbers keyed by (seed, position): the same draw alone, in any batch and on any device.

Knows no tensors and keeps no state, so a preempted and recomputed sequence draws the same again.
"""

from __future__ import annotations

import zlib

from engine_actor.core.sequence import Key

_MASK = 2**64 - 1
_POSITION_KEY = 0x6A09E667F3BCC909  # sets positions apart from seeds of the same value


def mix(value: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014): a bijection of 64-bit numbers in which each input bit flips half the output.
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for the token at `position`. Any integer seed."""
    word = mix(mix(seed & _MASK) ^ mix(position ^ _POSITION_KEY))
    return (word >> 11) * 2.0**-53


def unseeded(base_seed: int, key: Key) -> int:
    """The seed of a request that named none: the engine's base seed and the request's key."""
    client, rid = key
    return mix(base_seed & _MASK) ^ mix((zlib.crc32(client.encode()) << 32) ^ rid)
