"""A checkpoint folder, opened: all that headers can prove is proved before a weight is read.

Knows the two folder formats (plain and packed); knows nothing of devices, memory or requests.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from configs.schema import ModelSource
from engine_actor.errors import CheckpointError
from engine_actor.load.formats import awq, compressed_tensors, dense, gptq, native
from engine_actor.load.formats.base import Entry, Read, Weight
from engine_actor.load.formats.gguf_split import open_gguf
from engine_actor.load.gguf_config import hub_config
from engine_actor.load.gguf_model import GgufWeights
from engine_actor.load.gguf_model import plan as plan_gguf
from engine_actor.load.gguf_tokenizer import ending_ids
from engine_actor.load.place import gguf_of
from engine_actor.load.refusal import one_line, read_json_object, refusal
from engine_actor.load.self_check import SelfCheck
from engine_actor.load.shards import ShardSet
from engine_actor.model.config import ModelConfig

LOGGER = logging.getLogger(__name__)
CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
OLDER_SECTION = "compression_config"
"""What compressed-tensors called the section before transformers gave all of them one name."""
OLDER_GPTQ = "quantize_config.json"
"""Where GPTQ repositories kept their settings before config.json had them."""
_PLANNERS: dict[str, Callable[[ModelConfig, ShardSet, dict[str, Any]], list[Entry]]] = {
    native.METHOD: native.plan,
    gptq.METHOD: gptq.plan_gptq,
    awq.METHOD: awq.plan_awq,
    compressed_tensors.METHOD: compressed_tensors.plan_compressed,
}
"""quant_method of config.json -> its reader."""
_SHOWN = {native.METHOD: "packed"}


class WeightSource(Protocol):
    """Where stored tensors are read from: the shards of a folder, or a GGUF file."""

    @property
    def digest(self) -> str: ...

    def reading(self) -> AbstractContextManager[Read]: ...


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the linears are stored: (bits, group, number of linears), most frequent first; bits 0
    are dense ones. group -1 is the whole row.
    """

    format: str
    kinds: tuple[tuple[int, int, int], ...]

    def __str__(self) -> str:
        """For a log line: `packed: 120 x W4 group 32, 1 x W8 group 32`."""
        texts = [
            f"{count} x W{bits} group {group}" if bits else f"{count} dense"
            for bits, group, count in self.kinds
        ]
        return f"{self.format}: {', '.join(texts)}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder, or a GGUF file, that is known to be whole.

    `nbytes` are the bytes of the weights in their stored form, from headers. `fingerprint` changes
    with the config, any header and any file size, not with the place of the folder.
    """

    folder: Path
    config: ModelConfig
    quantisation: Quantisation
    nbytes: int
    fingerprint: str
    source: WeightSource
    entries: tuple[Entry, ...]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a text, of generation_config.json and config.json."""
        return frozenset(self.config.eos_token_ids)

    @property
    def packed(self) -> bool:
        """Whether every linear of every layer is."""
        return all(
            entry.bits
            for entry in self.entries
            if entry.name.startswith("layers.") and not entry.name.endswith("norm")
        )

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""
        return self.config.max_model_len

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """(canonical name, weight) on the CPU, one after the other.

        A linear is a PackedLinear or DenseLinear, a norm a 1-D tensor. Unfused tensors are views of
        the mapped file: read them, do not write into them. Raises CheckpointError for a value that
        is not finite; logs a warning where the weights look garbled (self_check.py).
        """
        check = SelfCheck(self.config)
        with self.source.reading() as read:
            for entry in self.entries:
                loaded = entry.load(read)
                parts = loaded if isinstance(loaded, dict) else {entry.name: loaded}
                for name, weight in parts.items():
                    check.take(name, weight)
                    yield name, weight
        for line in check.warnings():
            LOGGER.warning("%s: self-check: %s", self.folder.name, line)

    def usable_vocab_size(self) -> int:
        """Ids the tokenizer can name; the rows of the embedding above them are padding."""
        path = self.folder / TOKENIZER
        if not path.is_file():
            return self.config.vocab_size
        tokenizer = read_json_object(path)
        model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        listed = range(len(vocab)) if isinstance(vocab, list) else ()
        ids = list(vocab.values() if isinstance(vocab, dict) else listed)
        tokens = added if isinstance(added, list) else ()
        ids += [token.get("id") for token in tokens if isinstance(token, dict)]
        largest = max((i for i in ids if type(i) is int), default=-1)
        if largest < 0:
            raise refusal(path, "has no vocabulary")
        return min(self.config.vocab_size, largest + 1)


