"""Text to token ids and back, out of a checkpoint folder. What the ingress loads.

Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and
config.json, or a GGUF file's metadata. Uses `tokenizers` and sandboxed jinja2 only: no torch, no
transformers, so that an ingress process stays small. Which special tokens a prompt gets is the
word of tokenizer.json's post-processor alone (the config's `add_bos_token` is passed over, as in
transformers 5). Spaces before punctuation are never "cleaned up", as transformers may do for old
models: text once sent could not be taken back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from engine_actor.load.chat_template import ChatTemplate
from engine_actor.load.chat_template import ChatTemplateError as ChatTemplateError
from engine_actor.load.formats.gguf import GgufFile
from engine_actor.load.gguf_tokenizer import build_tokenizer, ending_ids, named_tokens
from engine_actor.load.place import gguf_of
from engine_actor.load.refusal import read_json_object, refusal
from engine_actor.load.token_bytes import decoder_kinds, piece_bytes

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class Tokenizer:
    """A checkpoint's tokenizer. Safe to share between threads once it is built."""

    def __init__(
        self,
        raw: RawTokenizer,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        # A saved training setting; it would cut long prompts without a word.
        raw.no_truncation()
        raw.no_padding()
        self._raw = raw
        self.special_tokens: Mapping[str, str] = dict(special_tokens or {})
        """Texts of the named special tokens (bos_token, eos_token, ...)."""
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        """Every id that ends a text, ascending."""
        self.vocab_size: int = max(raw.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """Ids are 0..vocab_size-1. The model's embedding may have more rows, as padding."""
        self.chat_template = chat_template
        self._literal = {
            index: token.content for index, token in raw.get_added_tokens_decoder().items()
        }
        self._kinds = decoder_kinds(
            None if raw.decoder is None else json.loads(raw.decoder.__getstate__())
        )

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """Load from a folder, or from a GGUF file (also: of a folder that has no tokenizer.json).

        Raises CheckpointError, in one line, where a file is missing or cannot be read.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            if (gguf := gguf_of(folder)) is not None:
                return cls._from_gguf(gguf)
            raise refusal(path, f"not found in {folder}; a checkpoint needs it")
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise refusal(path, f"cannot be read ({error})") from None
        config = _optional_json(folder / "tokenizer_config.json")
        named = _named_tokens(folder, config)
        template = _template_source(folder, config)
        return cls(
            raw,
            named,
            _eos_ids(folder, raw, named),
            None if template is None else ChatTemplate(template, named),
        )

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer:
        with GgufFile(path) as file:
            named, template = named_tokens(file), file.metadata.get("tokenizer.chat_template")
            return cls(
                build_tokenizer(file),
                named,
                ending_ids(file),
                ChatTemplate(template, named) if isinstance(template, str) else None,
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Raises ValueError where it holds a lone surrogate, which is no text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a lone surrogate at character {error.start}") from None
        ids: list[int] = self._raw.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; ids that are not in the vocabulary have none."""
        text: str = self._raw.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes one id stands for inside a text; empty for an id outside the vocabulary."""
        if token in self._literal:
            return self._literal[token].encode()
        piece = self._raw.id_to_token(token)
        if piece is None:
            return b""
        known = piece_bytes(piece, self._kinds)
        return self.decode([token], skip_special=False).encode() if known is None else known

    def token_text(self, token: int) -> str:
        """One id as text for logprobs. Where it is only part of a character, `bytes:\\xf0\\x9f`, as
        OpenAI writes it: U+FFFD would give many tokens the same name.
        """
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Messages as prompt text; encode it with add_special_tokens=False, the template writes
        them. Raises ChatTemplateError.
        """
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template")
        return self.chat_template.render(messages, add_generation_prompt, **variables)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; tokenizer_config.json wins over special_tokens_map.json."""
    older = _optional_json(folder / "special_tokens_map.json")
    found: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = config.get(name) or older.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the config's own; of several named ones the default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise refusal(path, f"cannot be read ({error})") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {part.get("name"): part.get("template") for part in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _eos_ids(folder: Path, raw: RawTokenizer, named: Mapping[str, str]) -> tuple[int, ...]:
    """All ids that end a text: of generation_config.json, else config.json, and eos_token."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = _optional_json(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int and one >= 0 for one in ids):
            raise refusal(path, f"eos_token_id: {value!r} is not a token id or a list of them")
        if ids:
            found.update(ids)
            break
    if "eos_token" in named and (index := raw.token_to_id(named["eos_token"])) is not None:
        found.add(index)
    return tuple(sorted(found))
