"""Who may come in: checks of one Submit, and the tombstones of cancels that came first.

Knows the model's facts; knows no scheduler.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

import numpy as np

from engine_actor.core.params import InvalidParam
from engine_actor.core.sequence import Key, Sequence
from engine_actor.facts import EngineFacts
from engine_actor.messages import Submit

INVALID = "invalid"
MAX_TOMBSTONES = 100_000
"""Far more than can be overtaken at once; the oldest are forgotten first."""


def refusal(message: Submit, facts: EngineFacts) -> str | None:
    """Why a Submit cannot be served: a code, or None where it can."""
    if not message.prompt_ids or not _all_below(facts.vocab_size, message.prompt_ids):
        return INVALID
    try:
        message.sampling.require_vocabulary(facts.vocab_size, facts.eos_token_ids)
    except InvalidParam:
        return INVALID
    return None


def _all_below(size: int, ids: tuple[int, ...]) -> bool:
    """Whether all are ids of a vocabulary of `size`. A third of the time of min() and max(), which
    the first token of a long prompt waits for.
    """
    try:
        numbers = array("I", ids)
    except OverflowError:
        return False
    return int(np.frombuffer(numbers, dtype=np.uintc).max()) < size


class Tombstones:
    """Keys that were cancelled before their submit was seen."""

    def __init__(self, most: int = MAX_TOMBSTONES) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Key) -> None:
        self._keys[key] = None
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def take(self, key: Key) -> bool:
        """True where the key was cancelled already; the tombstone is used up."""
        if key not in self._keys:
            return False
        del self._keys[key]
        return True

    def drop_client(self, client: str) -> None:
        for key in [key for key in self._keys if key[0] == client]:
            del self._keys[key]


def new_sequence(key: Key, message: Submit, now: float) -> Sequence:
    """The sequence of an accepted request; `now` in seconds of the engine's clock."""
    left = message.deadline_ms
    return Sequence(
        key=key,
        tokens=list(message.prompt_ids),
        sampling=message.sampling,
        n_prompt=len(message.prompt_ids),
        arrived=now,
        priority=message.priority,
        deadline=None if left is None else now + left / 1e3,
        salt=message.salt,
        trace_id=message.trace_id,
    )
