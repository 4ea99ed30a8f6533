"""The residual stream of few rows between products that take its norms upon themselves.

One product adds to the stream and leaves it times the next norm's weight, with sums of squares
beside; the next product multiplies that and applies the norm's one factor a row to its sums
(include/carried_norm.cuh). Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SQUARES_OF = 16
"""Values that share a sum of squares."""
WHOLE_WIDTH = 4 * SQUARES_OF
"""The stream's width is a multiple of it: sums are read four at a time."""


@dataclass(slots=True, eq=False)
class Carry:
    """stream [M, H] fp16 or fp32, changed in place. x f16[M, H]: the stream times the next norm's
    weight and times the rows' lift. squares f32[M, H / 16]. lifts f32[2, M], the one in x first.
    """

    stream: torch.Tensor
    x: torch.Tensor
    squares: torch.Tensor
    lifts: list[torch.Tensor]
    eps: float

    @classmethod
    def of(cls, stream: torch.Tensor, eps: float) -> Carry:
        """Room beside a stream; what is in it has yet to be left there."""
        rows, width = stream.shape
        device = stream.device
        return cls(
            stream,
            torch.empty(rows, width, dtype=torch.float16, device=device),
            torch.empty(rows, width // SQUARES_OF, device=device),
            list(torch.empty(2, rows, device=device)),
            eps,
        )

    def taken(self) -> None:
        """x has been read; what is left next has the lift that its reader chose."""
        self.lifts.reverse()


def norm_arguments(normed: Carry | None) -> tuple[object, ...]:
    """What a kernel that may norm its x (NORMED) takes for that, in its order."""
    if normed is None:
        return (None, None, None, 0, 0.0)
    return (normed.squares, *normed.lifts, normed.stream.shape[1], normed.eps)


def refuse_carry(stream: torch.Tensor) -> str | None:
    """Why the products cannot carry such a stream, else None."""
    if stream.dtype not in (torch.float16, torch.float32):
        return f"adds to fp16 and fp32, not {stream.dtype}"
    if stream.shape[1] % WHOLE_WIDTH:
        return f"{stream.shape[1]} values a row are no multiple of {WHOLE_WIDTH}"
    return None
