"""A stage for works alone: requests, a hash model with KV for them, and no scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Any

from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import DecodeSlot, PrefillChunk
from engine_actor.core.sequence import Key, SeqState, Sequence
from engine_actor.model.sampler import Sampler
from engine_actor.work.base import WorkContext
from engine_actor.work.decode import DecodeWork
from engine_actor.work.prefill import PrefillWork
from tests.doubles.scripted_runner import HashRunner


class Stage:
    """Gives each request ten blocks of its own and makes its works."""

    def __init__(self, runner: HashRunner | None = None, **context: Any) -> None:
        self.runner = runner or HashRunner()
        self.runner.resize_kv(1000)
        self.requests: dict[Key, Sequence] = {}
        self.context = WorkContext(
            runner=self.runner,
            sampler=Sampler(self.runner.vocab_size, base_seed=1),
            block_tokens=self.runner.block_tokens,
            eos_token_ids=frozenset(),
            request=self.requests.get,
            **context,
        )

    def request(self, rid: int, prompt: Ids[int], **sampling: Any) -> Sequence:
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 16} | sampling))
        request = Sequence(
            key=("c", rid),
            tokens=list(prompt),
            sampling=params,
            n_prompt=len(prompt),
            arrived=0.0,
            trace_id=f"r{rid}",
            state=SeqState.PREFILL,
            blocks=list(range(10 * rid, 10 * rid + 10)),
        )
        self.requests[request.key] = request
        return request

    def chunk(self, rid: int, start: int, end: int) -> PrefillChunk:
        request = self.requests["c", rid]
        return PrefillChunk(
            request.key,
            start,
            end,
            tuple(request.tokens[start:end]),
            tuple(request.blocks),
            samples=end == len(request.tokens),
            prompt_logprobs=request.sampling.prompt_logprobs,
        )

    def slot(self, rid: int) -> DecodeSlot:
        """The next decode step; everything before it must be computed."""
        request = self.requests["c", rid]
        position = len(request.tokens) - 1
        return DecodeSlot(request.key, position, request.tokens[-1], tuple(request.blocks), rid)

    def prefill(self, *chunks: PrefillChunk) -> PrefillWork:
        return PrefillWork(17, self.context, chunks=chunks)

    def decode(self, *slots: DecodeSlot) -> DecodeWork:
        return DecodeWork(17, self.context, slots=slots)
