"""A model that costs nothing and forgives nothing: the Runner double for engine, service and HTTP.

HashRunner keeps a fake paged KV that stores, per layer and slot, which token at which position was
written there. The next token of a row is a hash of the whole prefix *as read back from the blocks*,
so one stolen, stale or misplaced KV entry changes the text; an entry of the wrong position, or one
that was never written, raises at once. `expected(prompt, n)` gives the right text from the prompt
alone. The text does not depend on batch, chunking, preemption or cache: equality is exact.

ScriptedRunner continues each known prompt with the ids of its script, then with eos; prompts
without a script are hashed.

    runner = ScriptedRunner(vocab_size=300, scripts={(97, 98): (1, 2, 3)}, eos=0)
    engine = make_engine(runner, max_num_seqs=8)             # the plain engine
    service = make_service(runner)                            # the async face, thread running
    ...
    service.close()

Both have hooks: `before_layers(inputs)` and `before_logits(rows)` may raise or block (to hold a
step open, wait for an Event there). `live_bytes()` counts the tensors they made that still live.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from configs.schema import EngineConfig, KVConfig
from engine_actor.core.block_copies import BlockCopy
from engine_actor.core.clock import Clock
from engine_actor.engine import Engine
from engine_actor.facts import EngineFacts
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.runner_protocol import GraphCounts
from engine_actor.model.sampler import Sampler
from engine_actor.service import EngineService
from engine_actor.work.host_copies import Copies
from engine_actor.work.pair import Pair

_EMPTY = -1
_SPREAD = 0x9E3779B97F4A7C15
"""Golden-ratio multiplier: mixes the sum of a prefix's terms, modulo 2^64."""


