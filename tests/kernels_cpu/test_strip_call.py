"""What is done around a launch of strips: rows made ready, y found or made; no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.linear import strip_call
from kernels.linear.strip import StripWeights
from kernels.linear.strip_call import StripCall

COLUMNS, OUT = 128, 32


def strips(perm: torch.Tensor | None = None) -> StripWeights:
    words = torch.zeros(OUT // 16, COLUMNS // 64, 32, 4, dtype=torch.int32)
    scales = torch.ones(OUT // 16, 1, 16, dtype=torch.float16)
    return StripWeights(4, 128, OUT, COLUMNS, words, scales, None, None, perm)


class Recorded(StripCall):
    """Keeps what it is told to launch, and writes a sign into y."""

    def _launch(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        y: torch.Tensor,
        launch_dependents: bool,
    ) -> None:
        self.told = x, residual, launch_dependents
        y.fill_(7)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strip_call, "device_info", lambda _: SimpleNamespace(multiprocessors=132))


def test_y_is_made_of_the_kernels_width_or_written_where_it_is_told():
    plain, gated = Recorded(strips()), Recorded(strips(), gated=True)
    x = torch.ones(3, COLUMNS)
    assert (plain(x).shape, gated(x).shape) == ((3, OUT), (3, OUT // 2))
    assert plain(x).dtype == torch.float16
    residual = torch.zeros(3, OUT, dtype=torch.float16)
    assert plain(x, residual=residual, out=residual) is residual
    assert plain.told[1] is residual
    assert residual.unique().tolist() == [7]


def test_x_comes_in_fp16_and_in_stored_order():
    call = Recorded(strips(torch.arange(COLUMNS).flip(0)))
    call(torch.arange(COLUMNS, dtype=torch.float32).expand(2, -1))
    x = call.told[0]
    assert x.dtype == torch.float16
    assert x.is_contiguous()
    assert x[1].tolist() == list(range(COLUMNS - 1, -1, -1))


def test_only_calls_behind_the_first_one_begin_early_and_no_row_is_no_call():
    call = Recorded(strips())
    assert call(torch.ones(0, COLUMNS)).shape == (0, OUT)
    assert not hasattr(call, "told")
    begun_early = []
    for _ in range(3):
        call(torch.ones(1, COLUMNS))
        begun_early.append(call.told[2])
    assert begun_early == [False, True, True]
