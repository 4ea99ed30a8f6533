"""Which program converts: a run can only be gone on with by the one that began it."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch

DIGITS = 12


@cache
def program() -> str:
    """torch's version and a digest of this package's sources: what decides codes."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()[:DIGITS]}, torch {torch.__version__}"
