"""What one linear layer must move and compute, by its key: the floor that a time is held against.

Every byte is counted once: packed weights with their scales, x, and y. Pure arithmetic.
"""

from __future__ import annotations

from kernels.spec.op import OpKey

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
SCALE_BYTES, ZERO_BYTES = 2, 1


def weight_bytes(key: OpKey) -> int:
    """W as it lies in memory: codes, scales, and offsets or zeros; dense where key.bits is 0."""
    if not key.bits:
        return key.n * key.k * ITEM_BYTES[key.dtype]
    groups = -(-key.k // (key.group or key.k))
    shift = {"": 0, "offsets": SCALE_BYTES, "zeros": ZERO_BYTES}[key.affine]
    return key.n * (-(-key.k * key.bits // 8) + groups * (SCALE_BYTES + shift))


def linear_bytes(key: OpKey) -> int:
    """W, x [m, k] and y [m, n], once each."""
    return weight_bytes(key) + ITEM_BYTES[key.dtype] * key.m * (key.k + key.n)


def linear_flops(key: OpKey) -> int:
    """A multiplication and an addition for each weight and row."""
    return 2 * key.m * key.n * key.k
