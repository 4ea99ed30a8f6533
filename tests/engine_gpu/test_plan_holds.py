"""The memory plan against the card: weights as planned, no failure at the planned fill, no more
taken than was allowed. Random weights of Qwen2.5's widths, few layers. Row S-41.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from configs.schema import AppArgs, EngineConfig
from engine_actor import build, planning
from engine_actor.build import choose_device
from engine_actor.core.plan import DecodeSlot, PrefillChunk
from engine_actor.engine import Engine
from engine_actor.errors import CheckpointError
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.card_plan import Part, Settings
from engine_actor.model.memory import card_ledger
from engine_actor.model.runner import ModelRunner
from engine_actor.model.sampler import Sampler
from engine_actor.model.step_bytes import StepShape, decode_bytes, prompt_bytes, step_parts
from engine_actor.planning import plan_here
from engine_actor.status import _memory
from engine_actor.warm_up import warm_up
from engine_actor.work.inputs import build_decode, build_prefill
from random_model import SHAPES, random_checkpoint, random_engine, shortened
from tests.engine.driver import Driver

pytestmark = pytest.mark.gpu

MIB = 1 << 20
RESERVE = 64
"""MiB."""
SEVEN = shortened(SHAPES["7b-4gib"], 2)
THREE = shortened(SHAPES["3b"], 2)


@pytest.fixture(autouse=True)
def lifted() -> Iterator[None]:
    """The cap is the process's, and other tests share it."""
    yield
    card_ledger(choose_device("cuda")).hold(None)


def engine_of(shape: Any, **settings: Any) -> Engine:
    gc.collect()
    return random_engine(shape, {"reserve_memory_mb": RESERVE, **settings}, max_model_len=4096)


