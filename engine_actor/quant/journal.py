"""The work folder of an unfinished conversion: which layers are done, and where the text stands.

A file appears under its name only when it is whole, and a layer counts only once the journal names
it: a process may be killed at any point. Knows no method.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine_actor.load.lock import exclusive
from engine_actor.load.refusal import read_json_object, refusal

SUFFIX = ".unfinished"
JOURNAL = "journal.json"
LOCK = "lock"


@contextmanager
def at_work(target: Path) -> Iterator[None]:
    """Hold the work folder of `target`. Raises CheckpointError where another process has it."""
    folder = target.with_name(target.name + SUFFIX)
    folder.mkdir(parents=True, exist_ok=True)

    def busy() -> None:
        raise refusal(folder, "another process is at work here")

    with exclusive(folder / LOCK, busy):
        yield


class Journal:
    """Layers finished so far, with what each was measured to be. Opens or starts a work folder."""

    def __init__(self, target: Path, settings: Mapping[str, Any], resume: bool) -> None:
        """Raises CheckpointError where a work folder is there and resume was not asked for, or
        where it belongs to a run with other settings.
        """
        self.folder = target.with_name(target.name + SUFFIX)
        self._settings = json.loads(json.dumps(settings))
        self._layers: list[dict[str, Any]] = []
        self._tuned: dict[str, Any] | None = None
        if not (self.folder / JOURNAL).is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            for litter in self.folder.glob("*.safetensors*"):
                litter.unlink()  # of a run that died before its first line
            self._write()
            return
        if not resume:
            raise refusal(
                self.folder, "an unfinished run is here: go on with --resume, or delete the folder"
            )
        found = read_json_object(self.folder / JOURNAL)
        if found.get("settings") != self._settings:
            changed = _first_difference(found.get("settings"), self._settings)
            why = f"the unfinished run had another {changed}; give what it had or delete the folder"
            raise refusal(self.folder, why)
        self._layers = list(found.get("layers") or [])
        self._tuned = found.get("tuned")

    @property
    def finished(self) -> list[dict[str, Any]]:
        """One entry per finished layer, in order."""
        return self._layers

    def finish(
        self,
        tensors: Mapping[str, torch.Tensor],
        tracks: Mapping[str, torch.Tensor],
        entry: Mapping[str, Any],
    ) -> None:
        """Keep one more layer: packed tensors, the hidden states behind it, what was measured."""
        number = len(self._layers)
        self._save(f"layer-{number:05d}.safetensors", tensors)
        self._save(f"tracks-{number:05d}.safetensors", tracks)
        self._layers.append(json.loads(json.dumps(entry)))
        self._write()
        (self.folder / f"tracks-{number - 1:05d}.safetensors").unlink(missing_ok=True)

    @property
    def tuned(self) -> dict[str, Any] | None:
        """What tuning the whole model came to; None before."""
        return self._tuned

    def keep_tuned(
        self,
        layers: Sequence[Mapping[str, torch.Tensor]],
        norm: torch.Tensor,
        entry: Mapping[str, Any],
    ) -> None:
        """From now on layer() gives these tensors."""
        for number, tensors in enumerate(layers):
            self._save(f"tuned-{number:05d}.safetensors", tensors)
        self._save("tuned-norm.safetensors", {"norm": norm})
        self._tuned = json.loads(json.dumps(entry))
        self._write()

    def layer(self, number: int) -> dict[str, torch.Tensor]:
        """The tensors of a finished layer."""
        kind = "layer" if self._tuned is None else "tuned"
        return read_kept(self.folder / f"{kind}-{number:05d}.safetensors")

    def tuned_norm(self) -> torch.Tensor:
        """The norm before the head, after tuning."""
        return read_kept(self.folder / "tuned-norm.safetensors")["norm"]

    def tracks(self) -> dict[str, torch.Tensor]:
        """The hidden states behind the last finished layer."""
        return read_kept(self.folder / f"tracks-{len(self._layers) - 1:05d}.safetensors")

    def remove(self) -> None:
        """The conversion is whole: nothing of the work is needed any more."""
        shutil.rmtree(self.folder)

    def _save(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        keep_tensors(self.folder / name, tensors)

    def _write(self) -> None:
        partial = self.folder / f"{JOURNAL}.partial"
        with partial.open("w", encoding="utf-8") as file:
            found = {"settings": self._settings, "layers": self._layers, "tuned": self._tuned}
            json.dump(found, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / JOURNAL)


def keep_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file that is whole once it has its name, after a loss of power too."""
    partial = path.with_name(f"{path.name}.partial")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, partial)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def read_kept(path: Path) -> dict[str, torch.Tensor]:
    """What keep_tensors wrote. Raises CheckpointError where somebody has damaged or removed it."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        why = str(error).splitlines()[0]
        raise refusal(path, f"{why}; delete the unfinished run and begin again") from None


def _first_difference(old: Any, new: Mapping[str, Any]) -> str:
    if not isinstance(old, dict):
        return "version"
    for key, value in new.items():
        if old.get(key) != value:
            return f"{key} ({_detail(old.get(key), value)})"
    return "set of options"


def _detail(old: Any, new: Any) -> str:
    """`codes: True, now False`: the first plain values that differ."""
    if old is None or new is None:
        return "now none" if new is None else "it had none"
    before, after = _flat(old), _flat(new)
    names = [*after, *before]
    for name in names:
        if before.get(name) != after.get(name):
            return f"{name}{before.get(name)}, now {after.get(name)}"
    return "with other parts"


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {f"{at}: " if at else "": value}
    return {
        k: v for key, inner in value.items() for k, v in _flat(inner, f"{at} {key}".strip()).items()
    }
