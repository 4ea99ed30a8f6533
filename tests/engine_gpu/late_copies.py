"""A device whose copies of KV blocks lag, with one wait between them and the works left out, and
engines whose pool is too small for what they are asked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine_actor.core.block_copies import BlockCopy
from engine_actor.engine import Engine
from engine_actor.messages import Limit
from engine_actor.model.runner_protocol import BlockStore, Runner
from engine_actor.work.host_copies import Copies, DirectCopies, StreamCopies
from engine_actor.work.streams import CudaStreams
from tests.engine.driver import Driver
from tests.engine.real_engine import BLOCK, Loaded
from tests.engine_gpu.late_streams import LONG, delay

TRUNK_BLOCKS = 4
HOST_SLOTS = 60
Wait = tuple[str, str]


def asked(n: int, seed: int = 31) -> list[list[int]]:
    """n prompts, each one of three trunks of four blocks and a few ids of its own."""
    draw = random.Random(seed)
    trunks = [[draw.randrange(3, 270) for _ in range(TRUNK_BLOCKS * BLOCK)] for _ in range(3)]
    return [
        trunks[index % 3] + [draw.randrange(3, 270) for _ in range(draw.randint(1, 9))]
        for index in range(n)
    ]


class CopyApi(CudaStreams):
    """Two streams by name, with one wait left out."""

    def __init__(self, device: torch.device, without: Wait | None) -> None:
        super().__init__(device)
        self.copies = self.new_stream(True)
        self._without = without

    def wait(self, waiter: torch.cuda.Stream, awaited: torch.cuda.Stream) -> None:
        pair = (self._name(waiter), self._name(awaited))
        if pair != self._without:
            super().wait(waiter, awaited)

    def _name(self, stream: torch.cuda.Stream) -> str:
        return "copies" if stream == self.copies else "works"


class LateBlocks:
    """Copies that come late on their stream, both ways."""

    def __init__(self, inner: BlockStore) -> None:
        self._inner = inner
        self.nbytes, self.reason = inner.nbytes, inner.reason

    def copy(self, part: Sequence[BlockCopy]) -> None:
        delay(LONG)
        self._inner.copy(part)


def use_late_copies(
    patch: pytest.MonkeyPatch, *, without: Wait | None = None, late: bool = True
) -> None:
    """Give every engine made from now on such copies; late: or copies in time."""

    def make(runner: Runner, n_slots: int) -> Copies:
        if not n_slots:
            return DirectCopies(None)
        store = runner.host_blocks(n_slots)
        api = CopyApi(torch.device("cuda", torch.cuda.current_device()), without)
        return StreamCopies(LateBlocks(store) if late else store, api, api.copies)

    patch.setattr("engine_actor.engine.make_copies", make)


def small_engine(loaded: Loaded, few_blocks: int = 0, **more: Any) -> Engine:
    """A pool that holds hardly two of the trunks, steps ahead of the host. few_blocks: of one
    sequence that are copied on the works' stream.
    """
    settings = {"kv_blocks": 9, "max_num_seqs": 3, "prefill_chunk_tokens": 16}
    engine = loaded.engine(**(settings | more))
    engine.kv.copies.few = few_blocks
    return engine


def one_by_one(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Six tokens after each prompt, every prompt alone: nobody decodes beside it, so the device and
    not the host waits for its copies.
    """
    driver = Driver(engine, check=False)
    for rid, prompt in enumerate(prompts):
        assert driver.submit(rid, prompt, 6, ignore_eos=True) is None
        driver.run()
    driver.assert_all_free()
    torch.cuda.synchronize()
    return [driver.tokens(rid) for rid in range(len(prompts))]


def crowd(engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int = 9) -> list[list[int]]:
    """The prompts come in while others decode."""
    draw = random.Random(3)
    driver = Driver(engine, check=False)
    for rid, prompt in enumerate(prompts):
        assert driver.submit(rid, prompt, n_tokens, ignore_eos=True) is None
        for _ in range(draw.randint(0, 7)):
            driver.step()
    driver.run()
    driver.assert_all_free()
    torch.cuda.synchronize()
    return [driver.tokens(rid) for rid in range(len(prompts))]


def into_new_memory(
    loaded: Loaded, patch: pytest.MonkeyPatch
) -> tuple[list[list[int]], list[list[int]]]:
    """Texts with and without the tier of prompts whose blocks come back into memory that the pool
    has just taken again; its zeros come late.
    """
    prompts = asked(3)
    resize = loaded.runner.resize_kv

    def late_resize(n_blocks: int) -> None:
        delay(3 * LONG)
        resize(n_blocks)

    patch.setattr(loaded.runner, "resize_kv", late_resize)
    found = []
    for host_slots in (HOST_SLOTS, 0):
        engine = small_engine(loaded, kv_blocks=16, host_slots=host_slots)
        driver = Driver(engine, check=False)
        for rid, prompt in enumerate(prompts):
            driver.submit(rid, prompt, 2, ignore_eos=True)
            driver.run()
        engine.limit(Limit(kv_fraction=0.5))
        driver.submit(10, [9] * (7 * BLOCK), 2, ignore_eos=True)
        driver.run()
        assert engine.elastic.n_blocks == 8
        engine.limit(Limit(kv_fraction=1.0))
        driver.submit(11, [7, 8] * BLOCK, 9, ignore_eos=True)
        for _ in range(2):
            driver.step()
        assert engine.elastic.n_blocks == 16
        back = engine.kv.tier.n_copied_back
        driver.submit(12, prompts[0], 9, ignore_eos=True)
        driver.run()
        assert engine.kv.tier.n_copied_back == back + (TRUNK_BLOCKS if host_slots else 0)
        torch.cuda.synchronize()
        found.append([driver.tokens(rid) for rid in (11, 12)])
    return found[0], found[1]
