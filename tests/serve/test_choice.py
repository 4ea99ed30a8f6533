"""One choice, on any split of its tokens: the same text, logprobs, counts and end. B-01, B-02."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_actor.core.params import SamplingParams
from engine_actor.core.plan import TokenLogprobs
from engine_actor.messages import Flag, Usage
from serve_app.choice import Choice
from serve_app.demux import Part
from serve_app.protocol.job import Child, EncodedPrompt, GenerationJob
from tests.serve.doubles import PieceTokenizer

TOKENIZER = PieceTokenizer("ab", "b", "aa", "é", "你好", " ")
PIECES = [*TOKENIZER.encode("ab é你好"), 0xF0, 0x9F, 0x99, 0x82, ord("a"), ord("b"), ord("c")]


def parts(tokens: list[int], cuts: list[int], flag: Flag, scored: bool) -> list[Part]:
    """The tokens cut into parts; the last carries the end."""
    bounds = [0, *sorted({cut % (len(tokens) + 1) for cut in cuts}), len(tokens)]
    made = []
    for start, end in itertools.pairwise(bounds):
        share = tokens[start:end]
        logprobs = [TokenLogprobs(token, -1.0) for token in share] if scored else []
        made.append(Part(tokens=share, logprobs=logprobs))
    made[-1].flag = flag
    made[-1].usage = Usage(1, len(tokens), 0)
    made[-1].stop_token = tokens[-1] if flag is Flag.STOP else None
    return made


def run(job: GenerationJob, pieces: list[Part]) -> dict[str, Any]:
    """What a client has in the end."""
    choice = Choice(job, next(job.children()), TOKENIZER)
    text, entries, reasons, shown = "", [], [], 0
    for part in pieces:
        delta = choice.add(part)
        if delta is not None:
            text += delta.text
            entries += delta.entries
            shown = len(text)
            if delta.finish_reason is not None:
                reasons.append(delta.finish_reason)
    assert shown == len(text)
    assert len(reasons) == 1
    return {"text": text, "entries": entries, "reason": reasons[0], "n": choice.n_tokens}


@given(
    tokens=st.lists(st.sampled_from(PIECES), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    stops=st.lists(st.sampled_from(["ab", "b a", "aab", "é", "好", "cc"]), max_size=3),
    logprobs=st.sampled_from([None, 0]),
    ends=st.sampled_from([Flag.STOP, Flag.LENGTH]),
    include=st.booleans(),
)
def test_any_split_gives_the_same_answer(
    tokens: list[int],
    cuts: list[int],
    stops: list[str],
    logprobs: int | None,
    ends: Flag,
    include: bool,
) -> None:
    """Joined stream text == whole text, for every way in which batches may be merged."""
    tokens = [*tokens, TOKENIZER.eos] if ends is Flag.STOP else tokens
    job = GenerationJob(
        model="m",
        prompts=(EncodedPrompt((ord("x"),), "x"),),
        sampling=SamplingParams(max_tokens=99, logprobs=logprobs),
        stops=tuple(dict.fromkeys(stops)),
        include_stop=include,
        logprobs=logprobs,
    )
    scored = logprobs is not None
    whole = run(job, parts(tokens, [], ends, scored))
    assert run(job, parts(tokens, cuts, ends, scored)) == whole
    assert run(job, parts(tokens, list(range(20)), ends, scored)) == whole
    full = TOKENIZER.decode([t for t in tokens if t != TOKENIZER.eos])
    found = [full.find(stop) for stop in stops if stop in full]
    if not found:
        assert whole["text"].rstrip("\ufffd") == full.rstrip("\ufffd")
        assert whole["n"] == len(tokens)
        assert whole["reason"] == ("stop" if ends is Flag.STOP else "length")
    else:
        assert whole["reason"] == "stop"
        assert full.startswith(whole["text"])
        assert include or not any(stop in whole["text"] for stop in stops)
    offsets = [entry.offset for entry in whole["entries"]]
    assert offsets == sorted(offsets)
    assert all(offset <= len(whole["text"]) for offset in offsets)


def test_the_end_is_said_once_and_nothing_after_it() -> None:
    job = GenerationJob("m", (EncodedPrompt((1,), "x"),), SamplingParams(), stops=("b",))
    choice = Choice(job, Child(0, 0, job.sampling), TOKENIZER)
    delta = choice.add(Part(tokens=TOKENIZER.encode("acbac")))
    assert delta is not None
    assert (delta.text, delta.finish_reason, choice.n_tokens) == ("ac", "stop", 3)
    assert choice.add(Part(tokens=[99], flag=Flag.CANCELLED, usage=Usage(1, 9, 4))) is None
    assert (choice.n_tokens, choice.cached_tokens) == (3, 4)
