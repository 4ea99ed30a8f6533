"""The three verbs, alone: states, what each may touch, prompt logprobs."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from engine_actor.core.sequence import SeqState
from engine_actor.work.base import Work, WorkResult, WorkState, WorkStateError
from engine_actor.work.pair import CallerLane
from tests.doubles.scripted_runner import HashRunner
from tests.work.stage import Stage

LANE = CallerLane(torch.device("cpu"))
PROMPT = (3, 1, 4, 1, 5, 9)


def run(work: Work) -> WorkResult:
    work.prepare()
    work.launch(LANE)
    work.sample()
    return work.finish()


def test_a_prompt_then_a_token() -> None:
    """S-46 to S-49: prepare and launch change nothing, finish reports."""
    stage = Stage()
    request = stage.request(1, PROMPT)
    first, second = stage.runner.expected(PROMPT, 2)
    work = stage.prefill(stage.chunk(1, 0, 6))
    run(work)
    assert work.result is not None
    assert work.result.computed == ((("c", 1), 6),)
    assert [sample.token for sample in work.result.sampled] == [first]
    assert request.tokens == list(PROMPT)
    request.tokens.append(first)
    step = stage.decode(stage.slot(1))
    run(step)
    assert step.result is not None
    assert step.result.computed == ((("c", 1), 7),)
    assert [sample.token for sample in step.result.sampled] == [second]


def test_several_chunks_in_one_work_and_rows_in_order() -> None:
    stage = Stage()
    stage.request(1, PROMPT)
    stage.request(2, PROMPT[::-1])
    run(stage.prefill(stage.chunk(1, 0, 2)))
    work = stage.prefill(stage.chunk(1, 2, 6), stage.chunk(2, 0, 3))
    assert work.rows == 7
    run(work)
    assert work.result is not None
    assert work.result.computed == ((("c", 1), 6), (("c", 2), 3))
    assert [(s.key, s.token) for s in work.result.sampled] == [
        (("c", 1), stage.runner.expected(PROMPT, 1)[0])
    ]


def test_prepare_never_runs_the_model() -> None:
    """S-46."""
    stage = Stage()
    stage.request(1, PROMPT)
    stage.prefill(stage.chunk(1, 0, 6)).prepare()
    assert stage.runner.launches == 0


def test_nothing_is_sampled_before_finish() -> None:
    """S-54: launch samples nothing, and what sample() begins changes no request."""
    stage = Stage()
    request = stage.request(1, PROMPT)
    work = stage.prefill(stage.chunk(1, 0, 6))
    work.prepare()
    work.launch(LANE)
    assert work.pending is None
    work.sample()
    assert work.pending is not None
    assert work.result is None
    assert request.tokens == list(PROMPT)
    assert request.state is SeqState.PREFILL


@pytest.mark.parametrize(
    ("verbs", "message"),
    [
        (["launch"], "decode work 17: launch in NEW"),
        (["finish"], "decode work 17: finish in NEW"),
        (["prepare", "finish"], "decode work 17: finish in PREPARED"),
        (["prepare", "sample"], "decode work 17: sample in PREPARED"),
        (["prepare", "launch", "finish"], "decode work 17: finish in LAUNCHED"),
        (["prepare", "launch", "sample", "sample"], "decode work 17: sample in SAMPLED"),
        (["prepare", "prepare"], "decode work 17: prepare in PREPARED"),
        (["prepare", "launch", "launch"], "decode work 17: launch in LAUNCHED"),
        (["prepare", "launch", "sample", "finish", "finish"], "decode work 17: finish in DONE"),
        (["prepare", "launch", "sample", "finish", "fail"], "decode work 17: fail in DONE"),
        (["fail", "prepare"], "decode work 17: prepare in FAILED"),
        (["prepare", "fail", "launch"], "decode work 17: launch in FAILED"),
    ],
)
def test_one_legal_step_each(verbs: list[str], message: str) -> None:
    stage = Stage()
    stage.request(1, PROMPT)
    run(stage.prefill(stage.chunk(1, 0, 6)))
    stage.requests["c", 1].tokens.append(7)
    work = stage.decode(stage.slot(1))
    calls = {
        "prepare": work.prepare,
        "launch": lambda: work.launch(LANE),
        "sample": work.sample,
        "finish": work.finish,
        "fail": lambda: work.fail(MemoryError()),
    }
    for verb in verbs[:-1]:
        calls[verb]()
    with pytest.raises(WorkStateError, match=message):
        calls[verbs[-1]]()


def test_the_timer_is_born_in_launch() -> None:
    """S-50, S-51, S-56: never "created but not recorded"."""
    stage = Stage()
    stage.request(1, PROMPT)
    work = stage.prefill(stage.chunk(1, 0, 6))
    assert (work.timer, work.elapsed()) == (None, None)
    work.prepare()
    assert (work.timer, work.elapsed()) == (None, None)
    work.launch(LANE)
    elapsed = work.elapsed()
    assert elapsed is not None
    assert elapsed > 0.0


def test_a_launch_that_raises_has_no_time_and_keeps_no_tensor() -> None:
    stage = Stage()
    stage.request(1, PROMPT)

    def refuse(rows: int) -> None:
        raise torch.OutOfMemoryError("no")

    stage.runner.before_logits = refuse
    work = stage.prefill(stage.chunk(1, 0, 6))
    work.prepare()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        work.launch(LANE)
    work.fail(caught.value.with_traceback(None))
    assert work.state is WorkState.FAILED
    assert work.elapsed() is None
    del caught
    gc.collect()
    assert stage.runner.live_bytes() == 0


def test_done_works_keep_no_tensor() -> None:
    """S-63: no dense per-request cache grows anywhere."""
    stage = Stage()
    stage.request(1, PROMPT, prompt_logprobs=1)
    work = stage.prefill(stage.chunk(1, 0, 6))
    run(work)
    assert work.inputs is None
    assert stage.runner.live_bytes() == 0


def test_prompt_logprobs_score_every_token_but_the_first() -> None:
    stage = Stage()
    stage.request(1, PROMPT, prompt_logprobs=2)
    entries = []
    for start, end in ((0, 2), (2, 5), (5, 6)):
        work = stage.prefill(stage.chunk(1, start, end))
        run(work)
        assert work.result is not None
        for key, position, part in work.result.prompt_logprobs:
            assert key == ("c", 1)
            assert position == 1 + len(entries)
            entries.extend(part)
    assert [entry.token for entry in entries] == list(PROMPT[1:])
    for index, entry in enumerate(entries):
        best = stage.runner.expected(PROMPT[: index + 1], 1)[0]
        assert entry.top[0][0] == best
        assert len(entry.top) == 2
        total = math.exp(10) + math.exp(5) + stage.runner.vocab_size - 2
        assert entry.top[0][1] == pytest.approx(10 - math.log(total), abs=1e-5)


def test_the_head_sees_at_most_256_rows_at_once() -> None:
    """decisions.md section 3: slices, each reduced before the next."""
    stage = Stage(HashRunner(block_tokens=64))
    rows: list[int] = []
    stage.runner.before_logits = rows.append
    stage.request(1, tuple(range(600)), prompt_logprobs=0)
    work = stage.prefill(stage.chunk(1, 0, 600))
    run(work)
    assert rows == [1, 256, 256, 87]
    assert work.result is not None
    assert sum(len(part) for *_, part in work.result.prompt_logprobs) == 599


@pytest.mark.parametrize("late", [False, True])
def test_requests_that_ended_in_flight_are_dropped_at_finish(late: bool) -> None:
    """B-10: nothing is reported of a cancelled request, whether it ended before its row was sampled
    or after (`late`); its neighbours' tokens are."""
    stage = Stage()
    for rid in (1, 2, 3):
        stage.request(rid, (*PROMPT, rid))
    work = stage.prefill(*(stage.chunk(rid, 0, 7) for rid in (1, 2, 3)))
    work.prepare()
    work.launch(LANE)
    if late:
        work.sample()
    stage.requests["c", 2].move(SeqState.DONE)
    del stage.requests["c", 1]
    if not late:
        work.sample()
    result = work.finish()
    assert [(s.key, s.token) for s in result.sampled] == [
        (("c", 3), stage.runner.expected((*PROMPT, 3), 1)[0])
    ]


