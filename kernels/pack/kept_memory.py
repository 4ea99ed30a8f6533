"""Memory of what stays, apart from what lives only while a model is loaded.

torch's allocator keeps the memory of every stream to itself. While a model is loaded, all work is
on a stream of its own; only what kept() surrounds is allocated for the caller's. So the tensors
that stay lie one behind the other, and what was beside them goes back to the card whole: mixed, the
holes between them took 132 MiB of a 7B model's 3,200 (docs/log.md). Knows no layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_home: torch.Stream | None = None


@contextmanager
def loading_apart(device: torch.device) -> Iterator[None]:
    """Inside, the current stream is one whose memory goes back afterwards. On a CPU nothing
    changes. Not for several threads.
    """
    global _home
    if device.type == "cpu":
        yield
        return
    home, apart = torch.accelerator.current_stream(device), torch.Stream(device)
    apart.wait_stream(home)
    before, _home = _home, home
    try:
        with apart:
            yield
    finally:
        _home = before
        home.wait_stream(apart)


@contextmanager
def kept() -> Iterator[None]:
    """Allocate here, and only that, what stays when the model is loaded."""
    if _home is None:
        yield
        return
    with _home:
        yield


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """The same values where what stays lies; the tensor itself while nothing is loaded apart."""
    if _home is None:
        return tensor
    with kept():
        place = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return place.copy_(tensor)
