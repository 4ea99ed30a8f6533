"""Staging of a decode batch on a GPU against the same in torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.kv.stage import StagedRows, stage_decode

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [1, 5, 64, 300])
@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (3, 4), (64, 64), (65, 96)])
def test_rows_and_padding_as_in_torch(rows: int, batch: int, width: int) -> None:
    draw = torch.Generator().manual_seed(rows + width)
    positions = torch.randint(0, 5000, (rows,), generator=draw)
    inputs = (
        torch.randint(0, 1 << 40, (rows,), generator=draw),
        positions,
        torch.randint(0, 1 << 40, (rows,), generator=draw),
        torch.randint(0, 1 << 30, (rows, width), generator=draw, dtype=torch.int32),
    )
    rotary = torch.randn(5000, 128, generator=draw), torch.randn(5000, 128, generator=draw)
    there = StagedRows.empty(100, 320, 128, torch.device("cuda")).first(batch, 310)
    here = StagedRows.empty(100, 320, 128, torch.device("cpu")).first(batch, 310)
    there.lengths.fill_(9)
    there.slots.fill_(9)
    stage_decode(here, *inputs, rotary)
    ids, slots, tables = inputs[0].cuda(), inputs[2].cuda(), inputs[3].cuda()
    on_device = rotary[0].cuda(), rotary[1].cuda()
    stage_decode(there, ids, positions.cuda(), slots, tables, on_device)
    for field in dataclasses.fields(StagedRows):
        made, wanted = getattr(there, field.name).cpu(), getattr(here, field.name)
        assert torch.equal(made, wanted), field.name
