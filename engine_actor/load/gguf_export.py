"""The tokenizer of a GGUF file, written out as the files of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from engine_actor.load.formats.gguf import GgufFile
from engine_actor.load.gguf_tokenizer import build_tokenizer, named_tokens
from engine_actor.load.writer import write_json


def write_tokenizer(file: GgufFile, folder: Path, max_length: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja (where the file has one)."""
    build_tokenizer(file).save(str(folder / "tokenizer.json"), pretty=False)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
    }
    write_json(folder / "tokenizer_config.json", config | named_tokens(file))
    if template := file.metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(str(template), encoding="utf-8")