def context_length(source: ModelSource, checkpoint: Checkpoint) -> int:
    """Tokens of the context: as asked for, at most the checkpoint's. Raises CheckpointError."""
    asked, most = source.max_model_len, checkpoint.max_model_len
    if asked is not None and asked > most:
        raise CheckpointError(f"model.max_model_len: {asked} is more than the checkpoint's {most}")
    return asked or most


def open_checkpoint(path: Path) -> Checkpoint:
    """Read config and headers of a folder, or of a GGUF file. Raises CheckpointError with one line
    that names the key, file or tensor; no weight has been read by then.
    """
    if (gguf := gguf_of(path)) is not None:
        return _open_gguf(path, gguf)
    if not path.is_dir():
        raise refusal(str(path), "not a folder")
    if not (path / CONFIG).is_file():
        raise refusal(path, f"not a checkpoint: {CONFIG} is not in the folder")
    raw = read_json_object(path / CONFIG)
    generation = read_json_object(path / GENERATION) if (path / GENERATION).is_file() else None
    older = raw.pop(OLDER_SECTION, None)
    section = raw.pop(native.SECTION, None) or older or _older_section(path)
    format_name = _format_of(section)
    config = _config(raw, generation)
    shards = ShardSet.open(path)
    if format_name == "dense":
        entries = dense.plan(config, shards)
    else:
        assert isinstance(section, dict)  # _format_of has seen to it
        entries = _PLANNERS[format_name](config, shards, section)
    settings = json.dumps([raw, generation, section], sort_keys=True)
    return _checkpoint(
        path, config, _SHOWN.get(format_name, format_name), settings, shards, entries
    )


def _open_gguf(path: Path, gguf: Path) -> Checkpoint:
    with open_gguf(gguf) as file:
        config = _config({**hub_config(file), "eos_token_id": list(ending_ids(file))}, None)
        entries = plan_gguf(file, config)
        types = Counter(t.type for t in file.tensors.values() if len(t.shape) > 1)
        shown = " ".join(["gguf", *(name for name, _ in types.most_common())])
        return _checkpoint(path, config, shown, "", GgufWeights(gguf, file.digest), entries)


def _config(raw: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    try:
        return ModelConfig.from_hf(raw, generation)
    except CheckpointError as error:
        # Its keys and values are the file's own words: make them printable.
        raise CheckpointError(one_line(str(error))) from None


def _checkpoint(
    path: Path,
    config: ModelConfig,
    format_name: str,
    settings: str,
    source: WeightSource,
    entries: list[Entry],
) -> Checkpoint:
    return Checkpoint(
        folder=path,
        config=config,
        quantisation=_summary(format_name, entries),
        nbytes=sum(entry.nbytes for entry in entries),
        fingerprint=hashlib.sha256(f"{source.digest} {settings}".encode()).hexdigest(),
        source=source,
        entries=tuple(entries),
    )


def _format_of(section: Any) -> str:
    """The name of the format: `dense` without a quantization_config. Others are refused by name."""
    if section is None:
        return "dense"
    method = section.get("quant_method") if isinstance(section, dict) else None
    if not isinstance(method, str) or method not in _PLANNERS:
        known = ", ".join(repr(name) for name in _PLANNERS)
        raise refusal(
            f"{native.SECTION}.quant_method",
            f"{method!r} cannot be read (supported: none, {known})",
        )
    return method


def _older_section(folder: Path) -> dict[str, Any] | None:
    path = folder / OLDER_GPTQ
    return {**read_json_object(path), "quant_method": gptq.METHOD} if path.is_file() else None


def _summary(format_name: str, entries: list[Entry]) -> Quantisation:
    linears = [entry for entry in entries if not entry.name.endswith("norm")]
    counts = Counter((entry.bits, entry.group) for entry in linears)
    return Quantisation(
        format_name, tuple((bits, group, n) for (bits, group), n in counts.most_common())
    )
