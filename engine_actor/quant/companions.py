"""What a converted folder takes over from its source besides weights: settings and tokenizer.

Knows folders and GGUF files; nothing of weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from engine_actor.load.checkpoint import CONFIG, Checkpoint
from engine_actor.load.formats.gguf import GgufFile
from engine_actor.load.formats.native import SECTION
from engine_actor.load.gguf_config import hub_config, special_ids
from engine_actor.load.gguf_export import write_tokenizer
from engine_actor.load.place import gguf_of
from engine_actor.load.refusal import read_json_object
from engine_actor.load.writer import write_json

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
)
"""Files that belong beside the weights, copied where they are there."""


def source_config(source: Checkpoint) -> dict[str, Any]:
    """The Hugging Face config of a source, without its quantization_config."""
    if (path := gguf_of(source.folder)) is not None:
        with GgufFile(path) as file:
            return hub_config(file)
    config = read_json_object(source.folder / CONFIG)
    config.pop(SECTION, None)
    return config


def write_companions(source: Checkpoint, folder: Path) -> None:
    """Tokenizer, chat template and generation settings into `folder`."""
    if (path := gguf_of(source.folder)) is not None:
        with GgufFile(path) as file:
            write_json(folder / "generation_config.json", special_ids(file))
            write_tokenizer(file, folder, source.max_model_len)
        return
    for name in COMPANIONS:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)
