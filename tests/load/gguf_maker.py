"""Small GGUF files made by the `gguf` package: llama shape, SmolLM2's kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he"]
TOKENS = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "Ġthe"]
VOCAB = len(TOKENS)
HIDDEN, INTER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2


def random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Quantised rows of three very different sizes, as uint8 [rows, bytes]."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(shape, np.float32) * rng.choice([0.01, 1.0, 30.0], (shape[0], 1))
    return gguf.quants.quantize(weights.astype(np.float32), kind)


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (VOCAB - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    if pre != "llama-bpe":  # Llama 3's files do not say, and mean yes
        writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")


def write_gguf(
    path: Path,
    architecture: str = "llama",
    tied: bool = True,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    rope_freqs: list[float] | None = None,
    metadata: dict[str, int | str] | None = None,
    pre: str = "smollm",
    part_tensors: int = 0,
) -> None:
    """A small file by the gguf package: Q4_1 linears, Q8_0 embedding, F32 norms and biases.

    kinds: other types for some linears, by leaf name. metadata: more keys. part_tensors: at most so
    many a file, in files named after `path`.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    _add_tokenizer(writer, pre)
    writer.add_tensor("token_embd.weight", random_blocks(Q8_0, (VOCAB, HIDDEN), 1), raw_dtype=Q8_0)
    _add_layers(writer, architecture, kinds or {})
    if not tied:
        writer.add_tensor("output.weight", np.ones((VOCAB, HIDDEN), np.float16))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_layers(
    writer: gguf.GGUFWriter, architecture: str, kinds: dict[str, gguf.GGMLQuantizationType]
) -> None:
    kv_rows = KV_HEADS * HIDDEN // HEADS
    linears = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv_rows, HIDDEN),
        "attn_v": (kv_rows, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INTER, HIDDEN),
        "ffn_up": (INTER, HIDDEN),
        "ffn_down": (HIDDEN, INTER),
    }
    norms = {"output_norm.weight": HIDDEN}
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        for seed, (name, shape) in enumerate(linears.items()):
            kind = kinds.get(name, Q4_1)
            blocks = random_blocks(kind, shape, 10 * layer + seed)
            writer.add_tensor(f"{at}{name}.weight", blocks, raw_dtype=kind)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                bias = np.linspace(-1, 1, shape[0], dtype=np.float32)
                writer.add_tensor(f"{at}{name}.bias", bias)
        norms |= {f"{at}attn_norm.weight": HIDDEN, f"{at}ffn_norm.weight": HIDDEN}
        if architecture == "qwen3":
            norms |= {f"{at}attn_{x}_norm.weight": HIDDEN // HEADS for x in "qk"}
    for name, size in norms.items():
        writer.add_tensor(name, np.linspace(0, 1, size, dtype=np.float32))
