"""The tokenizer inside a GGUF file.

Knows byte-level BPE (`gpt2`) with the pre-tokenizers named below and sentencepiece's BPE (`llama`),
and refuses others: a wrong splitter gives other tokens for the same text without any error. No
torch: an ingress loads this.
"""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from engine_actor.load.formats.gguf import GgufFile
from engine_actor.load.refusal import refusal

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
SPACE = "\u2581"
LONGEST_PIECE = 256
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Our name of a special token -> the GGUF key's."""
ENDING_KEYS = ("eos", "eot", "eom")
ENDING_TEXTS = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>"}
)
"""Control tokens that end a text whatever the keys say: files name one of several only."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITTERS = {
    "qwen2": _WORDS % r"\p{N}",
    "llama-bpe": _WORDS % r"\p{N}{1,3}",
    "deepseek-r1-qwen": _WORDS % r"\p{N}",
}
"""tokenizer.ggml.pre -> the expression in the model's published tokenizer.json."""
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Those whose text is first brought into Unicode's composed form."""
_WITH_BOS = frozenset({"llama-bpe", "llama"})
"""Those whose prompts begin with bos where the file does not say."""
HINT = "put the model's tokenizer.json into a folder with the file"


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        # The digits come first: every digit is a token of its own, and the space before a number
        # stays alone too. Plain ByteLevel would keep " 1" together.
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name not in _SPLITTERS:
        known = ", ".join(repr(known) for known in ("gpt-2", "smollm", *_SPLITTERS))
        raise refusal("tokenizer.ggml.pre", f"{name!r} cannot be read (supported: {known}); {HINT}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITTERS[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """A tokenizer with the file's vocabulary, merges and added tokens. Raises CheckpointError."""
    model = file.value("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise refusal(
            "tokenizer.ggml.model", f"{model!r} cannot be read (supported: 'gpt2', 'llama'); {HINT}"
        )
    tokens = file.value("tokenizer.ggml.tokens", list)
    vocab = _vocabulary(tokens)
    tokenizer = _byte_level(file, vocab) if model == "gpt2" else _sentencepiece(file, vocab)
    _add_tokens(tokenizer, file, tokens)
    _add_bos(tokenizer, file, tokens)
    return tokenizer


def _byte_level(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    pre = file.value("tokenizer.ggml.pre", str)
    splitter, merges = _pre_tokenizer(pre), _merges(file, vocab)
    # Llama 3 keeps a whole word that is in the vocabulary, even where its merges lead elsewhere.
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    """BPE that joins, of all neighbours, those whose union has the highest score. As merges: each
    token in two parts, in the order of its score.
    """
    scores = file.value("tokenizer.ggml.scores", list)
    unknown = token_id(file, "unk", len(vocab))
    if len(scores) != len(vocab) or not all(type(score) is float for score in scores):
        raise refusal("tokenizer.ggml.scores", "must have one number per token")
    if unknown is None or max(map(len, vocab)) > LONGEST_PIECE:
        raise refusal("tokenizer.ggml.tokens", f"has no unknown token, or a very long one; {HINT}")
    texts = list(vocab)
    joined = set(_of_kind(file, texts, NORMAL)) | set(_of_kind(file, texts, USER_DEFINED))
    ranked = sorted(joined, key=lambda token: (-scores[vocab[token]], vocab[token]))
    merges = [
        (token[:at], token[at:])
        for token in ranked
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    ends: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in file.value("tokenizer.ggml.merges", list):
        left, gap, right = str(merge).partition(" ")
        if not gap or " " in right or not {left, right, left + right} <= vocab.keys():
            raise refusal("tokenizer.ggml.merges", f"{merge!r} is not a merge of tokens")
        merges.append((left, right))
    return merges


def _vocabulary(tokens: list[Any]) -> dict[str, int]:
    if not all(isinstance(token, str) and _is_text(token) for token in tokens):
        raise refusal("tokenizer.ggml.tokens", "must be texts")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise refusal("tokenizer.ggml.tokens", "a token comes twice")
    return vocab


def _is_text(found: str) -> bool:
    """False for bytes of the file that are no UTF-8."""
    try:
        found.encode()
    except UnicodeEncodeError:
        return False
    return True


def _add_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    for kind in (CONTROL, USER_DEFINED):
        added = [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token in _of_kind(file, tokens, kind)
        ]
        if kind == CONTROL:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _of_kind(file: GgufFile, tokens: list[str], wanted: int) -> list[str]:
    kinds = file.value("tokenizer.ggml.token_type", list)
    if len(kinds) != len(tokens):
        raise refusal("tokenizer.ggml.token_type", "must have one entry per token")
    return [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]


def _add_bos(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    kinds = {file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")}
    # A sentencepiece file often has the pre `default`, so either name decides.
    if not file.metadata.get("tokenizer.ggml.add_bos_token", bool(kinds & _WITH_BOS)):
        return
    index = token_id(file, "bos", len(tokens))
    if index is None:
        raise refusal("tokenizer.ggml.add_bos_token", "is true, and there is no bos_token_id")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="bos $A", special_tokens=[{"id": "bos", "ids": [index], "tokens": [tokens[index]]}]
    )


def token_id(file: GgufFile, kind: str, size: int) -> int | None:
    """The id of bos, eos, eot, eom, unk or pad; None where the file has none.

    Raises CheckpointError where it is no id of a vocabulary of `size`.
    """
    key = f"tokenizer.ggml.{NAMED.get(kind, kind)}_token_id"
    index = file.metadata.get(key)
    if index is not None and (type(index) is not int or not 0 <= index < size):
        raise refusal(key, f"{index!r} is not a token id")
    return index


def named_tokens(file: GgufFile) -> dict[str, str]:
    """bos_token, eos_token, ... -> its text, those that the file names. Raises CheckpointError."""
    tokens = file.value("tokenizer.ggml.tokens", list)
    ids = {kind: token_id(file, kind, len(tokens)) for kind in NAMED}
    return {f"{kind}_token": tokens[index] for kind, index in ids.items() if index is not None}


def ending_ids(file: GgufFile) -> tuple[int, ...]:
    """Every id that ends a text, ascending. Raises CheckpointError."""
    tokens = file.value("tokenizer.ggml.tokens", list)
    found = {token_id(file, kind, len(tokens)) for kind in ENDING_KEYS} - {None}
    control = ENDING_TEXTS.intersection(_of_kind(file, tokens, CONTROL))
    texts = {index for index, token in enumerate(tokens) if token in control}
    return tuple(sorted({index for index in found if index is not None} | texts))
