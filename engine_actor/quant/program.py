"""Which program converts: a run can only be gone on with by the one that began it."""

from __future__ import annotations

import hashlib
import inspect
from functools import cache
from pathlib import Path

import torch

from engine_actor import ops

DIGITS = 12


def sources() -> list[Path]:
    """What decides codes: this package, and the kernels that round and pack."""
    folders = Path(__file__).parent, Path(inspect.getfile(ops.gptq_columns)).parent
    kinds = "*.py", "*.cu"
    return [path for folder in folders for kind in kinds for path in sorted(folder.glob(kind))]


@cache
def program() -> str:
    """torch's version and a digest of the sources."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()[:DIGITS]}, torch {torch.__version__}"
