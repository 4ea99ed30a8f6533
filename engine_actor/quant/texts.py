"""Texts to calibrate and to measure on: those that come with the package, or a file of the user's.

Built in: `jargon`, an excerpt of The Jargon File 4.4.7 (public domain), to calibrate on, and
`handbook`, this project's own documentation, to measure on. Knows no model but its tokenizer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from engine_actor.load.refusal import refusal
from engine_actor.load.tokenizer import Tokenizer

CALIBRATION = "jargon"
EVALUATION = "handbook"
LENGTH = 512
"""Tokens of a row."""
CALIBRATION_ROWS = {"cpu": 24, "cuda": 64}
"""By kind of device. On text that is not calibrated on, 64 rows leave 5 to 22 % less error than 24
in the linears of a 1.5B; a CPU would take twice as long.
"""
EVALUATION_ROWS = 16
TUNING_ROWS = 256
"""Rows of the calibration text that a model is tuned on, where the text has as many."""
LARGEST_FILE = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """A text as rows of tokens. name: for the report; digest: SHA-256 of the ids."""

    name: str
    tokens: torch.Tensor

    @property
    def digest(self) -> str:
        """Tells two texts apart."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()

    def described(self) -> dict[str, object]:
        """For a report."""
        rows, length = self.tokens.shape
        return {"text": self.name, "rows": rows, "row_tokens": length, "sha256": self.digest}


def token_rows(
    path: Path | None, builtin: str, folder: Path, rows: int, length: int = LENGTH
) -> TokenRows:
    """At most `rows` rows of `length` tokens from the start of a file, or of a built-in text, by
    the tokenizer in `folder`. Raises CheckpointError where there is not even one row.
    """
    name = builtin if path is None else path.name
    ids = Tokenizer.from_folder(folder).encode(_read(path, builtin))
    count = min(rows, len(ids) // length)
    if count == 0:
        raise refusal(name, f"has {len(ids)} tokens, at least {length} are needed")
    return TokenRows(name, torch.tensor(ids[: count * length], dtype=torch.int64).view(count, -1))


def _read(path: Path | None, builtin: str) -> str:
    if path is None:
        return (files("engine_actor.quant") / "texts" / f"{builtin}.txt").read_text("utf-8")
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise refusal(str(path), f"is larger than {LARGEST_FILE >> 20} MiB")
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise refusal(str(path), "is not UTF-8 text") from None
    except OSError as error:
        raise refusal(str(path), f"cannot be read ({error.strerror})") from None
