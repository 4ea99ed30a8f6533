"""Captures of CUDA graphs that fail in the middle, for tests of decode and of prefill graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine_actor.model import graph_capture


def failing(error: Callable[[], Exception]) -> type[graph_capture.CudaCapture]:
    class Failing(graph_capture.CudaCapture):
        """Fails in the middle of a capture."""

        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            def broken() -> None:
                run()
                raise error()

            return super().__call__(broken)

    return Failing


def unrecordable() -> Exception:
    """What a capture does not allow: it is broken off by the driver."""
    try:
        torch.cuda.current_stream().synchronize()
    except RuntimeError as error:
        return error
    raise AssertionError("a synchronisation was captured")
