"""Each of the four waits between the streams proved to be needed: late inputs and late last writes
change no token, and without any one wait they do.

decisions.md section 3; rows S-52 to S-54 of the seed, bug case B-35.
"""

from __future__ import annotations

import pytest

from tests.engine.real_engine import Loaded, texts
from tests.engine_gpu.late_streams import N_TOKENS, PROMPTS, engine_of, played, shows

pytestmark = pytest.mark.gpu

RUNS = 20
WAITS = (
    ("decode", "default"),
    ("prefill", "default"),
    ("default", "prefill"),
    ("default", "decode"),
)


@pytest.fixture(scope="module", params=["on_gpu", "on_kernels", "on_graphs"])
def model(request: pytest.FixtureRequest) -> Loaded:
    """The general ops; the kernels of a layer, launched; the same, replayed from graphs."""
    loaded: Loaded = request.getfixturevalue(request.param)
    return loaded


@pytest.fixture(scope="module")
def right(model: Loaded) -> list[list[int]]:
    """The texts without a second stream."""
    found = texts(engine_of(model, enable_prefill_decode_overlap=False), PROMPTS, N_TOKENS)
    assert texts(engine_of(model, async_steps=False), PROMPTS, N_TOKENS) == found
    return found


@pytest.mark.parametrize("run", range(RUNS))
def test_late_streams_give_the_serial_tokens(
    model: Loaded, right: list[list[int]], run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, log = played(model, None, monkeypatch)
    assert found == right
    joined = ["default waits for prefill", "default waits for decode"]
    for index, entry in enumerate(log):
        if entry == "decode waits for default":
            after = log[index : index + 4]
            assert after == [entry, "prefill waits for default", *joined]
            assert log[index + 4 : index + 5] in ([], ["sample on default"])
    assert {entry for entry in log if entry.startswith("sample")} == {"sample on default"}


@pytest.mark.parametrize("run", range(RUNS))
@pytest.mark.parametrize("without", WAITS, ids=lambda pair: "-".join(pair))
def test_without_any_one_wait_the_tokens_are_wrong(
    model: Loaded,
    right: list[list[int]],
    without: tuple[str, str],
    run: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fences proved: what the test above shows would not hold without it."""
    assert shows(lambda: played(model, without, monkeypatch)[0] != right, monkeypatch)
