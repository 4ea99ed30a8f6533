"""Where a model's GGUF file is: the path itself, or the only one in a folder without safetensors.

No torch: an ingress asks too.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from engine_actor.load.refusal import refusal

SUFFIX = ".gguf"
MOST_NAMES = 10_000


def gguf_of(path: Path) -> Path | None:
    """The file, or None where `path` is no GGUF model. Raises CheckpointError where a folder has
    several: they are different models, or parts of one.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir():
        return None
    names = [entry.name for entry in itertools.islice(path.iterdir(), MOST_NAMES)]
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    files = sorted(name for name in names if name.endswith(SUFFIX))
    if len(files) > 1:
        raise refusal(path, f"has {len(files)} GGUF files ({files[0]}, ...); give the path of one")
    return path / files[0] if files and (path / files[0]).is_file() else None
