"""The wire: every message survives a round trip, everything malformed is refused by name."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import TokenLogprobs
from engine_actor.messages import (
    Beat,
    Cancel,
    Evict,
    Extra,
    Flag,
    Limit,
    Load,
    Message,
    StepBatch,
    Submit,
    Usage,
    decode_batch,
    decode_messages,
    encode_batch,
    encode_messages,
)

U32 = st.integers(0, 2**32 - 1)
NAME = st.text(max_size=12)
SMALL = st.integers(0, 1000)
NUMBER = st.floats(-100, 100)

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(8, 4096),
    min_tokens=st.integers(0, 8),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=SMALL,
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 10),
    logit_bias=st.lists(st.tuples(SMALL, NUMBER), max_size=4).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=st.lists(SMALL, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
)
MESSAGE = st.one_of(
    st.builds(
        Submit,
        rid=U32,
        prompt_ids=st.lists(U32, max_size=20).map(tuple),
        sampling=SAMPLING,
        priority=st.integers(-100, 100),
        deadline_ms=st.none() | st.integers(0, 10**9),
        salt=NAME,
        trace_id=NAME,
    ),
    st.builds(
        Cancel,
        rid=U32,
        reason=st.sampled_from(["client", "stop_string", "deadline", "admin", "lease"]),
        owner=NAME,
    ),
    st.builds(Evict, rid=U32, reason=NAME, requeue=st.booleans(), owner=NAME),
    st.builds(
        Limit,
        kv_fraction=st.none() | st.floats(0.01, 1),
        max_num_seqs=st.none() | st.integers(1, 1000),
        prefill_chunk_tokens=st.none() | st.integers(1, 1000),
    ),
    st.just(Beat()),
)
LOGPROBS = st.lists(
    st.builds(
        TokenLogprobs,
        token=SMALL,
        logprob=NUMBER,
        top=st.lists(st.tuples(SMALL, NUMBER), max_size=3).map(tuple),
    ),
    max_size=3,
).map(tuple)
EXTRA = st.builds(
    Extra,
    usage=st.none() | st.builds(Usage, SMALL, SMALL, SMALL),
    stop_token=st.none() | SMALL,
    error_code=st.none() | NAME,
    blocks_needed=SMALL,
    blocks_free=SMALL,
    logprobs=LOGPROBS,
    prompt_start=SMALL,
    prompt_logprobs=LOGPROBS,
)


@st.composite
def batches(draw: st.DrawFn) -> StepBatch:
    rids = draw(st.lists(U32, max_size=8))
    counts = draw(st.lists(st.integers(0, 5), min_size=len(rids), max_size=len(rids)))
    tokens = draw(st.lists(U32, min_size=sum(counts), max_size=sum(counts)))
    flags = draw(st.lists(st.sampled_from(Flag), min_size=len(rids), max_size=len(rids)))
    return StepBatch(
        seq=draw(SMALL),
        time_ns=draw(st.integers(0, 2**62)),
        rids=tuple(rids),
        counts=tuple(counts),
        tokens=tuple(tokens),
        flags=tuple(flags),
        extra=draw(st.lists(st.tuples(U32, EXTRA), max_size=3).map(tuple)),
        load=draw(st.builds(Load, SMALL, SMALL, SMALL, SMALL, SMALL)),
        kv_added=draw(st.lists(st.binary(max_size=32), max_size=2).map(tuple)),
        kv_evicted=draw(st.lists(st.binary(max_size=32), max_size=2).map(tuple)),
    )


@given(st.lists(MESSAGE, max_size=5))
def test_messages_round_trip(messages: list[Message]) -> None:
    wire = pickle.loads(pickle.dumps(encode_messages(messages)))
    assert decode_messages(wire) == messages


@given(batches())
def test_batches_round_trip(batch: StepBatch) -> None:
    assert decode_batch(pickle.loads(pickle.dumps(encode_batch(batch)))) == batch


def test_the_wire_is_packed_bytes_of_the_named_widths() -> None:
    batch = StepBatch(3, 4, (1, 2), (2, 1), (7, 8, 9), (Flag.RUNNING, Flag.OOM))
    wire = encode_batch(batch)
    assert wire[2] == bytes([1, 0, 0, 0, 2, 0, 0, 0])
    assert wire[3] == bytes([2, 0, 1, 0])
    assert wire[4] == bytes([7, 0, 0, 0, 8, 0, 0, 0, 9, 0, 0, 0])
    assert wire[5] == bytes([0, 5])
    submit = encode_messages([Submit(5, (1, 256), SamplingParams())])[0]
    assert submit[:3] == ("submit", 5, bytes([1, 0, 0, 0, 0, 1, 0, 0]))


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists, max_leaves=8))
def test_anything_else_is_a_value_error(junk: object) -> None:
    """Nothing that a client sends can raise more than a ValueError."""
    for item in (junk, ("submit", junk), ("cancel", 1, junk, ""), ("limit", junk)):
        with pytest.raises(ValueError):  # noqa: PT011 - the text differs with the junk
            decode_messages([item])
    with pytest.raises(ValueError):  # noqa: PT011
        decode_batch(junk)


def _submit(**changes: object) -> tuple[object, ...]:
    fields = dict(
        zip(
            ("tag", "rid", "ids", "sampling", "priority", "deadline", "salt", "trace"),
            encode_messages([Submit(1, (2, 3), SamplingParams())])[0],
            strict=True,
        )
    )
    return tuple((fields | changes).values())


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (("frobnicate", 1), "message: unknown tag 'frobnicate'"),
        ((), "message: expected a tuple with its tag first"),
        (("beat", 1), "beat: expected 1 fields, got 2"),
        (("cancel", -1, "client", ""), r"cancel.rid: -1 is not in 0..2\^32-1"),
        (("cancel", True, "client", ""), "cancel.rid: expected int, got bool"),
        (("cancel", 1, "boredom", ""), "cancel.reason: 'boredom' is not one of"),
        (("evict", 1, "admin", 1, ""), "evict.requeue: expected bool, got int"),
        (("limit", {"kv_fraction": 0.0}), r"limit.kv_fraction: must be in \(0, 1\]"),
        (("limit", {"max_num_seqs": 0}), "limit.max_num_seqs: must be at least 1"),
        (("limit", {"speed": 1}), "limit: unknown key 'speed'"),
        (_submit(rid=2**32), r"submit.rid: 4294967296 is not in 0..2\^32-1"),
        (_submit(ids=b"\0\0\0"), "submit.prompt_ids: 3 bytes are no whole number of u32"),
        (_submit(ids=[1, 2]), "submit.prompt_ids: expected bytes, got list"),
        (_submit(sampling=(1,)), "submit.sampling: expected 15 fields, got 1"),
        (_submit(deadline=-1), "submit.deadline_ms: -1 is not in"),
    ],
)
def test_malformed_messages_name_the_field(item: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_messages([item])


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_of_any_length_are_refused(digits: int, sign: int) -> None:
    """They are ints, but fit no float and no tensor: refused here, not somewhere on the engine's
    thread, where the rest of the post would be lost.
    """
    huge = sign * 10**digits
    for name in ("rid", "priority", "deadline"):
        with pytest.raises(ValueError):  # noqa: PT011 - one text for each field
            decode_messages([_submit(**{name: huge})])
    sampling = list(_submit()[3])  # type: ignore[call-overload]
    for place in range(len(sampling)):
        for value in (huge, (huge,), ((1, huge),), ((huge, 1),)):
            changed = (*sampling[:place], value, *sampling[place + 1 :])
            with pytest.raises(ValueError):  # noqa: PT011
                decode_messages([_submit(sampling=changed)])
    with pytest.raises(ValueError):  # noqa: PT011
        decode_messages([("limit", {"kv_fraction": huge})])


def test_bad_sampling_is_refused_by_parameter_name() -> None:
    """B-23: a temperature of -1 never gets past the door."""
    wire = list(_submit())
    sampling = list(wire[3])  # type: ignore[call-overload]
    sampling[2] = -1.0
    wire[3] = tuple(sampling)
    with pytest.raises(ValueError, match="temperature: must be in"):
        decode_messages([tuple(wire)])


def test_values_that_do_not_fit_are_refused_when_encoded() -> None:
    with pytest.raises(ValueError, match="counts: not all values are u16"):
        encode_batch(StepBatch(0, 0, (1,), (65536,), (0,) * 65536, (Flag.RUNNING,)))
    with pytest.raises(ValueError, match="prompt_ids: not all values are u32"):
        encode_messages([Submit(1, (-1,), SamplingParams())])


def test_batches_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        encode_batch(StepBatch(0, 0, (1,), (), (), ()))
    wire = list(encode_batch(StepBatch(0, 0, (1,), (1,), (5,), (Flag.STOP,))))
    with pytest.raises(ValueError, match="counts add up to 1, tokens 2"):
        decode_batch((*wire[:4], b"\0" * 8, *wire[5:]))
    with pytest.raises(ValueError, match="unknown flag 7"):
        decode_batch((*wire[:5], b"\7", *wire[6:]))
