"""1,000 cancels at random points: everything comes back, nobody else notices."""

from __future__ import annotations

import random

import pytest

from engine_actor.messages import Cancel, Flag
from tests.doubles.scripted_runner import HashRunner, make_engine
from tests.engine.driver import CLIENT, Driver

ROUNDS = 10
CANCELS_A_ROUND = 100
PHASES = ("queued", "prefill", "decode", "before the submit", "all four of n=4")


class Crowd:
    """Keeps arriving; cancels `CANCELS_A_ROUND` of its victims, each in its own phase."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.driver = driver
        self.draw = random.Random(seed)
        self.asked: dict[int, tuple[int, ...]] = {}
        self.victims: dict[int, str] = {}
        self.cancelled: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.next_rid = 0

    @property
    def n_cancelled(self) -> int:
        return sum(self.cancelled.values())

    def arrive(self, step: int) -> None:
        self._cancel_ripe()
        if self.n_cancelled + len(self.victims) >= CANCELS_A_ROUND:
            return
        prompt = tuple(self.draw.randrange(900) for _ in range(self.draw.randint(1, 60)))
        kind = self.draw.random()
        if kind < 0.15:
            self._submit(prompt, "before the submit")
        elif kind < 0.3:
            for _ in range(4):
                self._submit(prompt, "all four of n=4")
        else:
            phase = self.draw.choice([*PHASES[:3], "", ""])
            self._submit(prompt, phase)

    def _submit(self, prompt: tuple[int, ...], phase: str) -> None:
        rid, self.next_rid = self.next_rid, self.next_rid + 1
        if phase == "before the submit":
            self._cancel(rid, phase)
        assert self.driver.submit(rid, prompt, 25) is None
        self.asked[rid] = prompt
        if phase and phase != "before the submit":
            self.victims[rid] = phase

    def _cancel_ripe(self) -> None:
        for rid, phase in list(self.victims.items()):
            seq = self.driver.engine.scheduler.get((CLIENT, rid))
            if seq is None:  # it ended before its phase came
                del self.victims[rid]
                continue
            state = seq.state.value
            ripe = {"queued": state == "waiting", "prefill": state == "prefill"}.get(
                phase, state == "decode"
            )
            if ripe and self.draw.random() < 0.5:
                del self.victims[rid]
                self._cancel(rid, phase)

    def _cancel(self, rid: int, phase: str) -> None:
        self.cancelled[phase] += 1
        self.driver.engine.cancel(CLIENT, Cancel(rid))


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_cancels_at_random_points(seed: int) -> None:
    """B-09, B-10: blocks all back, others' text unchanged, every request ends once."""
    runner = HashRunner()
    engine = make_engine(
        runner, kv_blocks=90, max_num_seqs=8, prefill_chunk_tokens=16, max_queue=1000
    )
    driver = Driver(engine, check=False)
    crowd = Crowd(driver, seed)
    step = 0
    while crowd.n_cancelled < CANCELS_A_ROUND or engine.has_work:
        crowd.arrive(step)
        driver.step()
        if step % 16 == 0:
            engine.scheduler.check()
        step += 1
        assert step < 5000
    assert all(crowd.cancelled.values()), crowd.cancelled
    assert crowd.n_cancelled >= CANCELS_A_ROUND
    ends = {rid: driver.end(rid) for rid in crowd.asked}
    assert sum(end is Flag.CANCELLED for end in ends.values()) == crowd.n_cancelled
    for rid, prompt in crowd.asked.items():
        right = runner.expected(prompt, 25)
        assert driver.tokens(rid) == right[: len(driver.tokens(rid))]
        if ends[rid] is not Flag.CANCELLED:
            assert (ends[rid], driver.tokens(rid)) == (Flag.LENGTH, right)
    driver.assert_all_free()
    assert runner.live_bytes() == 0


