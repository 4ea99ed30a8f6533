"""Evicted prefixes that come back from the host's page-locked memory on a GPU: the texts of an
engine that computes them once more, whatever the copies' pace, and only because of both waits.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine_actor import ops
from engine_actor.core.block_copies import BlockCopy
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.messages import Cancel
from engine_actor.model.runner import build_runner
from engine_actor.work.host_copies import StreamCopies
from tests.engine.driver import CLIENT, Driver
from tests.engine.real_engine import BLOCK, Loaded
from tests.engine_gpu.late_copies import (
    HOST_SLOTS,
    TRUNK_BLOCKS,
    asked,
    crowd,
    into_new_memory,
    one_by_one,
    small_engine,
    use_late_copies,
)
from tests.engine_gpu.late_streams import shows

pytestmark = pytest.mark.gpu

RUNS = 6
PROMPTS = asked(9)


@pytest.fixture(scope="session")
def on_int8(half_folder: Path) -> Loaded:
    """An INT8 cache, decode steps replayed from graphs."""
    opened = open_checkpoint(half_folder)
    runner = build_runner(
        opened.config,
        opened.weights(),
        device="cuda",
        kv_dtype="int8",
        block_tokens=BLOCK,
        used_vocab=opened.usable_vocab_size(),
        packed=opened.packed,
    )
    runner.prepare_decode(16, 256, graphs=True)
    return Loaded(runner, opened.max_model_len, tuple(opened.eos_token_ids))


@pytest.fixture(scope="module", params=["on_gpu", "on_kernels", "on_graphs", "on_int8"])
def model(request: pytest.FixtureRequest) -> Loaded:
    loaded: Loaded = request.getfixturevalue(request.param)
    return loaded


@pytest.fixture(scope="module")
def right(model: Loaded) -> list[list[int]]:
    """The texts without a tier."""
    return one_by_one(small_engine(model), PROMPTS)


def test_one_launch_copies_all_that_goes_one_way(model: Loaded) -> None:
    engine = small_engine(model, host_slots=HOST_SLOTS)
    assert isinstance(engine.copies, StreamCopies)
    assert engine.copies.store is not None
    assert engine.copies.store.reason is None
    assert engine.copies.store.nbytes == HOST_SLOTS * sum(model.runner.kv.block_bytes)


@torch.inference_mode()
def test_blocks_come_back_byte_for_byte(model: Loaded) -> None:
    """The scales of an INT8 cache too; through the kernel and by torch's copies alike."""
    kv = model.runner.kv
    small_engine(model, kv_blocks=12)
    model.runner.resize_kv(12)
    for index, array in enumerate(kv.arrays()):
        array.copy_(torch.randn(array.shape, device="cuda").mul(50 + index).to(array.dtype))
    before = model.runner.kv_checksum((3, 7, 0))
    store = model.runner.host_blocks(8)
    for reason in (None, "by torch's copies"):
        store.reason = reason
        store.copy([BlockCopy(3, 5, True), BlockCopy(7, 0, True), BlockCopy(0, 7, True)])
        torch.cuda.synchronize()
        for array in kv.arrays():
            array[[1, 2, 4]] = 0
        store.reason = None
        store.copy([BlockCopy(4, 5, False), BlockCopy(1, 0, False), BlockCopy(2, 7, False)])
        torch.cuda.synchronize()
        assert model.runner.kv_checksum((4, 1, 2)) == before


def test_texts_with_the_tier_are_those_without(model: Loaded, right: list[list[int]]) -> None:
    plain, before = small_engine(model), torch.cuda.memory_allocated()
    engine = small_engine(model, host_slots=HOST_SLOTS)
    assert torch.cuda.memory_allocated() - before < 2**20
    del plain
    assert one_by_one(engine, PROMPTS) == right
    assert engine.kv.tier.n_copied_back >= 4 * TRUNK_BLOCKS
    assert engine.metrics.value("kv_host_hit_tokens_total") >= 4 * TRUNK_BLOCKS * BLOCK
    assert engine.copies.landed > 0


@pytest.mark.parametrize("mode", ["serial", "two_streams", "mixed"])
def test_beside_streams_in_every_way_to_share_the_card(
    model: Loaded, right: list[list[int]], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_late_copies(monkeypatch)
    few_blocks = 32 if mode == "serial" else 0
    engine = small_engine(model, few_blocks, host_slots=HOST_SLOTS, overlap_mode=mode)
    found = crowd(engine, PROMPTS)
    assert [text[:6] for text in found] == right
    assert engine.kv.tier.n_copied_back > 0


@pytest.mark.parametrize("run", range(RUNS))
def test_late_copies_give_the_right_texts(
    model: Loaded, right: list[list[int]], run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_late_copies(monkeypatch)
    assert one_by_one(small_engine(model, host_slots=HOST_SLOTS), PROMPTS) == right


@pytest.mark.parametrize("run", range(RUNS))
def test_works_that_do_not_wait_for_the_copies_give_wrong_texts(
    model: Loaded, right: list[list[int]], run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fences proved: what the test above shows would not hold without this wait."""
    use_late_copies(monkeypatch, without=("works", "copies"))

    def is_wrong() -> bool:
        return one_by_one(small_engine(model, host_slots=HOST_SLOTS), PROMPTS) != right

    assert shows(is_wrong, monkeypatch)


@pytest.mark.parametrize("run", range(RUNS))
@pytest.mark.parametrize("without", [None, ("copies", "works")], ids=["with", "without"])
def test_copies_wait_for_the_works(
    model: Loaded, without: tuple[str, str] | None, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fences proved: copies that do not wait come before the memory's zeros."""
    use_late_copies(monkeypatch, without=without, late=False)

    def is_wrong() -> bool:
        found, wanted = into_new_memory(model, monkeypatch)
        return found != wanted

    if without is None:
        assert not is_wrong()
    else:
        assert shows(is_wrong, monkeypatch)


@pytest.mark.parametrize("seed", range(4))
def test_cancels_in_between_lose_nothing(
    model: Loaded, right: list[list[int]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_late_copies(monkeypatch)
    engine = small_engine(model, host_slots=20)
    draw = random.Random(seed)
    driver = Driver(engine)
    for rid, prompt in enumerate(PROMPTS):
        driver.submit(rid, prompt, 6, ignore_eos=True)
        for _ in range(draw.randint(0, 5)):
            driver.step()
        if draw.random() < 0.4:
            engine.cancel(CLIENT, Cancel(rid))
    driver.run()
    driver.assert_all_free()
    for rid, text in enumerate(right):
        tokens = driver.tokens(rid)
        assert tokens == text[: len(tokens)]


def test_memory_that_cannot_be_locked_is_refused_by_name(model: Loaded) -> None:
    with pytest.raises(Exception, match=r"kv\.host_budget_mb"):
        model.runner.host_blocks(2**40)
    assert ops.why_no_jit() is None
