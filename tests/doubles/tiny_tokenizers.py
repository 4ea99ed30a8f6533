"""Small real tokenizers, trained in the test on a few lines of many scripts: byte-level BPE as
Qwen, Llama 3 and SmolLM use it, and two sentencepiece-like ones with byte fallback as Llama 2 and
Mistral use them. Their vocabularies are small, so that most characters take several tokens.
"""

from __future__ import annotations

from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CORPUS = (
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "def main(argument):\n    return [argument * 2 for _ in range(10)]\n",
    "Köln, Übung, naïve façade, señor, Ærøskøbing",
    "你好,世界。今天天气很好。",
    "こんにちは世界。カタカナ",
    "안녕하세요 세계",
    "Привет, мир! Как дела?",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "🙂 👍🏽 👨‍👩‍👧 🇫🇷 ✨",
)

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS, EOS, IM_START, IM_END = 1, 2, 3, 4


def _specials() -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in SPECIAL]


@cache
def byte_level() -> Tokenizer:
    """GPT-2-like byte-level BPE: every byte is a token, no unknown token is ever made."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=_specials(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _sentencepiece_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    pieces = list(SPECIAL) + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *(chr(code) for code in range(33, 127)), *"éüñ你好世界の안Пр"]
    merges = [
        ("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("▁▁", "▁▁"), ("i", "s"), ("▁", "is"),
        ("P", "a"), ("r", "is"), ("Pa", "ris"), ("▁", "Paris"), ("你", "好"), ("П", "р"),  # noqa: RUF001
    ]  # fmt: skip
    pieces += [left + right for left, right in merges]
    return {piece: index for index, piece in enumerate(pieces)}, merges


@cache
def llama_like() -> Tokenizer:
    """Llama 2's arrangement: normaliser puts one space in front, decoder strips it again."""
    vocabulary, merges = _sentencepiece_vocabulary()
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(_specials())
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """The newer arrangement: Metaspace as pre-tokenizer and decoder, byte fallback before it."""
    vocabulary, merges = _sentencepiece_vocabulary()
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    tokenizer.add_special_tokens(_specials())
    return tokenizer


ALL = {"byte_level": byte_level, "llama_like": llama_like, "metaspace": metaspace}
