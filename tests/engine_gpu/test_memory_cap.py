"""Real allocation failures under a true cap of the card: the engine lives, the texts are right.

Bug case B-22, row S-42. The cap is torch's own, so a large card rehearses a small one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine_actor.load.tiny import write_tiny
from engine_actor.messages import Flag
from engine_actor.model.batch_inputs import BatchInputs
from tests.engine.driver import CLIENT, Driver
from tests.engine.real_engine import Loaded, load, texts

pytestmark = pytest.mark.gpu

LONG = 3000


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """An MLP so wide that a long chunk needs hundreds of MiB and one row next to nothing."""
    folder: Path = write_tiny(
        tmp_path_factory.mktemp("wide"),
        "llama",
        seed=5,
        intermediate_size=16384,
        max_position_embeddings=4096,
    )
    return load(folder, "fast", "cuda")


@contextmanager
def torch_room(n_bytes: int) -> Iterator[None]:
    """Let torch have n_bytes more than it holds now."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + n_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_chunk_too_large_for_the_card_is_run_in_pieces(wide: Loaded) -> None:
    prompts = [list(range(3, 40)), [3 + i % 250 for i in range(LONG)], list(range(60, 90))]
    engine = wide.engine(prefill_chunk_tokens=4096, kv_blocks=400)
    right = texts(engine, prompts, 12)
    assert engine.metrics.value("oom_retries_total") == 0
    # The first run also pays for what stays: KV tensors and cuBLAS's workspace on each stream.
    level = torch.cuda.memory_allocated()
    engine.kv.reset_prefix_cache()
    with torch_room(128 * 2**20):
        assert texts(engine, prompts, 12) == right
    assert engine.metrics.value("oom_retries_total") > 0
    assert engine.metrics.value("oom_isolated_total") == 0
    assert torch.cuda.memory_allocated() <= level


def test_no_room_for_one_row_ends_one_and_the_rest_go_on(
    wide: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request asks the card for what no card has; its neighbours never notice."""
    prompts = [list(range(3 + i, 40 + i)) for i in range(5)]
    right = texts(wide.engine(), prompts, 12)
    marked = next(token for token in range(3, 270) if not any(token in text for text in right))
    prompts = [[token for token in prompt if token != marked] for prompt in prompts]
    right = texts(wide.engine(), prompts, 12)
    run_layers = wide.runner.run_layers

    def greedy(hidden: torch.Tensor, inputs: BatchInputs, first: int, last: int) -> torch.Tensor:
        if bool((inputs.ids == marked).any()):
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        return run_layers(hidden, inputs, first, last)

    monkeypatch.setattr(wide.runner, "run_layers", greedy)
    engine = wide.engine()
    driver = Driver(engine)
    for rid, prompt in enumerate([*prompts, [5, 6, marked]]):
        driver.submit(rid, prompt, 12, ignore_eos=True)
    driver.run()
    driver.assert_all_free()
    assert [driver.tokens(rid) for rid in range(5)] == right
    assert driver.end(5) is Flag.OOM
    assert driver.heard[CLIENT, 5].code == "out_of_memory"
    assert engine.metrics.value("oom_isolated_total") == 1