class HashRunner:
    """See the module's head. hidden is i64[T, 2]: the id (after the last layer: the next token) and
    the number of layers applied."""

    def __init__(
        self,
        vocab_size: int = 997,
        n_layers: int = 2,
        block_tokens: int = 4,
        eos: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.n_layers = n_layers
        self.block_tokens = block_tokens
        self.device = torch.device("cpu")
        self.eos = eos
        self.before_layers: Callable[[BatchInputs], None] = lambda inputs: None
        self.before_logits: Callable[[int], None] = lambda rows: None
        self.launches = 0
        self.graph_counts = GraphCounts("not on a GPU")
        self.prefill_graph_counts = GraphCounts("not on a GPU")
        self.max_blocks: int | None = None
        self._ids = np.full((n_layers, 0), _EMPTY)
        self._positions = np.full((n_layers, 0), _EMPTY)
        self._made: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def embed(self, inputs: BatchInputs) -> torch.Tensor:
        self.launches += 1
        return self._track(torch.stack((inputs.ids, torch.zeros_like(inputs.ids)), dim=1))

    def run_layers(
        self, hidden: torch.Tensor, inputs: BatchInputs, first: int, last: int
    ) -> torch.Tensor:
        if first == 0:
            self.before_layers(inputs)
        assert bool((hidden[:, 1] == first).all()), "layers out of order"
        slots, ids = inputs.slots.numpy(), inputs.ids.numpy()
        self._ids[first:last, slots] = ids
        self._positions[first:last, slots] = inputs.positions.numpy()
        hidden = torch.stack((hidden[:, 0], torch.full_like(hidden[:, 1], last)), dim=1)
        if last == self.n_layers:
            rows = [self._next(inputs, row) for row in range(len(inputs.q_lens))]
            hidden[:, 0] = torch.tensor([token for row in rows for token in row])
        return self._track(hidden)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.before_logits(len(rows))
        chosen = hidden[rows, 0]
        logits = torch.zeros(len(rows), self.vocab_size)
        logits[torch.arange(len(rows)), (chosen + 1) % self.vocab_size] = 5.0
        logits[torch.arange(len(rows)), chosen] = 10.0
        return self._track(logits)

    def last_logits(
        self, hidden: torch.Tensor, inputs: BatchInputs, first: int
    ) -> torch.Tensor | None:
        hidden = self.run_layers(hidden, inputs, first, self.n_layers)
        return self.logits(hidden, inputs.logit_rows) if len(inputs.logit_rows) else None

    def prefill_logits(self, inputs: BatchInputs) -> torch.Tensor | None:
        return self.last_logits(self.embed(inputs), inputs, 0)

    def decode_logits(self, inputs: BatchInputs) -> torch.Tensor:
        hidden = self.run_layers(self.embed(inputs), inputs, 0, self.n_layers)
        return self.logits(hidden, inputs.logit_rows)

    def warm_thread(self, most_rows: int) -> None:
        """Nothing is a thread's own."""

    def reserve_kv(self, capacity: int) -> None:
        """An array may lie anywhere."""

    def resize_kv(self, n_blocks: int) -> None:
        if self.max_blocks is not None and n_blocks > self.max_blocks:
            raise MemoryError(f"no memory for {n_blocks} blocks")
        n_slots = n_blocks * self.block_tokens
        for name in ("_ids", "_positions"):
            old = getattr(self, name)
            new = np.full((self.n_layers, n_slots), _EMPTY)
            kept = min(n_slots, old.shape[1])
            new[:, :kept] = old[:, :kept]
            setattr(self, name, new)

    def host_blocks(self, n_slots: int) -> HashedBlocks:
        return HashedBlocks(self, n_slots)

    def kv_checksum(self, blocks: tuple[int, ...]) -> int:
        slots = _slots_of(blocks, self.block_tokens)
        return zlib.crc32(self._ids[:, slots].tobytes() + self._positions[:, slots].tobytes())

    def live_bytes(self) -> int:
        """Bytes of hidden states and logits that somebody still holds."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._made)

    def expected(self, prompt: Sequence[int], n: int) -> list[int]:
        """The n tokens that must follow `prompt`, whatever the engine does."""
        tokens = list(prompt)
        total = sum(map(_term, tokens, range(len(tokens))))
        for _ in range(n):
            token = self._choose(tokens, [total])[0]
            total += _term(token, len(tokens))
            tokens.append(token)
        return tokens[len(prompt) :]

    def _next(self, inputs: BatchInputs, row: int) -> list[int]:
        """The tokens after each new position of one sequence, from what its blocks hold."""
        kv_len, q_len = inputs.kv_lens[row], inputs.q_lens[row]
        slots = _slots_of(inputs.block_lists[row], self.block_tokens)[:kv_len]
        positions = np.arange(kv_len)
        assert (self._positions[:, slots] == positions).all(), "KV of a wrong position"
        ids = self._ids[:, slots]
        assert (ids == ids[0]).all(), "layers disagree"
        terms = (ids[0] + 17).astype(np.uint64) * (2 * positions + 1).astype(np.uint64)
        return self._choose(ids[0].tolist(), terms.cumsum()[kv_len - q_len :].tolist())

    def _choose(self, prefix: list[int], totals: list[int]) -> list[int]:
        """The next token after each of the last len(totals) prefixes, from their sums of terms."""
        tokens = [(total * _SPREAD % 2**64 >> 33) % self.vocab_size for total in totals]
        return [(t + 1) % self.vocab_size if t == self.eos else t for t in tokens]

    def _track(self, tensor: torch.Tensor) -> torch.Tensor:
        self._made.add(tensor)
        return tensor


class HashedBlocks:
    """Slots on the host for blocks of a HashRunner."""

    reason = "not on a GPU"

    def __init__(self, runner: HashRunner, n_slots: int) -> None:
        self._runner = runner
        shape = (n_slots, 2, runner.n_layers, runner.block_tokens)
        self._kept = np.full(shape, _EMPTY)
        self.nbytes = self._kept.nbytes
        self.n_copied = 0

    def copy(self, part: Sequence[BlockCopy]) -> None:
        runner = self._runner
        for block, slot, to_host in part:
            self.n_copied += 1
            at = _slots_of([block], runner.block_tokens)
            if to_host:
                self._kept[slot] = runner._ids[:, at], runner._positions[:, at]
            else:
                runner._ids[:, at], runner._positions[:, at] = self._kept[slot]


class ScriptedRunner(HashRunner):
    """Continues the prompts it knows by their script."""

    def __init__(
        self,
        vocab_size: int,
        scripts: Mapping[tuple[int, ...], Sequence[int]],
        eos: int,
        **more: Any,
    ) -> None:
        super().__init__(vocab_size, eos=eos, **more)
        self.scripts = {tuple(prompt): tuple(script) for prompt, script in scripts.items()}

    def _choose(self, prefix: list[int], totals: list[int]) -> list[int]:
        first = len(prefix) - len(totals) + 1
        return [
            self._scripted(tuple(prefix[: first + index]), hashed)
            for index, hashed in enumerate(super()._choose(prefix, totals))
        ]

    def _scripted(self, prefix: tuple[int, ...], hashed: int) -> int:
        for prompt, script in self.scripts.items():
            done = len(prefix) - len(prompt)
            if done >= 0 and prefix[: len(prompt)] == prompt:
                return script[done] if done < len(script) else int(self.eos or 0)
        return hashed


def _term(token: int, position: int) -> int:
    """What one token adds to the hash of its prefix."""
    return (token + 17) * (2 * position + 1)


def _slots_of(blocks: Sequence[int], block_tokens: int) -> np.ndarray:
    starts = np.array(blocks, dtype=np.int64) * block_tokens
    return (starts[:, None] + np.arange(block_tokens)).reshape(-1)


def make_facts(runner: HashRunner, kv_blocks: int = 64, **more: Any) -> EngineFacts:
    """Facts that fit a runner double."""
    values: dict[str, Any] = {
        "name": "engine-0",
        "model": "scripted",
        "vocab_size": runner.vocab_size,
        "max_model_len": 4096,
        "kv_blocks": kv_blocks,
        "kv_first_blocks": 4,
        "kv_block_bytes": 1024,
        "eos_token_ids": () if runner.eos is None else (runner.eos,),
    }
    return EngineFacts(**(values | more))


def make_engine(
    runner: HashRunner,
    *,
    kv_blocks: int = 64,
    max_model_len: int = 4096,
    prefix_cache: bool = True,
    host_slots: int = 0,
    clock: Clock | None = None,
    pair: Pair | None = None,
    depth: int | None = None,
    sampler: Sampler | None = None,
    copies: Copies | None = None,
    **config: Any,
) -> Engine:
    """A plain engine around a runner double; `config` are EngineConfig fields."""
    kv = KVConfig(block_tokens=runner.block_tokens, prefix_cache=prefix_cache)
    more = {"max_model_len": max_model_len, "kv_host_blocks": host_slots}
    facts = make_facts(runner, kv_blocks, **more)
    settings = EngineConfig(kv=kv, **config)
    sampler = sampler or Sampler(runner.vocab_size, base_seed=7)
    given: dict[str, Any] = {"clock": clock, "pair": pair, "depth": depth, "copies": copies}
    return Engine(settings, facts, runner, sampler, **given)


def make_service(
    runner: HashRunner,
    on_fatal: Callable[[BaseException], None] = lambda error: None,
    epoch: int | None = None,
    **settings: Any,
) -> EngineService:
    """The async face around a runner double, its thread running; `settings` as make_engine's.
    The caller closes it."""
    return EngineService(make_engine(runner, **settings), on_fatal, epoch)
