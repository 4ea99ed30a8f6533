"""Decode graphs on the CPU, with a capture that records a closure: staging, replay, staleness,
failed captures. The forward writes what it reads, so a stale or misplaced row is seen.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine_actor import ops
from engine_actor.core.plan import DecodeSlot
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.config import ModelConfig
from engine_actor.model.decode_buckets import Bucket, DecodeBuckets
from engine_actor.model.decode_graphs import DecodeGraphs
from engine_actor.model.layers.rope import Rotary
from engine_actor.work.inputs import build_decode
from scripts.random_model import SHAPES

BLOCK = 4
VOCAB = 7
CPU = torch.device("cpu")
CONFIG = ModelConfig.from_hf(SHAPES["tiny"].config, None)


class FakeCapture:
    """Holds the addresses that its graphs were captured with, as a graph does."""

    def __init__(self, stage: Stage) -> None:
        self.nbytes = 0
        self.error: Exception | None = None
        self._stage = stage

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        self.nbytes += 100
        address = self._stage.address

        def replay() -> None:
            assert self._stage.address == address, "a stale graph was replayed"
            self._stage.is_replay = True
            run()
            self._stage.is_replay = False

        return replay


class Stage:
    """A forward whose logits say what each staged row held."""

    def __init__(self, max_rows: int = 8, max_context: int = 2000, graphs: bool = True) -> None:
        self.address = (1,)
        self.is_replay = False
        self.ran: list[tuple[int, int, bool]] = []
        self.capture = FakeCapture(self)
        self.graphs = DecodeGraphs(
            DecodeBuckets.up_to(max_rows, max_context),
            self.forward,
            lambda tables, lengths, longest: ops.AttentionPlan((), (), (), longest, None),
            Rotary(CONFIG, CPU),
            lambda: self.address,
            self.capture if graphs else None,
            vocab_size=VOCAB,
            head_dim=CONFIG.head_dim,
            block_tokens=BLOCK,
            device=CPU,
        )

    def forward(self, rows: ops.StagedRows, plan: ops.AttentionPlan, out: torch.Tensor) -> None:
        self.ran.append((len(rows.ids), plan.block_tokens, self.is_replay))
        out[:, 0] = rows.ids
        out[:, 1] = rows.slots
        out[:, 2] = rows.lengths
        for row, length in enumerate(rows.lengths.tolist()):
            out[row, 3] = rows.tables[row, : -(-length // BLOCK)].sum()
        out[:, 4] = rows.cos[:, 0, -1]
        out[:, 5] = rows.sin[:, 0, -1]


def batch(*positions: int) -> BatchInputs:
    """Row i has id 10 + i and blocks of its own."""
    slots = [
        DecodeSlot(("c", i), p, 10 + i, tuple(range(1000 * i, 1000 * i + p // BLOCK + 1)), i)
        for i, p in enumerate(positions)
    ]
    return build_decode(slots, BLOCK, CPU)


def expected(inputs: BatchInputs) -> torch.Tensor:
    rotary = Rotary(CONFIG, CPU)
    rotary.reach(5000)
    cos, sin = rotary.tables
    return torch.tensor(
        [
            [
                float(inputs.ids[i]),
                float(inputs.slots[i]),
                float(position + 1),
                float(sum(inputs.block_lists[i])),
                float(cos[position, -1]),
                float(sin[position, -1]),
            ]
            for i, position in enumerate(inputs.positions.tolist())
        ]
    )


def check(stage: Stage, *positions: int) -> None:
    inputs = batch(*positions)
    logits = stage.graphs.logits(inputs)
    assert logits is not None
    torch.testing.assert_close(logits[:, :6], expected(inputs))


def test_the_first_step_of_a_bucket_runs_and_the_next_are_replayed() -> None:
    stage = Stage()
    check(stage, 5, 90, 17)
    check(stage, 6, 91, 18)
    check(stage, 3)
    check(stage, 700, 1)
    check(stage, 7, 92, 19, 511)
    assert stage.ran == [
        (4, 512, False),
        (4, 512, True),
        (1, 512, False),
        (2, 1024, False),
        (4, 512, True),
    ]
    counts = stage.graphs.counts
    assert (counts.graphs, counts.replays, counts.eager, counts.nbytes) == (3, 2, 3, 300)


def test_rows_left_of_a_larger_batch_become_padding() -> None:
    stage = Stage()
    check(stage, 5, 90, 17, 3)
    stage.graphs.logits(batch(9, 8, 7))
    padding = stage.graphs._logits[3, :4].tolist()
    assert padding == [0.0, -1.0, 0.0, 0.0]


def test_what_fits_no_bucket_runs_nothing() -> None:
    stage = Stage(max_rows=2)
    assert stage.graphs.logits(batch(1, 2, 3)) is None
    assert stage.graphs.logits(batch(2000)) is None
    assert stage.ran == []
    assert stage.graphs.counts.unbucketed == 2


def test_a_moved_cache_drops_its_graphs() -> None:
    stage = Stage()
    check(stage, 5)
    stage.graphs.cache_moved()
    check(stage, 6)
    assert stage.ran[-1][2], "the cache has not moved"
    stage.address = (2,)
    stage.graphs.cache_moved()
    assert stage.graphs.counts.graphs == 0
    assert stage.graphs.counts.dropped == 1
    check(stage, 7)
    check(stage, 8)
    assert [ran[2] for ran in stage.ran] == [False, True, False, True]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError("operation not permitted")]
)
def test_a_failed_capture_costs_nobody_anything(error: Exception) -> None:
    stage = Stage()
    stage.capture.error = error
    check(stage, 5)
    check(stage, 6)
    counts = stage.graphs.counts
    assert (counts.failures, counts.graphs, counts.eager) == (1, 0, 2), "tried once, not each step"
    stage.capture.error = None
    check(stage, 5, 6)
    assert counts.graphs == 1, "other buckets are not given up"
    stage.graphs.cache_moved()
    check(stage, 7)
    check(stage, 8)
    assert stage.ran[-1][2], "a resize is an occasion to try again"


def test_switched_off_the_same_buckets_run() -> None:
    stage = Stage(graphs=False)
    check(stage, 5, 6, 7)
    check(stage, 8, 9, 10)
    assert stage.ran == [(4, 512, False)] * 2


def test_warming_up_captures_over_padding() -> None:
    stage = Stage()
    check(stage, 5, 6, 7, 8)
    stage.graphs.warm_up(Bucket(2, 512))
    assert stage.graphs._logits[:2, :4].tolist() == [[10.0, -1.0, 0.0, 0.0], [11.0, -1.0, 0.0, 0.0]]
    check(stage, 1, 2)
    assert stage.ran[-1] == (2, 512, True)


def test_no_memory_to_warm_up_is_no_reason_not_to_start() -> None:
    stage = Stage()

    def starved(rows: ops.StagedRows, plan: ops.AttentionPlan, out: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no memory")

    stage.graphs._forward = starved
    assert not stage.graphs.warm_up(Bucket(8, 512))
    stage.graphs._forward = stage.forward
    check(stage, 1, 2, 3, 4, 5)
