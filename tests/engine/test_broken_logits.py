"""A model that gives NaN, or a row with nothing to choose: that request ends `error`, alone."""

from __future__ import annotations

import math

import pytest
import torch

from engine_actor.messages import Flag
from tests.doubles.scripted_runner import HashRunner, make_engine
from tests.engine.driver import Driver


class BreakingRunner(HashRunner):
    """Every logits row whose best id is among `poison` is made of `value`."""

    poison: frozenset[int] = frozenset()
    value = math.nan

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden, rows)
        for row, best in enumerate(logits.argmax(dim=-1).tolist()):
            if best in self.poison:
                logits[row] = self.value
        return logits


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.7])
def test_a_broken_row_ends_its_request_and_no_other(value: float, temperature: float) -> None:
    """The third token of one of five has no distribution. Its neighbours' texts are right (gaps of
    5 at these temperatures leave no doubt), the engine lives, the blocks come back.
    """
    runner = BreakingRunner()
    runner.value = value
    prompts = {rid: tuple(range(rid, rid + 9)) for rid in range(5)}
    runner.poison = frozenset({runner.expected(prompts[3], 3)[-1]})
    right = {rid: runner.expected(prompt, 12) for rid, prompt in prompts.items()}
    clean = [rid for rid in prompts if not runner.poison & set(right[rid])]
    assert clean == [0, 1, 2, 4]
    driver = Driver(make_engine(runner))
    for rid, prompt in prompts.items():
        driver.submit(rid, prompt, 12, temperature=temperature, seed=1, top_k=1)
    driver.run()
    assert (driver.end(3), driver.heard["c", 3].code) == (Flag.ERROR, "internal_error")
    assert driver.tokens(3) == right[3][:2]
    for rid in clean:
        assert (driver.end(rid), driver.tokens(rid)) == (Flag.LENGTH, right[rid])
    driver.assert_all_free()
    assert runner.live_bytes() == 0


def test_a_request_that_forbids_every_token_is_refused_at_the_door() -> None:
    """min_tokens bans stop ids and eos; where that is every id, nothing can be drawn."""
    runner = HashRunner(eos=7)
    driver = Driver(make_engine(runner))
    all_but_eos = tuple(token for token in range(runner.vocab_size) if token != 7)
    assert driver.submit(1, (1,), 4, min_tokens=1, stop_token_ids=all_but_eos) == "invalid"
    ignoring = {"min_tokens": 1, "stop_token_ids": all_but_eos, "ignore_eos": True}
    assert driver.submit(2, (1,), 4, temperature=1.0, seed=1, **ignoring) is None
    assert driver.submit(3, (1,), 4, stop_token_ids=(*all_but_eos, 7)) is None
    driver.run()
    assert driver.tokens(2)[0] == 7, "the one id that may come"
    assert driver.end(3) is Flag.STOP
