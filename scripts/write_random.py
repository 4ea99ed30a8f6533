#!/usr/bin/env python3
"""Write a model of random weights as a checkpoint folder that a server can load, for its benches.

    scripts/write_random.py 3b /tmp/random-3b
    scripts/write_random.py 7b /tmp/random-7b-fp16 --dense

The weights are those of random_model.py; with --dense fp16 numbers of the same deviation, as a
model comes from the Hub, to convert. Every id of the vocabulary but the single bytes is a word of
ASCII letters, so that each token is text at once and none waits for the rest of a character.
"""

from __future__ import annotations

import argparse
import itertools
import math
import string
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_actor.build import choose_device
from engine_actor.load.names import LinearSlot, Slot, hub_name, slots
from engine_actor.load.shards import INDEX
from engine_actor.load.writer import atomic_folder, write_json, write_packed
from engine_actor.model.config import ModelConfig
from random_model import SHAPES, Shape, deviation, random_checkpoint

SPECIALS = ("<|begin|>", "<|pad|>", "<|end|>")
"""The last one is the id that random_model.py's shapes name as the end of a text: 2."""
SHARD_BYTES = 2 << 30


def write_random(folder: Path, shape: Shape, device: torch.device, seed: int = 0) -> Path:
    """A folder with the shape's weights and a tokenizer of as many ids; one that is there is
    replaced. Raises OSError."""
    checkpoint = random_checkpoint(shape, device, seed)
    with atomic_folder(folder) as partial:
        source = {"format": "random", "shape": shape.name, "seed": seed}
        write_packed(partial, shape.config, checkpoint.weights(), source)
        _write_companions(partial, shape)
    return folder


def write_dense(folder: Path, shape: Shape, device: torch.device, seed: int = 0) -> Path:
    """A folder as the Hub has it: fp16, a name for each matrix, shards and their index. At most a
    shard is in memory. Raises OSError."""
    draw = torch.Generator(device).manual_seed(seed)
    is_tied = shape.config["tie_word_embeddings"]
    with atomic_folder(folder) as partial:
        weight_map: dict[str, str] = {}
        shard: dict[str, torch.Tensor] = {}

        def flush() -> None:
            file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            save_file(shard, partial / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
            shard.clear()

        for slot in slots(ModelConfig.from_hf(shape.config, None)):
            shard |= _dense(slot, is_tied, draw)
            if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
                flush()
        if shard:
            flush()
        write_json(partial / INDEX, {"metadata": {}, "weight_map": weight_map})
        write_json(partial / "config.json", shape.config)
        _write_companions(partial, shape)
    return folder


def _dense(slot: Slot, is_tied: bool, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """fp16 tensors on the CPU by their names on the Hub."""
    device = draw.device
    if not isinstance(slot, LinearSlot):
        norm = 1 + 0.1 * torch.randn(slot.size, generator=draw, device=device)
        return {hub_name(slot.name) + ".weight": norm.half().cpu()}
    std = deviation(slot.name.rpartition(".")[2], is_tied) / math.sqrt(slot.in_features)
    found = {}
    for part in slot.parts:
        weight = torch.randn(part.rows, slot.in_features, generator=draw, device=device)
        found[hub_name(part.name) + ".weight"] = weight.mul_(std).half().cpu()
        if slot.bias:
            bias = 0.5 * torch.randn(part.rows, generator=draw, device=device)
            found[hub_name(part.name) + ".bias"] = bias.half().cpu()
    return found


def _write_companions(folder: Path, shape: Shape) -> None:
    """What a folder needs beside weights and config.json."""
    write_json(folder / "generation_config.json", {"eos_token_id": [shape.config["eos_token_id"]]})
    word_tokenizer(shape.config["vocab_size"]).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": SPECIALS[2]})


def word_tokenizer(n_ids: int) -> Tokenizer:
    """Three specials, 256 bytes, then words with a space in front: exactly `n_ids` ids. Text is
    encoded a byte an id."""
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    words = ("Ġ" + "".join(word) for word in letters)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *alphabet, *itertools.islice(words, n_ids - len(alphabet) - len(SPECIALS))]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    tokenizer.add_special_tokens(special)
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dense", action="store_true", help="fp16 as from the Hub, to convert")
    args = parser.parse_args(argv)
    write = write_dense if args.dense else write_random
    print(write(args.folder, SHAPES[args.shape], choose_device(args.device), args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
