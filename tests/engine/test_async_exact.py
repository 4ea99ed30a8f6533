"""Real forward passes at pipeline depth 1: with exact numerics every text is the twin's, token for
token, whatever the crowd, and so are its scores."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_actor.engine import Engine
from engine_actor.load.tiny import write_tiny
from engine_actor.messages import Cancel
from tests.engine.driver import CLIENT, Driver
from tests.engine.real_engine import Loaded, load

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.6},
    {"repetition_penalty": 1.3},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"min_tokens": 3, "stop_token_ids": (7, 8, 9, 10, 11, 12)},
)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(write_tiny(tmp_path_factory.mktemp("ahead"), "qwen2", seed=9, packed=True), "exact")


def played(engine: Engine, seed: int) -> Driver:
    """A crowd that comes in over some steps; the same prompts several times, as `n` asks for."""
    draw = random.Random(seed)
    driver = Driver(engine)
    for rid in range(10):
        prompt = [draw.randrange(3, 270) for _ in range(draw.randint(1, 50))]
        driver.submit(2 * rid, prompt, 14, **SAMPLINGS[rid % len(SAMPLINGS)])
        driver.submit(2 * rid + 1, prompt, 14, temperature=1.0, seed=rid)
        driver.submit(100 + rid, prompt, 40, ignore_eos=True)
        for _ in range(draw.randint(0, 3)):
            driver.step()
        engine.cancel(CLIENT, Cancel(100 + rid))
    driver.run()
    driver.assert_all_free()
    return driver


@pytest.mark.parametrize("kv_blocks", [12, 300])
@pytest.mark.parametrize("seed", range(2))
def test_texts_and_scores_are_the_twins(exact: Loaded, kv_blocks: int, seed: int) -> None:
    settings = {"kv_blocks": kv_blocks, "max_num_seqs": 8, "prefill_chunk_tokens": 24}
    twin, ahead = (played(exact.engine(depth=depth, **settings), seed) for depth in (0, 1))
    for rid in range(20):
        one, other = twin.heard[CLIENT, rid], ahead.heard[CLIENT, rid]
        assert (other.tokens, other.end) == (one.tokens, one.end), f"request {rid}"
        for name in ("logprobs", "prompt_logprobs"):
            scores = [[x for e in heard.extras for x in getattr(e, name)] for heard in (one, other)]
            assert scores[0] == scores[1]