def test_tokens_banned_before_min_tokens_are_not_sampled() -> None:
    stage = Stage()
    (best,) = stage.runner.expected(PROMPT, 1)
    stage.request(1, PROMPT, min_tokens=2, stop_token_ids=(best,))
    work = stage.prefill(stage.chunk(1, 0, 6))
    run(work)
    assert work.result is not None
    assert work.result.sampled[0].token == (best + 1) % stage.runner.vocab_size


def test_running_a_work_again_writes_the_same_kv() -> None:
    """Retry is idempotent on KV (decisions.md section 9)."""
    stage = Stage()
    request = stage.request(1, PROMPT)
    blocks = tuple(request.blocks)
    run(stage.prefill(stage.chunk(1, 0, 6)))
    whole = stage.runner.kv_checksum(blocks)
    again = stage.prefill(stage.chunk(1, 0, 6)).again()
    run(again)
    assert stage.runner.kv_checksum(blocks) == whole
    work = stage.prefill(stage.chunk(1, 0, 6))
    for piece in (work.part(0, 2), work.part(2, 3), work.part(3, 6)):
        run(piece)
        assert stage.runner.kv_checksum(blocks) == whole
    request.tokens.append(7)
    run(stage.decode(stage.slot(1)))
    assert stage.runner.kv_checksum(blocks) != whole


def test_halves_and_parts_are_new_works_of_the_same_rows() -> None:
    stage = Stage()
    for rid in (1, 2, 3):
        stage.request(rid, PROMPT)
    work = stage.prefill(*(stage.chunk(rid, 0, 6) for rid in (1, 2, 3)))
    first, second = work.halves()
    assert [half.keys for half in (first, second)] == [(("c", 1),), (("c", 2), ("c", 3))]
    assert first.halves() == ()
    assert first.state is WorkState.NEW
    part = first.part(1, 5)
    assert (part.chunks[0].tokens, part.chunks[0].samples) == (PROMPT[1:5], False)
    assert len(part.chunks[0].blocks) == 2
    assert first.part(4, 6).chunks[0].samples
    decode = stage.decode(*(stage.slot(rid) for rid in (1, 2, 3)))
    assert [half.keys for half in decode.halves()] == [(("c", 1),), (("c", 2), ("c", 3))]
