"""Where a model's files are: a GGUF file by its path or alone in a folder, nothing outside of it.

No torch: an ingress asks too.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from engine_actor.load.refusal import refusal

SUFFIX = ".gguf"
MOST_NAMES = 10_000


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Part:
    """A file name such as `model-00001-of-00003.gguf`."""

    model: str
    number: int
    count: int

    def name(self, number: int) -> str:
        """Of another part of the same model."""
        return f"{self.model}-{number:05d}-of-{self.count:05d}{SUFFIX}"


def part_of(name: str) -> Part | None:
    """What the name says, None where it is no part's."""
    match = _PART.fullmatch(name)
    return None if match is None else Part(match[1], int(match[2]), int(match[3]))


def gguf_of(path: Path) -> Path | None:
    """The file, the first where a model has several, or None where `path` is no GGUF model. Raises
    CheckpointError where a folder has several models.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir():
        return None
    names = [entry.name for entry in itertools.islice(path.iterdir(), MOST_NAMES)]
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    files = sorted(name for name in names if name.endswith(SUFFIX))
    if len(files) > 1 and not _are_one_model(files):
        raise refusal(path, f"has {len(files)} GGUF files ({files[0]}, ...); give the path of one")
    if not files or not (path / files[0]).is_file():
        return None
    require_inside(path, path / files[0])
    return path / files[0]


def _are_one_model(files: list[str]) -> bool:
    """Whether they are parts of the same; that none is missing is seen when it is opened."""
    parts = [part_of(name) for name in files]
    return len({None if part is None else (part.model, part.count) for part in parts}) == 1 and (
        parts[0] is not None and parts[0].number == 1
    )


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
