"""The gradient of one batch in fixed tensors, so that a GPU can replay it as one CUDA graph.

A step of tuning is some ten thousand launches, each far shorter than the Python that makes it.
Knows a loss over a batch and what it depends on, no optimiser.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""As graph_capture.CudaCapture."""
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden states before layer 0, the source's answers) of a batch -> a scalar."""
LOGGER = logging.getLogger(__name__)


class Slopes:
    """Sets the .grad of every leaf for a batch of [B, T, hidden]; the next batch overwrites it.

    capture: None runs launch by launch, which is also what remains where a capture fails.
    """

    def __init__(
        self,
        loss: Loss,
        leaves: Sequence[torch.Tensor],
        like: torch.Tensor,
        capture: Capture | None,
    ) -> None:
        """like: a batch, for its shape."""
        self._loss = loss
        self._leaves = list(leaves)
        self._hidden = torch.empty_like(like)
        self._wanted = torch.empty_like(like)
        self._value = torch.zeros((), device=like.device)
        self._capture = capture
        self._replay: Callable[[], None] | None = None

    def __call__(self, hidden: torch.Tensor, wanted: torch.Tensor) -> float:
        """The loss of the batch; waits for it."""
        self._hidden.copy_(hidden)
        self._wanted.copy_(wanted)
        if self._capture is not None:
            self._record(self._capture)
        (self._replay or self._run)()
        return float(self._value)

    def _run(self) -> None:
        loss = self._loss(self._hidden, self._wanted)
        found = torch.autograd.grad(loss, self._leaves)
        self._value.copy_(loss.detach())
        for leaf, slope in zip(self._leaves, found, strict=True):
            leaf.grad = slope

    def _record(self, capture: Capture) -> None:
        """Once: a run to load what it needs, whose result nobody sees, and the capture."""
        self._capture = None
        self._run()
        for leaf in self._leaves:
            leaf.grad = None
        try:
            self._replay = capture(self._run)
        except RuntimeError as error:
            LOGGER.info("tuning goes launch by launch: %s", error)
