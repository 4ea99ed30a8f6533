"""Live limits as a Python caller or Serve's `user_config` gives them."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actor.messages import Limit
from serve_app.limits import limit_of


def test_limits_are_taken_as_given() -> None:
    assert limit_of({}) == Limit()
    assert limit_of({"kv_fraction": 0.5, "max_num_seqs": 3}) == Limit(0.5, 3)
    assert limit_of({"kv_fraction": 1, "prefill_chunk_tokens": None}) == Limit(1)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kv_fracton": 0.5}, "kv_fracton"),
        ({"kv_fraction": 0}, "kv_fraction"),
        ({"kv_fraction": -1}, "kv_fraction"),
        ({"kv_fraction": 1.5}, "kv_fraction"),
        ({"kv_fraction": float("nan")}, "kv_fraction"),
        ({"kv_fraction": "half"}, "kv_fraction"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 2.5}, "max_num_seqs"),
        ({"max_num_seqs": 10**30}, "max_num_seqs"),
        ({"prefill_chunk_tokens": True}, "prefill_chunk_tokens"),
    ],
)
def test_what_is_no_limit_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    """The engine drops a malformed message and serves on: nobody would hear of it."""
    with pytest.raises(ValueError, match=named):
        limit_of(given)
