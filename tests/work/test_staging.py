"""The ring of staging buffers and the buffer of last tokens."""

from __future__ import annotations

from array import array

import torch

from engine_actor.work.staging import RING, PinnedStaging, host_numbers
from engine_actor.work.token_buffer import TokenBuffer

CPU = torch.device("cpu")


def ints(*values: int) -> bytearray:
    return bytearray(array("i", values).tobytes())


class Marks:
    """Points in a stream: which of them the host waited for."""

    def __init__(self) -> None:
        self.made = 0
        self.waited: list[int] = []

    def record(self) -> Mark:
        self.made += 1
        return Mark(self, self.made - 1)


class Mark:
    def __init__(self, marks: Marks, number: int) -> None:
        self._marks = marks
        self._number = number

    def synchronize(self) -> None:
        self._marks.waited.append(self._number)


def test_both_kinds_of_ints_arrive_in_one_copy() -> None:
    staging = PinnedStaging(CPU, Marks().record, pin=False)
    for n_wide, n_narrow in ((1, 1), (3, 0), (7, 5), (9000, 4001), (2, 3)):
        wide = array("q", (2**40 + i for i in range(n_wide)))
        narrow = ints(*(-i for i in range(n_narrow)))
        got = staging(wide, narrow)
        assert [tensor.tolist() for tensor in got] == [
            wide.tolist(),
            [-i for i in range(n_narrow)],
        ]
        assert [tensor.dtype for tensor in got] == [torch.int64, torch.int32]


def test_a_buffer_is_written_again_only_after_its_last_copy() -> None:
    marks = Marks()
    staging = PinnedStaging(CPU, marks.record, pin=False)
    for number in range(3 * RING):
        assert marks.waited == list(range(max(0, number - RING)))
        staging(array("q", [number]), ints(number))
        assert marks.made == number + 1


def test_what_was_staged_before_stays_as_it_was() -> None:
    staging = PinnedStaging(CPU, Marks().record, pin=False)
    staged = [staging(array("q", [n, n]), ints(n)) for n in range(3 * RING)]
    assert [wide.tolist() for wide, _ in staged] == [[n, n] for n in range(3 * RING)]
    assert [narrow.tolist() for _, narrow in staged] == [[n] for n in range(3 * RING)]


def test_a_whole_chunk_finds_room_in_every_buffer() -> None:
    """Page-locking more memory takes milliseconds, in which nobody gets a token."""
    rows, block_tokens = 8192, 16
    staging = PinnedStaging(CPU, Marks().record, rows, pin=False)
    before = [lease.memory.data_ptr() for lease in staging._buffers]
    for _ in range(RING):
        staging(array("q", range(3 * rows + 1)), ints(*range(rows // block_tokens)))
    assert [lease.memory.data_ptr() for lease in staging._buffers] == before


def test_on_the_cpu_nothing_is_copied() -> None:
    wide = array("q", [5, 6])
    packed, _ = host_numbers(wide, ints(1))
    assert packed.data_ptr() == wide.buffer_info()[0]


def test_a_token_in_flight_is_read_from_its_slot() -> None:
    buffer = TokenBuffer(CPU, 4)
    buffer.tokens[:] = torch.tensor([70, 71, 72, 73])
    ids, slots = torch.tensor([-1, 5, -1]), torch.tensor([3, 0, 1])
    assert buffer.read(ids, slots, all_in_flight=False).tolist() == [73, 5, 71]
    assert buffer.read(ids[:1], slots[:1], all_in_flight=True).tolist() == [73]


def test_the_buffer_grows_with_its_tokens() -> None:
    buffer = TokenBuffer(CPU, 2)
    buffer.tokens[:] = torch.tensor([8, 9])
    assert buffer.reach(1).tolist() == [8, 9]
    assert buffer.reach(6).tolist() == [8, 9, 0, 0, 0, 0, 0]
    assert len(buffer.reach(7)) == 14
