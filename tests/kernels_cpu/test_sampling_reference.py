"""The slow definition of a draw against the engine's sampler, on a CPU: equal tokens."""

from __future__ import annotations

import struct
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.core.params import SamplingParams
from engine_actor.model.penalties import SampleRow
from engine_actor.model.random_draw import uniform
from engine_actor.model.sampler import Sampler
from kernels.sampling.op import BIAS, ROW, Draw, Edit, RowPacker, draw_reference


@given(
    width=st.sampled_from([2, 9, 500, 3000]),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
    top_k=st.sampled_from([0, 1, 4, 2000]),
    top_p=st.sampled_from([1.0, 0.999, 0.6, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.9]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 10**6),
)
def test_a_draw_is_the_samplers(
    width: int, spread: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> None:
    """Any truncation, ties included."""
    logits = torch.randn(1, width, generator=torch.Generator().manual_seed(seed % 97)) * spread
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    want = Sampler().sample(logits, [SampleRow(("c", 0), params, [], [], position)])[0].token
    draw = Draw(top_p, min_p, top_k, seed, position)
    got = draw_reference(torch.softmax(logits, -1)[0], draw, uniform(seed, position))
    assert got == want


def test_a_row_that_comes_again() -> None:
    """As if it were added anew."""
    draw = Draw(0.5, 0.25, 7, 11, 12)
    first, again, anew = RowPacker(4), RowPacker(4), RowPacker(4)
    first.add(3, draw, Edit(0.5))
    again.add_again(first.last(), 1, 13)
    anew.add(1, replace(draw, position=13), Edit(0.5))
    assert again.packed() == anew.packed() == again.last()


def test_the_bytes_a_kernel_reads() -> None:
    """Rows, then biases, then ids, field by field; tables of counts are shared within a part."""
    packer = RowPacker(2)
    packer.add(4, Draw(), Edit(1.0, bias={5: 0.5}, banned=[9]))
    packer.add(0, Draw(0.5, 0.25, 10**12, -1, 12, True), Edit(history=([7, 8], [9])))
    packer.add(2, Draw(), Edit(0.5, 1.5, -1.0, 0.25, {7: 2.0, 6: 1.0}, history=([], [3])))
    packer.add(3, Draw(), Edit(history=([1], [])))
    packed = packer.packed()
    assert (ROW.size, packer.biases_at, packer.ids_at) == (88, 352, 352 + 4 * BIAS.size)
    assert packer.most_counted == 2
    rows = [ROW.unpack_from(packed, at) for at in range(0, 352, 88)]
    off = (0.0, 1.0, 0.0, 0.0)
    assert rows[0] == (1.0, 0, 0, 0.0, 0, 0, 4, 1.0, 1.0, 0.0, 0.0, -1, 0, 1, 1, 0, 0, 0, 0)
    assert rows[1] == (
        *(0.5, 2**64 - 1, 12, 0.25, 2**31 - 1, 1, 0, *off),
        *(0, 2, 0, 0, 0, 2, 1, 0),
    )
    assert rows[2][6:] == (2, 0.5, 1.5, -1.0, 0.25, 0, 2, 2, 0, 3, 0, 1, 0)
    assert rows[3][6:] == (3, *off, 1, 4, 0, 0, 4, 1, 0, 0)
    biases = [BIAS.unpack_from(packed, 352 + 8 * i) for i in range(4)]
    assert biases == [(5, 0.5), (9, 0.0), (7, 2.0), (6, 1.0)]
    assert struct.unpack_from("<5i", packed, packer.ids_at) == (7, 8, 9, 3, 1)