def limit_with(pool: int, shape: Any, **settings: Any) -> int:
    """MiB under which the plan leaves `pool` bytes to the KV cache."""
    gc.collect()
    device = choose_device("cuda")
    model = {"path": shape.name, "max_model_len": 4096}
    given = {"reserve_memory_mb": RESERVE, **settings, "memory_limit_mb": 8_000}
    args = AppArgs.model_validate({"model": model, "engine": given})
    plan = plan_here(args, random_checkpoint(shape, device), device)
    return RESERVE + -(-(plan.planned - plan.kv_bytes + pool) // MIB)


def fill(engine: Engine) -> Driver:
    """As many sequences as the plan says, each as long as it says, all at once."""
    blocks, size = engine.facts.kv_blocks, engine.config.kv.block_tokens
    count = min(engine.config.max_num_seqs, blocks)
    tokens = min(engine.facts.max_model_len, blocks // count * size)
    driver = Driver(engine, check=False)
    for rid in range(count):
        prompt = [3 + (13 * rid + i) % 20_000 for i in range(tokens - 8)]
        assert driver.submit(rid, prompt, 8, ignore_eos=True) is None
    driver.run()
    driver.assert_all_free()
    assert all(len(driver.tokens(rid)) == 8 for rid in range(count))
    return driver


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize(("shape", "chunk"), [(SEVEN, 128), (SEVEN, 512), (THREE, 256)])
def test_the_planned_fill_fits_under_the_cap(shape: Any, chunk: int, kv: str) -> None:
    """The pool is smaller than its sequences could fill, and all of it is in use at once."""
    require_fill(shape, {"prefill_chunk_tokens": chunk, "kv": {"dtype": kv}})


@pytest.mark.parametrize("other", [{"numerics": "exact"}, {"kv": {"dtype": "fp32"}}], ids=str)
def test_it_fits_where_no_room_is_kept_for_graphs(other: dict[str, Any]) -> None:
    require_fill(THREE, {"prefill_chunk_tokens": 128, **other})


def require_fill(shape: Any, settings: dict[str, Any]) -> None:
    """8 sequences at once in the smaller pool: nothing is retried, nothing lies beyond the cap."""
    gc.collect()
    ledger = card_ledger(choose_device("cuda"))
    others = ledger.mapped
    settings = {"max_num_seqs": 8, **settings}
    limit = limit_with(28 * MIB, shape, **settings)
    engine = engine_of(shape, **settings, memory_limit_mb=limit)
    plan = engine.facts.memory_plan
    assert engine.facts.kv_blocks == plan["kv_blocks"] < 8 * 256
    torch.cuda.reset_peak_memory_stats()
    fill(engine)
    assert engine.metrics.value("oom_retries_total") == 0
    assert engine.elastic.n_blocks == plan["kv_blocks"]
    assert torch.cuda.max_memory_reserved() + ledger.mapped <= plan["allowance"]
    assert ledger.mapped - others == plan["kv"]
    status = _memory(engine)
    assert status["limit_bytes"] == plan["allowance"]
    assert status["kv_mapped_bytes"] == ledger.mapped


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("shape", [SEVEN, THREE], ids=["7b", "3b"])
def test_steps_take_what_was_planned(shape: Any, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks at the beginning and at the end of a long prompt, and a batch; nothing but a bound
    that is not far above.
    """
    planned: list[StepShape] = []
    built: list[ModelRunner] = []

    def parts(of: StepShape, asked: Settings) -> Iterator[Part]:
        planned.append(of)
        return step_parts(of, asked)

    def warm(runner: ModelRunner, config: EngineConfig, sampler: Sampler) -> None:
        built.append(runner)
        warm_up(runner, config, sampler)

    monkeypatch.setattr(planning, "step_parts", parts)
    monkeypatch.setattr(build, "warm_up", warm)
    engine = engine_of(shape, max_num_seqs=8, prefill_chunk_tokens=2048, kv={"dtype": kv})
    step, runner = planned[-1], built[-1]
    for chunk in (32, 128, 512, 2048):
        for end in (chunk, 4096):
            blocks = (0,) * (end // 16)
            rows = PrefillChunk(("", 0), end - chunk, end, (5,) * chunk, blocks, samples=True)
            peak = peak_of(runner, build_prefill([rows], 16, runner.device))
            most = prompt_bytes(step, Settings(end, 8, chunk, kv == "int8"))
            assert peak <= most <= 3 * peak + 16 * MIB, (chunk, end, peak / MIB, most / MIB)
    rows_at_end = [DecodeSlot(("", rid), 4095, 5, (0,) * 256, rid) for rid in range(8)]
    peak = peak_of(runner, build_decode(rows_at_end, 16, runner.device))
    assert peak <= decode_bytes(step, 8) <= 3 * peak + 16 * MIB
    assert engine.facts.kv_blocks > 0


@torch.inference_mode()
def peak_of(runner: ModelRunner, inputs: BatchInputs) -> int:
    """Bytes beside what is there, of the second of two forward passes."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        hidden = runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)
        runner.logits(hidden, inputs.logit_rows)
        del hidden
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return peak


def test_weights_take_what_was_planned_and_leave_no_holes() -> None:
    gc.collect()
    torch.cuda.synchronize()
    before, gaps = torch.cuda.memory_allocated(), between_tensors()
    engine = engine_of(SEVEN, cuda_graphs=False, max_num_seqs=2)
    taken = torch.cuda.memory_allocated() - before
    parts = engine.facts.memory_plan["parts"]
    beside = parts["decode buckets"] + parts["position tables"] + parts["sampler"]
    assert "library workspaces" not in parts
    assert parts["weights"] <= taken + MIB
    assert taken <= parts["weights"] + beside + 8 * MIB
    # Nothing that was beside the weights while they were loaded has left a hole.
    assert between_tensors() - gaps <= parts["allocator's pages"]


def between_tensors() -> int:
    """Bytes that torch has and cannot give back, though no tensor lies in them."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def test_what_cannot_fit_is_refused_at_once() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    with pytest.raises(CheckpointError, match="the model does not fit on the card: loading takes"):
        engine_of(SEVEN, memory_limit_mb=600)
    assert torch.cuda.memory_allocated() == before
