"""`numerics: exact` on a tiny random model: transformers' tokens, whatever the schedule.

decisions.md section 1: token for token, no exception. The demo model has the same tests, fewer
combinations, in test_demo_exact.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from configs.schema import FaultRule
from engine_actor.engine import Engine
from engine_actor.load.tiny import write_tiny
from engine_actor.messages import Evict, Limit
from tests.engine.driver import CLIENT, Driver
from tests.engine.real_engine import Loaded, load, texts
from tests.engine.real_reference import greedy_choices, logits_along
from tests.hub_reference import hub_model

N = 64
SHARED = list(range(3, 103))
PROMPTS = [[50, 60, 70], SHARED[:40], [*SHARED, 7, 8, 9], [*SHARED[:80], 201, 202]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    packed = request.param == "llama"
    target = tmp_path_factory.mktemp(request.param)
    return write_tiny(target, request.param, seed=5, packed=packed)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Loaded:
    return load(folder, "exact")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> transformers.PreTrainedModel:
    return hub_model(folder)


@pytest.fixture(scope="module")
def right(exact: Loaded, oracle: transformers.PreTrainedModel) -> list[list[int]]:
    """64 tokens after each prompt, each made alone, each transformers' greedy choice."""
    engine = exact.engine()
    alone = [texts(engine, [prompt], N)[0] for prompt in PROMPTS]
    vocab = exact.runner.vocab_size
    for prompt, tokens in zip(PROMPTS, alone, strict=True):
        assert greedy_choices(oracle, prompt, tokens, vocab) == tokens
    return alone


def others(n: int) -> list[list[int]]:
    draw = random.Random(2)
    return [[draw.randrange(3, 270) for _ in range(draw.randint(1, 70))] for _ in range(n)]


@pytest.mark.parametrize(
    ("chunk", "partial", "n_others"),
    [*((chunk, partial, 12) for chunk in (16, 64, 512) for partial in (1, 4)), (16, 4, 0)],
)
def test_any_chunk_any_company_cache_cold_and_warm(
    exact: Loaded, right: list[list[int]], chunk: int, partial: int, n_others: int
) -> None:
    engine = exact.engine(prefill_chunk_tokens=chunk, max_partial_prefills=partial)
    crowd = [*PROMPTS, *others(n_others)]
    cold = texts(engine, crowd, N)
    warm = texts(engine, crowd, N)
    assert cold[:4] == right
    assert warm == cold


def _requeue(engine: Engine) -> Callable[[int], None]:
    def after_step(step: int) -> None:
        if step in (5, 20, 33):
            engine.evict(CLIENT, Evict(step % 4, requeue=True))

    return after_step


def _halve(engine: Engine) -> Callable[[int], None]:
    def after_step(step: int) -> None:
        if step == 20:
            engine.limit(Limit(kv_fraction=0.5))

    return after_step


@pytest.mark.parametrize(
    ("kv_blocks", "disturb"), [(24, lambda engine: lambda step: None), (60, _requeue), (48, _halve)]
)
def test_across_forced_preemption(
    exact: Loaded,
    right: list[list[int]],
    kv_blocks: int,
    disturb: Callable[[Engine], Callable[[int], None]],
) -> None:
    """A pool too small for all, requeues by hand, and a pool halved in the middle."""
    engine = exact.engine(kv_blocks=kv_blocks, prefill_chunk_tokens=64)
    assert texts(engine, PROMPTS, N, disturb(engine)) == right
    assert engine.scheduler.stats.preemptions > 0


def test_a_seed_draws_the_same_text_alone_and_in_any_batch(exact: Loaded) -> None:
    """S-44 with sampling: one generator per request, keyed by (seed, position)."""
    sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "seed": 11}
    alone = [texts(exact.engine(), [prompt], 32, **sampling)[0] for prompt in PROMPTS]
    crowd = [*PROMPTS, *others(4)]
    small = exact.engine(prefill_chunk_tokens=16, kv_blocks=20)
    assert texts(small, crowd, 32, **sampling)[:4] == alone
    assert small.scheduler.stats.preemptions > 0
    assert alone != [tokens[:32] for tokens in texts(exact.engine(), PROMPTS, 32)]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("kv_blocks", [600, 30])
def test_prompt_logprobs_equal_transformers(
    exact: Loaded, oracle: transformers.PreTrainedModel, warm: bool, kv_blocks: int
) -> None:
    """lm-eval's loglikelihood: echo + logprobs, max_tokens 0, chunk 16; also across preemption."""
    engine = exact.engine(prefill_chunk_tokens=16, kv_blocks=kv_blocks)
    if warm:
        texts(engine, PROMPTS, 4)
    driver = Driver(engine)
    for rid, prompt in enumerate(PROMPTS):
        driver.submit(rid, prompt, 0, prompt_logprobs=2)
    driver.run()
    for rid, prompt in enumerate(PROMPTS):
        heard = driver.heard[CLIENT, rid]
        starts = [extra.prompt_start for extra in heard.extras if extra.prompt_logprobs]
        entries = [entry for extra in heard.extras for entry in extra.prompt_logprobs]
        assert starts[0] == 1
        assert [entry.token for entry in entries] == prompt[1:]
        logits = logits_along(oracle, prompt, exact.runner.vocab_size)
        scores = torch.log_softmax(logits, dim=-1)
        wanted = [float(scores[i, token]) for i, token in enumerate(prompt[1:])]
        assert [entry.logprob for entry in entries] == pytest.approx(wanted, abs=1e-3)
        assert [entry.top[0][0] for entry in entries] == scores.argmax(-1).tolist()[:-1]
        assert heard.usage.completion_tokens == 0
        assert heard.usage.cached_tokens == 0


def test_retry_writes_the_same_kv(exact: Loaded) -> None:
    """decisions.md section 9: a work that failed after its forward pass is run again, smaller; the
    blocks then hold the same bytes."""
    sums = []
    for fails in (False, True):
        never = FaultRule(stage="prepare", request="nobody")
        engine = exact.engine(prefill_chunk_tokens=64, faults=(never,))
        if fails:
            engine.faults.add(FaultRule(stage="finish", times=3))
        driver = Driver(engine)
        driver.submit(0, PROMPTS[2], 3)
        driver.step()
        seq = engine.scheduler.get((CLIENT, 0))
        assert seq is not None
        sums.append((seq.n_computed, exact.runner.kv_checksum(tuple(seq.blocks[:4]))))
        assert engine.faults.fired == (3 if fails else 0)
        driver.run()
    assert sums[0] == sums[1]
