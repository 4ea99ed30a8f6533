"""Engines around a real ModelRunner, many of them over one load of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.schema import EngineConfig, KVConfig
from engine_actor.core.plan import SampledToken
from engine_actor.engine import Engine
from engine_actor.facts import EngineFacts
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.model.runner import ModelRunner, build_runner
from engine_actor.model.sampler import Sampler, SampleRow
from tests.engine.driver import Driver

BLOCK = 16


@dataclass(frozen=True)
class Loaded:
    """A runner and what an engine must know of it."""

    runner: ModelRunner
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def engine(
        self,
        *,
        kv_blocks: int = 600,
        host_slots: int = 0,
        sampler: Sampler | None = None,
        depth: int | None = None,
        **config: Any,
    ) -> Engine:
        """A new engine with an empty pool and an empty prefix cache over the same weights."""
        facts = EngineFacts(
            name="engine-0",
            model="real",
            vocab_size=self.runner.vocab_size,
            max_model_len=self.max_model_len,
            kv_blocks=kv_blocks,
            kv_first_blocks=8,
            kv_host_blocks=host_slots,
            eos_token_ids=self.eos_token_ids,
        )
        settings = EngineConfig(kv=KVConfig(block_tokens=BLOCK), **config)
        sampler = sampler or Sampler(self.runner.vocab_size, base_seed=3)
        return Engine(settings, facts, self.runner, sampler, depth=depth)


def load(folder: Path, numerics: str, device: str = "cpu") -> Loaded:
    """The checkpoint's runner on a device."""
    opened = open_checkpoint(folder)
    runner = build_runner(
        opened.config,
        opened.weights(),
        device=device,
        numerics=numerics,
        block_tokens=BLOCK,
        used_vocab=opened.usable_vocab_size(),
        packed=opened.packed,
    )
    return Loaded(runner, opened.max_model_len, tuple(opened.eos_token_ids))


def texts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    after_step: Callable[[int], None] = lambda step: None,
    **sampling: Any,
) -> list[list[int]]:
    """Exactly n_tokens after each prompt, all submitted at once."""
    driver = Driver(engine, check=False)
    for rid, prompt in enumerate(prompts):
        assert driver.submit(rid, prompt, n_tokens, ignore_eos=True, **sampling) is None
    driver.run(after_step)
    driver.assert_all_free()
    return [driver.tokens(rid) for rid in range(len(prompts))]


class ForcedSampler(Sampler):
    """Gives the reference's tokens whatever the logits say, and keeps the logits: teacher forcing
    through the engine's own steps, on any device. `wanted`: tokens by rid."""

    def __init__(self, vocab_size: int, wanted: Sequence[Sequence[int]], n_prompts: Sequence[int]):
        super().__init__(vocab_size)
        self._wanted = wanted
        self._n_prompts = n_prompts
        self.logits: dict[tuple[int, int], torch.Tensor] = {}

    def _device_sampling(self, logits: torch.Tensor) -> None:
        """No kernel draws: begin() asks sample()."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        tokens = []
        for index, row in enumerate(rows):
            rid = row.key[1]
            step = row.position - self._n_prompts[rid]
            self.logits[rid, step] = logits[index].clone()
            tokens.append(SampledToken(row.key, self._wanted[rid][step]))
        return tokens
