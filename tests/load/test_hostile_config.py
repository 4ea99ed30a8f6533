"""config.json with values of any kind in any key: it opens or is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_actor.errors import CheckpointError
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import tiny_config, write_tiny
from tests.load.oracle import edit_json

VALUES: list[Any] = [
    *[True, -1, 0, 1.5, float("inf"), float("nan"), 10**30, "x", "\n", [], [[]], [{}], [None]],
    *[{}, {"a\n": 1}, {"rope_type": []}, {"rope_type": "x\ny"}, {"rope_theta": "x"}],
]
KEYS = sorted(
    {*tiny_config(), "rope_scaling", "rope_parameters", "layer_types", "sliding_window"}
    | {"attention_bias", "torch_dtype", "mlp_bias", "quantization_config", "new\nkey"}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("config") / "tiny")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_any_value_opens_or_is_refused(folder: Path, file: str, key: str) -> None:
    path = folder / file
    before = path.read_text()
    try:
        for value in VALUES:
            edit_json(path, **{key: value})
            _opens_or_refuses(folder)
            path.write_text(before)
    finally:
        path.write_text(before)


def _opens_or_refuses(folder: Path) -> None:
    message = ""
    try:
        open_checkpoint(folder)
    except CheckpointError as error:
        message = str(error)
    assert message.isprintable()
    assert len(message) <= 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "magic"}}, "rope_scaling.rope_type 'magic' is not"),
        ({"residual_multiplier": 2.0}, "residual_multiplier = 2.0 is not known to this engine"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures ['GPT2LMHeadModel'] is not"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"new\nkey": 1}, "new\\nkey = 1 is not known to this engine"),
    ],
)
def test_a_key_we_cannot_honour_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write_tiny(tmp_path / "tiny")
    edit_json(folder / "config.json", **change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert str(caught.value).startswith(f"config.json: {message}")
