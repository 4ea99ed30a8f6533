"""A GGUF model in several files, as llama.cpp's gguf-split writes it: the first has the metadata,
each has some of the tensors. Looks like one file. Knows names and counts, no tensor's meaning.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine_actor.load.formats.gguf import GgufFile
from engine_actor.load.place import part_of, require_inside
from engine_actor.load.refusal import refusal

MOST_PARTS = 1000


def open_gguf(path: Path) -> GgufFile:
    """The file, or the whole model where it is the first of several. Raises CheckpointError with
    one line that names the part.
    """
    file = GgufFile(path)
    count = file.metadata.get("split.count", 1)
    if count in (0, 1):
        return file
    file.close()
    return SplitGgufFile(path, _rest(path, count))


class SplitGgufFile(GgufFile):
    """The first part with the tensors of all."""

    def __init__(self, path: Path, rest: list[Path]) -> None:
        super().__init__(path)
        self._parts: list[GgufFile] = []
        self._owners: dict[str, GgufFile] = {}
        try:
            for number, other in enumerate(rest, 1):
                self._add(number, GgufFile(other))
            whole = self.metadata.get("split.tensors.count", len(self.tensors))
            if len(self.tensors) != whole:
                raise refusal(path, f"its parts have {len(self.tensors)} tensors of {whole}")
        except BaseException:
            self.close()
            raise

    def _add(self, number: int, part: GgufFile) -> None:
        self._parts.append(part)
        count = self.metadata["split.count"]
        said = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if said != (number, count):
            raise refusal(part.path, f"is not part {number + 1} of {count}")
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                raise refusal(part.path, f"tensor {name} is in another part too")
            self.tensors[name] = tensor
            self._owners[name] = part

    def close(self) -> None:
        """All parts."""
        super().close()
        for part in self._parts:
            part.close()

    @property
    def digest(self) -> str:
        """Changes with the header and size of any part, hexadecimal."""
        whole = hashlib.sha256(super().digest.encode())
        for part in self._parts:
            whole.update(part.digest.encode())
        return whole.hexdigest()

    def read(self, name: str) -> bytes:
        """A copy of a tensor's bytes."""
        owner = self._owners.get(name)
        return super().read(name) if owner is None else owner.read(name)


def _rest(path: Path, count: object) -> list[Path]:
    """The other parts, all of them there."""
    if type(count) is not int or not 2 <= count <= MOST_PARTS:
        raise refusal("split.count", f"{count!r} is no number of parts")
    named = part_of(path.name)
    if named is None or named.count != count:
        raise refusal(path, f"is one of {count} parts but not named so: NAME-00001-of-{count:05d}")
    if named.number != 1:
        raise refusal(path, f"is part {named.number} of {count}; give the first, {named.name(1)}")
    rest = [path.with_name(named.name(number)) for number in range(2, count + 1)]
    for other in rest:
        if not other.is_file():
            raise refusal(other, f"missing: {path.name} is one of {count} parts")
        require_inside(path.parent, other)
    return rest
