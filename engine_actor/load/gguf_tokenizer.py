"""The tokenizer inside a GGUF file as the files of a Hugging Face folder.

Knows byte-level BPE (`gpt2`) with the pre-tokenizers named below, and refuses others: a wrong
splitter gives other tokens for the same text without any error.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_actor.load.formats.gguf import GgufFile
from engine_actor.load.refusal import refusal
from engine_actor.load.writer import write_json

_CONTROL = 3
_KINDS = ("bos", "eos", "unk", "pad")
_GGUF_KINDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name != "smollm":
        raise refusal("tokenizer.ggml.pre", f"{name!r} cannot be read (supported: 'smollm')")
    # The digits come first: every digit is a token of its own, and the space before a number
    # stays alone too. Plain ByteLevel would keep " 1" together.
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """A tokenizer with the file's vocabulary, merges and control tokens. Raises CheckpointError."""
    model = file.value("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise refusal("tokenizer.ggml.model", f"{model!r} cannot be read (supported: 'gpt2')")
    if file.metadata.get("tokenizer.ggml.add_bos_token", False):
        raise refusal("tokenizer.ggml.add_bos_token", "true cannot be honoured")
    tokens = file.value("tokenizer.ggml.tokens", list)
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise refusal("tokenizer.ggml.tokens", "a token comes twice")
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges", list)]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise refusal("tokenizer.ggml.merges", f"{' '.join(merge)!r} is not a merge of tokens")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(file.value("tokenizer.ggml.pre", str))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.value("tokenizer.ggml.token_type", list)
    if len(kinds) != len(tokens):
        raise refusal("tokenizer.ggml.token_type", "must have one entry per token")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    return tokenizer


def write_tokenizer(file: GgufFile, folder: Path, max_length: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja (where the file has one)."""
    build_tokenizer(file).save(str(folder / "tokenizer.json"), pretty=False)
    tokens = file.value("tokenizer.ggml.tokens", list)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_prefix_space": False,
    }
    for kind in _KINDS:
        key = f"tokenizer.ggml.{_GGUF_KINDS[kind]}_token_id"
        if (index := file.metadata.get(key)) is None:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            raise refusal(key, f"{index!r} is not a token id")
        config[f"{kind}_token"] = tokens[index]
    write_json(folder / "tokenizer_config.json", config)
    if template := file.metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(str(template), encoding="utf-8")