def test_cancel_between_launch_and_finish_frees_only_after_the_join() -> None:
    """B-10: the blocks of a sequence whose work is on the device stay taken until it is joined."""
    runner = HashRunner()
    engine = make_engine(runner)
    driver = Driver(engine)
    driver.submit(1, range(10), 30)
    driver.submit(2, range(20, 30), 30)
    for _ in range(5):
        driver.step()
    seen: list[int] = []

    def cancel_in_flight(rows: int) -> None:
        if not seen:
            before = engine.kv.n_free
            engine.cancel(CLIENT, Cancel(1))
            seen.append(engine.kv.n_free - before)

    runner.before_logits = cancel_in_flight
    free = engine.kv.n_free
    driver.step()
    assert seen == [0]
    assert engine.kv.n_free == free + 4
    driver.submit(3, range(40, 60), 10)
    driver.run()
    assert driver.end(1) is Flag.CANCELLED
    assert driver.tokens(2) == runner.expected(range(20, 30), 30)
    assert driver.tokens(3) == runner.expected(range(40, 60), 10)
    driver.assert_all_free()


def test_a_cancel_of_another_client_s_request_names_its_owner() -> None:
    runner = HashRunner()
    engine = make_engine(runner)
    driver = Driver(engine)
    driver.submit(1, range(10), 30, client="a")
    driver.submit(1, range(10), 30, client="b")
    driver.step()
    engine.cancel("c", Cancel(1, "admin", owner="b"))
    driver.run()
    assert driver.end(1, "a") is Flag.LENGTH
    assert driver.end(1, "b") is Flag.CANCELLED
    assert driver.heard["b", 1].code == "cancelled"


def test_a_stop_string_is_an_end_and_no_cancel() -> None:
    """The ingress meets it and tells the engine, whose counters say how texts ended."""
    engine = make_engine(HashRunner())
    driver = Driver(engine)
    driver.submit(1, (1, 2), 50)
    driver.step()
    engine.cancel(CLIENT, Cancel(1, "stop_string"))
    driver.run()
    assert (driver.end(1), driver.heard[CLIENT, 1].code) == (Flag.STOP, None)
    assert engine.metrics.value("requests_finished_total", "stop") == 1
    assert engine.metrics.value("cancelled_total") == 0
    driver.assert_all_free()


def test_a_request_that_its_cancel_has_overtaken_ends_and_is_counted() -> None:
    engine = make_engine(HashRunner())
    driver = Driver(engine)
    engine.cancel(CLIENT, Cancel(1))
    assert driver.submit(1, (1, 2), 50) is None
    driver.run()
    assert (driver.end(1), driver.tokens(1)) == (Flag.CANCELLED, [])
    assert engine.metrics.value("requests_received_total") == 1
    assert engine.metrics.value("requests_finished_total", "cancelled") == 1
    assert engine.metrics.count("queue_seconds") == 0
    driver.assert_all_free()


def test_tombstones_are_bounded_and_used_once() -> None:
    from engine_actor.door import Tombstones

    tombstones = Tombstones(most=3)
    for rid in range(5):
        tombstones.add(("c", rid))
    assert len(tombstones) == 3
    assert [tombstones.take(("c", rid)) for rid in range(5)] == [False, False, True, True, True]
    assert not tombstones.take(("c", 4))


def test_a_client_that_is_gone_leaves_nothing_behind() -> None:
    runner = HashRunner()
    engine = make_engine(runner, max_num_seqs=3)
    driver = Driver(engine)
    for rid in range(6):
        driver.submit(rid, (rid, 1), 30, client="gone")
    driver.submit(1, (5, 6), 30)
    for _ in range(4):
        driver.step()
    assert engine.drop_client("gone") == 6
    driver.run()
    assert driver.tokens(1) == runner.expected((5, 6), 30)
    assert driver.end(0, "gone") is None
    driver.assert_all_free()
    assert engine.metrics.value("requests_finished_total", "cancelled") == 6
