"""The slow definition of a draw against the engine's sampler, on a CPU: equal tokens."""

from __future__ import annotations

import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.core.params import SamplingParams
from engine_actor.model.penalties import SampleRow
from engine_actor.model.random_draw import uniform
from engine_actor.model.sampler import Sampler
from kernels.sampling.op import Draw, Edit, draw_reference, pack_draws, pack_edits


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


def test_the_bytes_a_kernel_reads() -> None:
    """Two rows of each, field by field."""
    draws = pack_draws([Draw(), Draw(0.5, 0.25, 7, -1, 12, True)]).numpy().tobytes()
    assert len(draws) == 80
    assert struct.unpack_from("<dQqfiii", draws, 40) == (0.5, 2**64 - 1, 12, 0.25, 7, 1, 1)
    chosen = pack_draws([Draw(top_k=10**12)], [9]).numpy().tobytes()
    assert struct.unpack("<dQqfiii", chosen)[4:] == (2**31 - 1, 0, 9)
    edits, ids, values = pack_edits(
        [Edit(1.0, bias={5: 0.5}, banned=[9]), Edit(0.5, 1.5, -1.0, 0.25, 3, {7: 2.0, 6: 1.0})]
    )
    packed = edits.numpy().tobytes()
    assert len(packed) == 72
    assert struct.unpack_from("<ffffiiiii", packed) == (1.0, 1.0, 0.0, 0.0, -1, 0, 1, 1, 0)
    assert struct.unpack_from("<ffffiiiii", packed, 36) == (0.5, 1.5, -1.0, 0.25, 3, 2, 2, 0, 1)
    assert ids.tolist() == [5, 9, 7, 6]
    assert values.tolist() == [0.5, 0.0, 2.0, 1.0]
