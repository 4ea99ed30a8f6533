"""How a product of many rows is cut into units of work, and how much of the card it may take.

Pure arithmetic over tile sizes: no kernel, no tensor, no device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

SPLITS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
LEAST_STEPS = 4
"""A unit with fewer steps than this would only fill and drain its pipeline."""
GATHER_US = 1.6
GATHER_US_PER_VALUE = 2.2e-6
"""Of writing and summing partial sums: for each shared product, and for each fp32 value of them."""

AnyTile = TypeVar("AnyTile")


@dataclass(frozen=True, slots=True)
class TileCost:
    """What a tile takes, in us on an H200; for other cards the ratios are what counts.

    n, m: its size. blocks: how many share a multiprocessor. step: time of 64 columns with all of
    them busy; lone: with one of them. fixed: of filling the pipeline and storing.
    """

    n: int
    m: int
    blocks: int
    step: float
    lone: float
    fixed: float

    def step_of(self, blocks: int) -> float:
        """With so many blocks on a multiprocessor; as with all where there are more, or none."""
        if blocks >= self.blocks or blocks == 0:
            return self.step
        return self.lone + (self.step - self.lone) * (blocks - 1) / (self.blocks - 1)


@dataclass(frozen=True, slots=True)
class Plan(Generic[AnyTile]):
    """whole: tiles that are a unit of work each; the others are `splits` units each, shares of K.
    units: of both kinds. partials: fp32 values of scratch for the shared tiles.
    """

    tile: AnyTile
    whole: int
    splits: int
    units: int
    partials: int


def plan_units(
    tiles: Mapping[AnyTile, TileCost],
    m: int,
    n: int,
    *,
    steps: int,
    chunk_steps: Mapping[AnyTile, int],
    multiprocessors: int,
    most_tiles_shared: int,
    splits: int | None = None,
) -> Plan[AnyTile]:
    """The cheapest tile and number of splits of K for m rows and n out-features.

    All blocks run in rounds. Tiles that fill whole rounds are never split; those of the last round
    may be, so that all blocks have work in it: all of them, or those that are left over when every
    multiprocessor has one or more of them whole. steps: of 64 columns. chunk_steps: those of a tile
    that cannot be cut apart. splits: forced. The whole card is assumed free: a plan, and so a
    result, is the same whatever share a call gets. Raises ValueError where nothing fits what is
    forced.
    """
    best: tuple[float, Plan[AnyTile]] | None = None
    for tile, cost in tiles.items():
        count = -(-m // cost.m) * -(-n // cost.n)
        rounds, rest = divmod(count, multiprocessors * cost.blocks)
        chunk = chunk_steps[tile]
        chunks = -(-steps // chunk)
        whole_rounds = rounds * (chunks * chunk * cost.step + cost.fixed)
        for split in SPLITS if splits is None else (splits,):
            share = -(-chunks // split)
            if split > 1 and (share * chunk < LEAST_STEPS or (split - 1) * share >= chunks):
                continue
            for layers in range(rest // multiprocessors + 1 if split > 1 else 1):
                last = LastRound(cost, rest, layers, split, multiprocessors)
                if split > 1 and not (0 < last.shared <= most_tiles_shared and last.fits):
                    continue
                time = whole_rounds + last.time(chunks * chunk, share * chunk)
                if best is None or time < best[0]:
                    shared = last.shared if split > 1 else 0
                    scratch = shared * split * cost.n * cost.m
                    units = count - shared + shared * split
                    best = time, Plan(tile, count - shared, split, units, scratch)
    if best is None:
        raise ValueError(f"{splits} splits do not fit {steps} steps of K and {m} x {n} sums")
    return best[1]


@dataclass(frozen=True, slots=True)
class LastRound:
    """`rest` tiles, fewer than there are blocks: `layers` whole ones for each multiprocessor, the
    others in `splits` units each.
    """

    cost: TileCost
    rest: int
    layers: int
    splits: int
    multiprocessors: int

    @property
    def shared(self) -> int:
        """Tiles in units; with one split that is all the same as whole."""
        return self.rest - self.layers * self.multiprocessors

    @property
    def beside(self) -> int:
        """Units on a multiprocessor, beside its whole tiles."""
        return -(-self.shared * self.splits // self.multiprocessors)

    @property
    def fits(self) -> bool:
        """Units beside whole tiles all run at once."""
        return self.layers == 0 or self.layers + self.beside <= self.cost.blocks

    def time(self, steps: int, share: int) -> float:
        """us. steps: of a tile; share: of a unit."""
        cost, units = self.cost, self.shared * self.splits
        gathering = 0.0
        if self.splits > 1:
            gathering = GATHER_US + GATHER_US_PER_VALUE * units * cost.n * cost.m
        if self.layers == 0:
            passes = -(-units // (self.multiprocessors * cost.blocks))
            return passes * (share * cost.step_of(self.beside) + cost.fixed) + gathering
        # While the whole tiles go on, the units' sums are gathered.
        alone = (steps - share) * cost.step_of(self.layers)
        together = share * cost.step_of(self.layers + self.beside)
        return together + max(alone, gathering) + cost.fixed


_limit: int | None = None


@contextlib.contextmanager
def limit_multiprocessors(count: int | None) -> Iterator[None]:
    """Inside, products of many rows leave all but `count` multiprocessors to other streams.

    None: no limit. It is read when a kernel is launched or captured. Not for several threads.
    """
    global _limit
    before, _limit = _limit, count
    try:
        yield
    finally:
        _limit = before


def is_card_limited() -> bool:
    """Whether limit_multiprocessors() is open now."""
    return _limit is not None


def share_of_card(multiprocessors: int) -> int:
    """How many of a card's multiprocessors a product may take now."""
    return multiprocessors if _limit is None else max(1, min(_limit, multiprocessors))
