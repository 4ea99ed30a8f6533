"""What the full blocks of a sequence hash to, each with all tokens before it.

Digests are made when somebody asks, once each, and kept with the sequence. Knows no cache and no
memory.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items

from engine_actor.core.sequence import Sequence

Digest = Callable[[bytes, Items[int]], bytes]


def chain_digest(parent: bytes, tokens: Items[int]) -> bytes:
    """Digest of a block and all before it: 16 bytes over the parent's digest and the token ids."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def root_digest(salt: str) -> bytes:
    """What the first block chains to: requests of different salts never share."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class BlockDigests:
    """Digests of the blocks of sequences. Only tests replace `digest`, to force collisions."""

    def __init__(self, block_tokens: int, digest: Digest = chain_digest) -> None:
        self._block_tokens = block_tokens
        self._digest = digest

    def extend(self, seq: Sequence, n_blocks: int) -> None:
        """Make the digests of its first n_blocks blocks that it lacks."""
        hashes, size = seq.block_hashes, self._block_tokens
        first = len(hashes)
        if first >= n_blocks:
            return
        parent = hashes[-1] if hashes else root_digest(seq.salt)
        rest = array("q", seq.tokens[first * size : n_blocks * size])
        for start in range(0, len(rest), size):
            parent = self._digest(parent, rest[start : start + size])
            hashes.append(parent)

    def of(self, seq: Sequence, index: int) -> bytes | None:
        """Of a block and all before it; None where the tokens do not fill it."""
        if (index + 1) * self._block_tokens > len(seq.tokens):
            return None
        self.extend(seq, index + 1)
        return seq.block_hashes[index]

    def tokens(self, seq: Sequence, index: int) -> tuple[int, ...]:
        """What the digest of a block is checked by."""
        size = self._block_tokens
        return tuple(seq.tokens[index * size : (index + 1) * size])
