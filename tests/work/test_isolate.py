"""Who is blamed when a verb raises, and how small the retries get."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from configs.schema import FaultRule
from engine_actor.errors import FatalDeviceError
from engine_actor.faults import FaultPlan
from engine_actor.work.base import Work, WorkStateError
from engine_actor.work.elastic import ElasticKV, KVGrowthError
from engine_actor.work.isolate import Isolation, Tally
from engine_actor.work.memory_errors import is_fatal, is_out_of_memory
from engine_actor.work.pair import SerialPair
from tests.doubles.scripted_runner import HashRunner
from tests.work.stage import Stage

CPU = torch.device("cpu")
PROMPT = tuple(range(11, 23))


def staged(*rules: FaultRule, n: int = 6) -> tuple[Stage, FaultPlan]:
    """n requests of 12 tokens; those with an odd id are computed and decode."""
    plan = FaultPlan(rules)
    stage = Stage(hook=plan.hit)
    for rid in range(n):
        stage.request(rid, (*PROMPT, rid))
    if n > 1:
        quiet = Stage(stage.runner)
        quiet.requests = stage.requests
        for rid in range(1, n, 2):
            request = stage.requests["c", rid]
            work = quiet.prefill(quiet.chunk(rid, 0, 13))
            object.__setattr__(work.context, "request", stage.requests.get)
            work.prepare()
            work.launch(SerialPair(CPU).lane)
            work.sample()
            request.tokens.append(work.finish().sampled[0].token)
    return stage, plan


def isolate(stage: Stage, decode: Work | None, prefill: Work | None) -> Tally:
    serial = SerialPair(CPU)
    return Isolation(serial, serial, lambda: None).run(decode, prefill)


def both(stage: Stage, n: int = 6) -> Tally:
    decode = stage.decode(*(stage.slot(rid) for rid in range(1, n, 2)))
    prefill = stage.prefill(*(stage.chunk(rid, 0, 13) for rid in range(0, n, 2)))
    return isolate(stage, decode, prefill)


def sampled(tally: Tally) -> dict[int, int]:
    return {token.key[1]: token.token for result in tally.results for token in result.sampled}


def right_tokens(stage: Stage, n: int = 6) -> dict[int, int]:
    lengths = {rid: 1 + rid % 2 for rid in range(n)}
    return {
        rid: stage.runner.expected((*PROMPT, rid), length)[-1] for rid, length in lengths.items()
    }


@pytest.mark.parametrize("stage_name", ["prepare", "launch", "finish"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_transient_fault_costs_nobody_anything(stage_name: str, times: int) -> None:
    rule = FaultRule(stage=stage_name, times=times)  # type: ignore[arg-type]
    stage, plan = staged(rule)
    tally = both(stage)
    assert tally.casualties == []
    assert sampled(tally) == right_tokens(stage)
    assert plan.fired == times


@pytest.mark.parametrize("stage_name", ["prepare", "launch", "finish"])
@pytest.mark.parametrize("guilty", range(6))
def test_a_fault_of_one_request_is_found_alone(stage_name: str, guilty: int) -> None:
    """B-22, S-42."""
    rule = FaultRule(stage=stage_name, request=f"r{guilty}", times="always")  # type: ignore
    stage, _ = staged(rule)
    tally = both(stage)
    assert [casualty.key for casualty in tally.casualties] == [("c", guilty)]
    assert tally.casualties[0].starved
    assert tally.casualties[0].blocks > 0
    expected = right_tokens(stage)
    del expected[guilty]
    assert sampled(tally) == expected


@pytest.mark.parametrize("rows", range(2, 14))
def test_above_n_rows_everything_passes_in_smaller_works(rows: int) -> None:
    stage, plan = staged(FaultRule(stage="launch", min_rows=rows, times="always"))
    tally = both(stage)
    assert tally.casualties == []
    assert sampled(tally) == right_tokens(stage)
    assert plan.fired > 0


def test_a_single_chunk_shrinks_and_stays_small() -> None:
    """Once 8 rows have failed the rest of the chunk is not tried with 8 again."""
    stage, plan = staged(FaultRule(stage="launch", min_rows=4, times="always"), n=1)
    tally = isolate(stage, None, stage.prefill(stage.chunk(0, 0, 13)))
    assert sampled(tally) == {0: stage.runner.expected((*PROMPT, 0), 1)[0]}
    ends = [end for result in tally.results for _, end in result.computed]
    assert ends == [3, 6, 9, 12, 13]
    assert plan.fired == 2


def test_always_starves_everybody_and_counts_what_was_computed() -> None:
    stage, _ = staged(FaultRule(stage="launch", times="always"))
    tally = both(stage)
    assert sorted(casualty.key[1] for casualty in tally.casualties) == list(range(6))
    assert all(casualty.starved for casualty in tally.casualties)
    assert tally.results == []


def test_a_retry_finds_the_first_attempt_s_memory_free() -> None:
    """References go before the retry: activations, logits, and the frames of the traceback."""
    stage, _ = staged(n=1)
    seen: list[int] = []

    def refuse_once(rows: int) -> None:
        seen.append(stage.runner.live_bytes())
        if len(seen) == 1:
            raise torch.OutOfMemoryError("no")

    stage.runner.before_logits = refuse_once
    tally = isolate(stage, None, stage.prefill(stage.chunk(0, 0, 13)))
    assert tally.casualties == []
    before_first_piece = seen[0]
    assert before_first_piece > 0
    assert seen[1] <= before_first_piece
    assert stage.runner.live_bytes() == 0


def test_any_other_error_ends_its_request_at_once() -> None:
    stage, _ = staged()
    calls: list[int] = []

    class Picky(type(stage.context.sampler)):  # type: ignore[misc]
        def sample(self, logits: torch.Tensor, rows: list) -> list:  # type: ignore[type-arg]
            calls.append(len(rows))
            if any(row.key == ("c", 3) for row in rows):
                raise ZeroDivisionError("odd parameters")
            return super().sample(logits, rows)

    object.__setattr__(stage.context, "sampler", Picky(stage.runner.vocab_size))
    tally = both(stage)
    (casualty,) = tally.casualties
    assert casualty.key == ("c", 3)
    assert not casualty.starved
    expected = right_tokens(stage)
    del expected[3]
    assert sampled(tally) == expected
    assert calls == [3, 3, 1, 2, 1, 1]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
    ],
)
def test_a_lost_device_is_fatal(error: Exception) -> None:
    stage, _ = staged()

    def lose(rows: int) -> None:
        raise error

    stage.runner.before_logits = lose
    with pytest.raises(FatalDeviceError, match="decode work 17"):
        both(stage)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), FatalDeviceError),
        (ValueError("a bug"), ValueError),
    ],
)
def test_a_device_may_say_so_first_where_the_host_waits(
    error: Exception, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise error

    pair = SerialPair(CPU)
    monkeypatch.setattr(pair, "fence", lambda: SimpleNamespace(synchronize=broken))
    stage, _ = staged()
    work = stage.decode(stage.slot(1))
    with pytest.raises(told, match=str(error)):
        Isolation(pair, pair).run(work, None)


def test_our_own_bugs_are_not_blamed_on_a_request() -> None:
    stage, _ = staged()

    def confuse(rows: int) -> None:
        raise WorkStateError("decode work 17: finish in PREPARED")

    stage.runner.before_logits = confuse
    with pytest.raises(WorkStateError):
        both(stage)


@pytest.mark.parametrize(
    ("error", "memory", "fatal"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True, False),
        (MemoryError(), True, False),
        (
            RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            True,
            False,
        ),
        (RuntimeError("shape mismatch"), False, False),
        (RuntimeError("CUDA error: unspecified launch failure"), False, True),
        (ValueError("CUDA error"), False, False),
    ],
)
def test_errors_are_told_apart(error: Exception, memory: bool, fatal: bool) -> None:
    assert is_out_of_memory(error) is memory
    assert is_fatal(error) is fatal


def test_torch_s_real_allocation_failure_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_kv_tensors_double_and_stop_at_the_capacity() -> None:
    sizes: list[int] = []
    runner = HashRunner()
    grow = runner.resize_kv
    runner.resize_kv = lambda n: (sizes.append(n), grow(n))[1]  # type: ignore[method-assign]
    elastic = ElasticKV(runner, first=4, capacity=30)
    for needed in (3, 5, 8, 9, 17, 30):
        elastic.cover(needed)
        assert elastic.n_blocks >= needed
    assert sizes == [4, 8, 16, 30]
    elastic.shrink(10)
    assert (sizes[-1], elastic.n_blocks) == (10, 10)


def test_growth_takes_what_it_can_get() -> None:
    runner = HashRunner()
    runner.max_blocks = 12
    elastic = ElasticKV(runner, first=8, capacity=100)
    elastic.cover(10)
    assert elastic.n_blocks == 10
    with pytest.raises(KVGrowthError, match="from 10 to 13"):
        elastic.cover(13)
    assert elastic.n_blocks == 10
