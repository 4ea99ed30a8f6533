"""The crowds that the GPU tests of streams, modes and steps ahead have in common."""

from __future__ import annotations

import random

from engine_actor.engine import Engine
from tests.engine.driver import Driver

CHUNK = 16


def prompts(n: int) -> list[list[int]]:
    """n prompts of 1 to 90 ids, the same each time."""
    draw = random.Random(11)
    return [[draw.randrange(3, 270) for _ in range(draw.randint(1, 90))] for _ in range(n)]


def short_stream_and_long_prompt(engine: Engine, max_tokens: int) -> Driver:
    """One prefill step for a stream that then decodes up to max_tokens, eleven for a prompt that
    comes in beside; chunks of CHUNK.
    """
    driver = Driver(engine)
    driver.submit(0, range(3, 3 + CHUNK), max_tokens=max_tokens, ignore_eos=True)
    while not driver.tokens(0):
        driver.step()
    driver.submit(1, range(5, 5 + 11 * CHUNK), max_tokens=8, ignore_eos=True)
    driver.run()
    driver.assert_all_free()
    return driver
