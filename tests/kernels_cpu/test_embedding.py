"""The launch that begins a step on a GPU, seen without one."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import embedding
from kernels.pack.dequantise import pack_codes
from kernels.pack.packed_linear import PackedLinear


class Recorder:
    """A kernel that notes how it is launched."""

    def __init__(self) -> None:
        self.launches: list[bool] = []

    def launch(self, *_arguments: object, launch_dependents: bool) -> None:
        self.launches.append(launch_dependents)


def test_a_step_begins_behind_all_that_is_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """decode_heads.cu reads lengths before it waits for the launch ahead of it. Were the lookup of
    embeddings to begin early too, they might not be written yet, and a split would wait for ever.
    """
    kernel = Recorder()
    monkeypatch.setattr(embedding, "_kernel", lambda bits, bf16: kernel)
    monkeypatch.setattr(embedding, "refuse_gather", lambda table, dtype: None)
    codes = pack_codes(torch.zeros(4, 64, dtype=torch.int8), 8)
    table = PackedLinear(8, 64, 64, codes, torch.ones(4, 1, dtype=torch.float16))
    embedding.gather_rows_cuda(table, torch.tensor([0, 3]), torch.float16)
    assert kernel.launches == [False]
