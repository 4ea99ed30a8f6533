"""Random lives of sequences over the KV manager: no leak, no double free, right content."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine_actor.core.digests import chain_digest
from engine_actor.core.kv_manager import KVManager
from engine_actor.core.params import SamplingParams
from engine_actor.core.sequence import Sequence as Request

BLOCK = 2
LARGEST = 12


def weak_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Two digests for all blocks of two tokens, blind to what stands before them."""
    return bytes([sum(tokens) % 2])


class KVMachine(RuleBasedStateMachine):
    """Sequences are admitted, computed, extended, released; the pool is resized under them. `cells`
    is the KV: the token written at each offset of each block.
    """

    sequences: Bundle[Request] = Bundle("sequences")
    digest = staticmethod(chain_digest)

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(LARGEST, BLOCK, digest=self.digest)
        self.live: list[Request] = []
        self.cells: dict[int, list[int]] = {}
        self.shared: dict[bytes, bool] = {}

    @rule(
        target=sequences,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "x"]),
    )
    def create(self, tokens: list[int], salt: str) -> Request:
        return Request(("c", 0), tokens, SamplingParams(), len(tokens), 0.0, salt=salt)

    @rule(seq=sequences)
    def admit(self, seq: Request) -> None:
        if seq in self.live:
            return
        # The salt is the first token of all in the cells: two salts never hold equal content.
        cached = self.kv.match(seq)
        assert cached % BLOCK == 0
        assert cached <= len(seq.tokens) - 1
        for position in range(cached):
            assert self._read(seq, position) == self._cell(seq, position)
        if not self.kv.grow(seq, len(seq.tokens)):
            assert self.kv.n_free < self.kv.blocks_for(len(seq.tokens)) - len(seq.blocks)
            self.kv.release(seq)
            return
        self.live.append(seq)

    @rule(seq=sequences, n_tokens=st.integers(1, 5))
    def compute(self, seq: Request, n_tokens: int) -> None:
        if seq not in self.live:
            return
        end = min(len(seq.tokens), seq.n_computed + n_tokens)
        for position in range(seq.n_computed, end):
            block = seq.blocks[position // BLOCK]
            self.cells.setdefault(block, [None] * BLOCK)[position % BLOCK] = self._cell(
                seq, position
            )
        seq.n_computed = seq.n_scheduled = end
        self.kv.register(seq)

    @rule(seq=sequences, token=st.integers(0, 1))
    def extend(self, seq: Request, token: int) -> None:
        if seq not in self.live or not self.kv.grow(seq, len(seq.tokens) + 1):
            return
        seq.tokens.append(token)

    @rule(seq=sequences)
    def preempt(self, seq: Request) -> None:
        if seq in self.live:
            self.live.remove(seq)
            self.kv.release(seq)

    @rule(seq=consumes(sequences))
    def end(self, seq: Request) -> None:
        self.preempt(seq)

    @rule(n_blocks=st.integers(1, LARGEST))
    def resize(self, n_blocks: int) -> None:
        self.kv.resize(n_blocks)
        assert self.kv.capacity == n_blocks

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefix_cache()
        assert self.kv.n_cached == 0

    @rule()
    def take_events(self) -> None:
        added, evicted = self.kv.take_events()
        for digest in added:
            assert not self.shared.get(digest, False)
            self.shared[digest] = True
        for digest in evicted:
            assert self.shared[digest]
            self.shared[digest] = False

    @invariant()
    def books_agree(self) -> None:
        self.kv.check(self.live)
        held = {block for seq in self.live for block in seq.blocks}
        below = sum(block < self.kv.capacity for block in held)
        assert self.kv.n_free == self.kv.capacity - below
        assert self.kv.extent >= max((block + 1 for block in held), default=0)

    @invariant()
    def every_computed_cell_is_right(self) -> None:
        for seq in self.live:
            for position in range(seq.n_computed):
                assert self._read(seq, position) == self._cell(seq, position)

    def teardown(self) -> None:
        for seq in self.live:
            self.kv.release(seq)
        self.kv.check([])
        assert self.kv.n_free == self.kv.capacity

    def _cell(self, seq: Request, position: int) -> tuple[str, int, tuple[int, ...]]:
        """What a KV cell depends on: the salt and every token up to it."""
        return (seq.salt, position, tuple(seq.tokens[: position + 1]))

    def _read(self, seq: Request, position: int) -> object:
        return self.cells[seq.blocks[position // BLOCK]][position % BLOCK]


class CollidingKVMachine(KVMachine):
    """The same with a digest that collides all the time."""

    digest = staticmethod(weak_digest)


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=50, stateful_step_count=40)
TestCollidingKVMachine = CollidingKVMachine.TestCase
TestCollidingKVMachine.settings = settings(max_examples=50, stateful_step_count=40)
