"""GGUF models in several files, written by the `gguf` package: the same model as in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_actor.errors import CheckpointError
from engine_actor.load.checkpoint import Checkpoint, open_checkpoint
from engine_actor.load.tokenizer import Tokenizer
from engine_actor.ops import PackedLinear
from tests.load.gguf_maker import VOCAB, write_gguf

PARTS = ["model-00001-of-00004.gguf", "model-00002-of-00004.gguf"]
LAST = "model-00004-of-00004.gguf"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A folder with a model in four files."""
    folder = tmp_path / "parts"
    folder.mkdir()
    write_gguf(folder / "model.gguf", part_tensors=6)
    assert sorted(path.name for path in folder.iterdir())[:2] == PARTS
    return folder


def _tensors(checkpoint: Checkpoint) -> dict[str, list[torch.Tensor]]:
    found = {}
    for name, weight in checkpoint.weights():
        packed = isinstance(weight, PackedLinear)
        found[name] = [weight.qweight, weight.scales] if packed else [weight]
    return found


def test_the_parts_are_the_model_in_one_file(parts: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf")
    whole = _tensors(open_checkpoint(tmp_path / "whole.gguf"))
    for path in (parts, parts / PARTS[0]):
        opened = open_checkpoint(path)
        found = _tensors(opened)
        assert found.keys() == whole.keys()
        for name, tensors in whole.items():
            assert all(map(torch.equal, found[name], tensors)), name
        assert Tokenizer.from_folder(path).vocab_size == VOCAB


def test_another_part_than_the_first_is_refused(parts: Path) -> None:
    with pytest.raises(CheckpointError, match=r"of.00004\.gguf"):
        open_checkpoint(parts / PARTS[1])


def test_a_missing_part_is_named(parts: Path) -> None:
    (parts / LAST).unlink()
    with pytest.raises(CheckpointError, match=rf"^{LAST}: missing: {PARTS[0]} is one of 4 parts$"):
        open_checkpoint(parts)


def test_a_part_of_another_model_is_refused(parts: Path) -> None:
    (parts / PARTS[1]).write_bytes((parts / LAST).read_bytes())
    with pytest.raises(CheckpointError, match=rf"^{PARTS[1]}: is not part 2 of 4$"):
        open_checkpoint(parts)


def test_a_part_that_leads_out_of_the_folder_is_refused(parts: Path, tmp_path: Path) -> None:
    (parts / LAST).rename(tmp_path / LAST)
    (parts / LAST).symlink_to(tmp_path / LAST)
    with pytest.raises(CheckpointError, match="is a link that leads out of its folder"):
        open_checkpoint(parts)


def test_a_part_that_changes_after_the_check_is_refused(parts: Path) -> None:
    opened = open_checkpoint(parts)
    write_gguf(parts / "model.gguf", part_tensors=6, metadata={"general.note": "another"})
    with pytest.raises(CheckpointError, match="was changed since it was checked"):
        next(opened.weights())


def test_two_models_in_one_folder_are_still_refused(parts: Path) -> None:
    write_gguf(parts / "other.gguf")
    with pytest.raises(CheckpointError, match="has 5 GGUF files"):
        open_checkpoint(parts)


@pytest.mark.parametrize("count", [2, 1001])
def test_a_count_that_the_name_contradicts_is_refused(tmp_path: Path, count: int) -> None:
    write_gguf(tmp_path / PARTS[0], metadata={"split.count": count})
    with pytest.raises(CheckpointError, match=r"not named so|is no number of parts"):
        open_checkpoint(tmp_path / PARTS[0])
