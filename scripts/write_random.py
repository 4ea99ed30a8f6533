#!/usr/bin/env python3
"""Write a model of random weights as a checkpoint folder that a server can load, for its benches.

    scripts/write_random.py 3b /tmp/random-3b

The weights are those of random_model.py. Every id of the vocabulary but the single bytes is a word
of ASCII letters, so that each token is text at once and none waits for the rest of a character.
"""

from __future__ import annotations

import argparse
import itertools
import string
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_actor.build import choose_device
from engine_actor.load.writer import atomic_folder, write_json, write_packed
from random_model import SHAPES, Shape, random_checkpoint

SPECIALS = ("<|begin|>", "<|pad|>", "<|end|>")
"""The last one is the id that random_model.py's shapes name as the end of a text: 2."""


def write_random(folder: Path, shape: Shape, device: torch.device, seed: int = 0) -> Path:
    """A folder with the shape's weights and a tokenizer of as many ids; one that is there is
    replaced. Raises OSError."""
    checkpoint = random_checkpoint(shape, device, seed)
    with atomic_folder(folder) as partial:
        source = {"format": "random", "shape": shape.name, "seed": seed}
        write_packed(partial, shape.config, checkpoint.weights(), source)
        write_json(
            partial / "generation_config.json", {"eos_token_id": [shape.config["eos_token_id"]]}
        )
        word_tokenizer(shape.config["vocab_size"]).save(str(partial / "tokenizer.json"))
        write_json(partial / "tokenizer_config.json", {"eos_token": SPECIALS[2]})
    return folder


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
    args = parser.parse_args(argv)
    print(write_random(args.folder, SHAPES[args.shape], choose_device(args.device), args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
