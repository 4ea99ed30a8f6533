"""A script: convert a checkpoint, dying at the n-th file it would write, for one n after the other.

Each attempt is a forked process that kills itself; the parent then resumes and compares the bytes.
Arguments: the source folder, a folder to work in. Prints one line per attempt.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from engine_actor.errors import CheckpointError
from engine_actor.load import writer
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.progress import silent
from engine_actor.quant import journal as journals
from engine_actor.quant.convert import Job, convert
from engine_actor.quant.recipe import fixed_recipe
from tests.quant.conftest import token_rows


def job_of(source: Path) -> Job:
    """The same job every time."""
    recipe = fixed_recipe("w3", 32)
    checkpoint = open_checkpoint(source)
    rows = (token_rows(4, 32, 1), token_rows(2, 32, 2))
    return Job(checkpoint, "tiny", recipe, *rows, torch.device("cpu"))


def die_at(count: int) -> None:
    """Every write of a file counts; the count-th one is left half done and the process is gone."""
    left = count

    def wrap(save):
        def saving(tensors, path, *args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                Path(path).write_bytes(b"half a file")
                os.kill(os.getpid(), signal.SIGKILL)
            save(tensors, path, *args, **kwargs)

        return saving

    journals.save_file = wrap(journals.save_file)
    writer.save_file = wrap(writer.save_file)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def attempt(source: Path, target: Path, count: int) -> bool:
    """True where the process was killed on the way."""
    child = os.fork()
    if child == 0:
        die_at(count)
        convert(job_of(source), target, silent)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def loads(folder: Path) -> bool:
    """Whether anybody would take the folder for a checkpoint."""
    try:
        open_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def main(source: Path, work: Path) -> None:
    """Every point there is, and one past the last."""
    torch.set_num_threads(1)
    convert(job_of(source), work / "whole", silent)
    expected = contents(work / "whole")
    count, killed = 0, True
    while killed:
        count += 1
        target = work / f"out-{count}"
        killed = attempt(source, target, count)
        if killed:
            assert not target.exists(), count
            assert not any(loads(folder) for folder in work.glob(f"out-{count}*")), count
            convert(job_of(source), target, silent, resume=True)
        assert contents(target) == expected, count
        assert not list(work.glob(f"out-{count}.*")) or killed, count
        print("killed and resumed" if killed else "undisturbed", count)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
