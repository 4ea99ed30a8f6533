"""What a validated request asks of the engine: prompts as ids, one sampling, how many children."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine_actor.core.params import SEED_BITS, SamplingParams
from engine_actor.messages import Submit


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt. `text` is what `echo` gives back; of ids it may be empty where nobody echoes."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Child:
    """One sequence of a request. `index` is its place among all children of the request."""

    index: int
    prompt_index: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One request of either endpoint, after all checks that need no engine.

    `logprobs` is the number of alternatives the client asked for (None: none);
    `sampling.logprobs` may be set without it, to rank `best_of`. `keep_stop_token` says whether
    the token that ended a text stays in its logprobs.
    """

    model: str
    prompts: tuple[EncodedPrompt, ...]
    sampling: SamplingParams
    n: int = 1
    best_of: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    echo: bool = False
    logprobs: int | None = None
    keep_stop_token: bool = True
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    priority: int = 0
    deadline_ms: int | None = None
    salt: str = ""
    trace_id: str = ""

    @property
    def n_children(self) -> int:
        """Sequences the engine runs for this request."""
        return len(self.prompts) * self.best_of

    @property
    def needs_engine(self) -> bool:
        """False for `max_tokens: 0` without prompt logprobs: there is nothing to compute."""
        return self.sampling.max_tokens > 0 or self.sampling.prompt_logprobs is not None

    def children(self) -> Iterator[Child]:
        """All children, prompt by prompt. Each choice of a seeded request draws from its own
        seed, else n choices would be one text n times; the first keeps the client's seed.
        """
        for prompt_index in range(len(self.prompts)):
            for choice in range(self.best_of):
                sampling = self.sampling
                if sampling.seed is not None and choice:
                    sampling = replace(sampling, seed=_wrapped(sampling.seed + choice))
                yield Child(prompt_index * self.best_of + choice, prompt_index, sampling)

    def submits(self, first_rid: int) -> list[Submit]:
        """One Submit per child, rids first_rid, first_rid + 1, ..."""
        return [
            Submit(
                rid=first_rid + child.index,
                prompt_ids=self.prompts[child.prompt_index].ids,
                sampling=child.sampling,
                priority=self.priority,
                deadline_ms=self.deadline_ms,
                salt=self.salt,
                trace_id=self.trace_id,
            )
            for child in self.children()
        ]


def _wrapped(seed: int) -> int:
    half = 1 << (SEED_BITS - 1)
    return (seed + half) % (1 << SEED_BITS) - half
