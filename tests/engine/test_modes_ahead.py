"""Mixed steps and ranges of layers one step ahead, on a device that runs behind the host.

As test_async_steps.py, whose crowds these are: the texts of the synchronising serial twin.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from configs.schema import FaultRule
from engine_actor.core.overlap_policy import FixedPolicy, Sharing
from engine_actor.core.plan import OverlapMode
from tests.engine.test_async_steps import assert_same, engines, random_crowd

PACES: dict[str, Callable[[random.Random], Callable[[], int]]] = {
    "as late as the fences allow": lambda draw: lambda: 0,
    "anyhow": lambda draw: lambda: draw.randint(0, 3),
}
SETTINGS = {
    "mixed": {},
    "sliced": {"prefill_slice_tokens": 4},
    "sliced by a layer": {"prefill_slice_tokens": 1, "prefill_chunk_tokens": 30},
}


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(25))
def test_the_texts_of_the_serial_twin(pace: str, setting: str, seed: int) -> None:
    draw = random.Random(seed)
    crowd = random_crowd(draw, kv_blocks=64)
    twin, late, _ = engines(crowd, PACES[pace](draw), **SETTINGS[setting])
    if setting == "mixed":
        late.policy = FixedPolicy(Sharing(OverlapMode.MIXED))
    else:
        # The twin runs whole chunks.
        limits = twin.scheduler.limits
        object.__setattr__(limits, "prefill_slice_tokens", None)
    assert_same(crowd, crowd.play(twin), crowd.play(late))


@pytest.mark.parametrize("stage", ["prepare", "launch", "sample", "finish"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(8))
def test_faults_change_no_text(stage: str, setting: str, seed: int) -> None:
    draw = random.Random(seed)
    crowd = random_crowd(draw, kv_blocks=64)
    crowd.deeds = []
    fault = FaultRule(stage=stage, min_rows=3, times=2)  # type: ignore[arg-type]
    more = SETTINGS[setting] | {"faults": (fault,)}
    twin, late, _ = engines(crowd, lambda: draw.randint(0, 3), **more)
    if setting == "mixed":
        late.policy = FixedPolicy(Sharing(OverlapMode.MIXED))
    assert_same(crowd, crowd.play(twin), crowd.play(late))
