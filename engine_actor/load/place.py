"""Where a model's files are: a GGUF file by its path or alone in a folder, nothing outside of it.

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
    if not files or not (path / files[0]).is_file():
        return None
    require_inside(path, path / files[0])
    return path / files[0]


def require_inside(folder: Path, path: Path) -> None:
    """Raise CheckpointError where a file of the folder is a link that leads out of it. In the Hub's
    cache every file is such a link, into the blobs of its own repository: those are followed.
    """
    root, real = folder.resolve(), path.resolve()
    if real.is_relative_to(root):
        return
    is_snapshot = root.parent.name == "snapshots"
    if not (is_snapshot and real.is_relative_to(root.parent.parent / "blobs")):
        raise refusal(path, "is a link that leads out of its folder; put the file itself there")
