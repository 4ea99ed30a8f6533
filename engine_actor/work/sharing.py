"""The five ways to share a device behind one seam: which of them it has, and which runs a step.

Knows modes and why one is missing; what a mode does is in streams.py and mixed.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine_actor import ops
from engine_actor.core.overlap_policy import Sharing
from engine_actor.core.plan import OverlapMode
from engine_actor.work.base import Work
from engine_actor.work.pair import Attempt, Launched, Pair, SerialPair, finish_in_order
from engine_actor.work.streams import DECODE_PRIORITY, PREFILL_PRIORITY, CudaStreams, StreamPair

NO_STREAMS = "the CPU has no streams: decode runs first, then prefill"


class SharedDevice:
    """A pair for each mode of this device. `mode` and `max_ctas`: what the wish comes to; `reason`:
    why that is another mode, None where it is not.
    """

    def __init__(
        self, pairs: Mapping[OverlapMode, Pair], mode: OverlapMode, reason: str | None = None
    ) -> None:
        self._pairs = dict(pairs)
        self.mode = mode
        self.max_ctas = pairs[mode].max_ctas
        self.reason = reason

    @property
    def modes(self) -> tuple[OverlapMode, ...]:
        """What a policy may choose from."""
        return tuple(self._pairs)

    def limit_of(self, mode: OverlapMode) -> int | None:
        """What a prefill takes beside a decode in this mode where nobody says otherwise."""
        return self._pairs[mode].max_ctas

    def launch(
        self,
        decode: Work | None,
        prefill: Work | None,
        attempt: Attempt,
        sharing: Sharing | None = None,
    ) -> Launched:
        pair = self._pairs[self.mode if sharing is None else sharing.mode]
        return pair.launch(decode, prefill, attempt, sharing)

    def finish(self, launched: Launched, attempt: Attempt) -> None:
        finish_in_order(launched, attempt)


def share_device(
    device: torch.device, wanted: OverlapMode, max_ctas: int | None = None
) -> SharedDevice:
    """Every mode that `device` has; streams only where the overlap is not switched off, green
    contexts only where they are wanted. `max_ctas`: a prefill's multiprocessors beside a decode,
    where the mode limits them; None for three quarters of the card.
    """
    serial = SerialPair(device)
    # One forward needs no second stream: the mixed work comes as the only one of its step.
    pairs: dict[OverlapMode, Pair] = {OverlapMode.SERIAL: serial, OverlapMode.MIXED: serial}
    if wanted is OverlapMode.SERIAL:
        return SharedDevice(pairs, wanted)
    if device.type != "cuda":
        found = wanted in pairs
        return SharedDevice(
            pairs, wanted if found else OverlapMode.SERIAL, None if found else NO_STREAMS
        )
    api = CudaStreams(device)
    decode, prefill = api.new_stream(high_priority=True), api.new_stream(high_priority=False)
    most = max_ctas or three_quarters(ops.device_info(device).multiprocessors)
    pairs[OverlapMode.TWO_STREAMS] = StreamPair(api, decode, prefill, serial)
    pairs[OverlapMode.TWO_STREAMS_CAPPED] = StreamPair(
        api, decode, prefill, serial, OverlapMode.TWO_STREAMS_CAPPED, most
    )
    if wanted is OverlapMode.GREEN:
        try:
            pairs[wanted] = _green_pair(device, api, serial, most)
        except ops.GreenContextRefused as refusal:
            reason = f"green contexts refused, two streams instead: {refusal}"
            return SharedDevice(pairs, OverlapMode.TWO_STREAMS, reason)
    return SharedDevice(pairs, wanted)


def three_quarters(multiprocessors: int) -> int:
    """Of a card, so that whole pairs of multiprocessors are left: 100 of 132, 16 of 20."""
    return multiprocessors - max(2, multiprocessors // 8 * 2)


def _green_pair(device: torch.device, api: CudaStreams, serial: SerialPair, most: int) -> Pair:
    """Raises GreenContextRefused. The prefill's products are told how large its part is: blocks
    that stay would otherwise be launched for the whole card and queue for a second round.
    """
    count = ops.device_info(device).multiprocessors
    index = 0 if device.index is None else device.index
    decode, prefill = ops.split_card(index, count - most, (DECODE_PRIORITY, PREFILL_PRIORITY))
    return StreamPair(
        api,
        api.foreign_stream(decode.stream),
        api.foreign_stream(prefill.stream),
        serial,
        OverlapMode.GREEN,
        prefill.multiprocessors,
    )
