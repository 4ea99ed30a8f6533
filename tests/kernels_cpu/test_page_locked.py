"""Memory of copies: what is on its way is not written over, and nothing goes back to torch."""

from __future__ import annotations

import pytest
import torch

from kernels.spec.page_locked import PageLocked, Passed, page_locked

CPU = torch.device("cpu")


class Point:
    """A mark that the test lets the device come to."""

    def __init__(self) -> None:
        self.reached = True
        self.records = 0

    def record(self) -> None:
        self.records += 1
        self.reached = False

    def query(self) -> bool:
        return self.reached


@pytest.fixture
def marks() -> list[Point]:
    return []


@pytest.fixture
def places(marks: list[Point]) -> PageLocked:
    def new_mark() -> Point:
        marks.append(Point())
        return marks[-1]

    return PageLocked(CPU, new_mark, pin=False)


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(7),
        torch.arange(6, dtype=torch.int32).view(2, 3).t(),
        torch.tensor([[True, False], [False, False]]),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.randn(3000),
    ],
    ids=lambda values: f"{values.dtype} {tuple(values.shape)}",
)
def test_a_copy_is_the_tensor(places: PageLocked, values: torch.Tensor) -> None:
    there = places.send(values)
    assert there.dtype == values.dtype
    assert torch.equal(there, values)


def test_memory_is_used_again_only_when_its_copy_is_done(
    places: PageLocked, marks: list[Point]
) -> None:
    places.send(torch.zeros(4))
    places.send(torch.ones(4))
    assert len(marks) == 2  # the first was still on its way
    marks[0].reached = True
    places.send(torch.ones(4))
    assert (len(marks), marks[0].records) == (2, 2)
    places.send(torch.ones(4))
    assert len(marks) == 3  # the second is the oldest, and on its way


def test_a_lease_is_nobody_elses_until_it_is_let_go(places: PageLocked, marks: list[Point]) -> None:
    ours = places.lease(100)
    assert len(ours.memory) == 100
    theirs = places.lease(100)
    assert ours.memory.data_ptr() != theirs.memory.data_ptr()
    address = ours.memory.data_ptr()
    del ours
    again = places.lease(90)
    assert (again.memory.data_ptr(), len(marks)) == (address, 2)


def test_memory_is_kept_whoever_forgets_it(places: PageLocked, marks: list[Point]) -> None:
    """Never freed: the same places serve for ever."""
    addresses = set()
    for _ in range(20):
        lease = places.lease(10)
        addresses.add(lease.memory.data_ptr())
        lease.note()
        del lease
        marks[0].reached = True
    assert (len(addresses), len(marks)) == (1, 1)


def test_memory_of_a_lost_device_is_kept(places: PageLocked, marks: list[Point]) -> None:
    """Whoever asks for it is told; torch would end the process where it is freed."""
    address = places.lease(10).memory.data_ptr()

    def lost() -> bool:
        raise RuntimeError("lost")

    marks[0].query = lost  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            places.lease(10)
    del marks[0].query
    assert places.lease(10).memory.data_ptr() == address
    assert len(marks) == 1


def test_sizes_do_not_share_memory(places: PageLocked, marks: list[Point]) -> None:
    places.lease(5000)
    marks[0].reached = True
    assert len(places.lease(4097).memory) == 4097
    assert len(marks) == 1
    places.lease(4096)
    assert len(marks) == 2


def test_memory_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    places = PageLocked(CPU, Passed, pin=False)
    with torch.inference_mode():
        places.send(torch.zeros(4))
    lease = places.lease(16)
    lease.memory.zero_()
    assert places.send(torch.ones(4)).tolist() == [1, 1, 1, 1]


def test_a_device_has_one() -> None:
    assert page_locked(CPU) is page_locked(torch.device("cpu"))
    assert page_locked(CPU).send(torch.arange(3)).tolist() == [0, 1, 2]
