"""config.json with values of any kind in any key: it opens or is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import AppArgs
from engine_actor.build import build_engine
from engine_actor.errors import CheckpointError
from engine_actor.load.chat_template import ChatTemplateError
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.tiny import tiny_config, write_tiny
from engine_actor.load.tokenizer import Tokenizer
from tests.load.oracle import edit_json

VALUES: list[Any] = [
    *[True, -1, 0, 1.5, float("inf"), float("nan"), 10**30, 10**400, "x", "\n"],
    *[[], [[]], [{}], [None]],
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


@pytest.mark.parametrize(
    ("file", "read"),
    [("config.json", open_checkpoint), ("tokenizer_config.json", Tokenizer.from_folder)],
)
def test_half_a_character_is_no_text(tmp_path: Path, file: str, read: Callable[..., Any]) -> None:
    """JSON can write one; nothing that takes text can."""
    folder = write_tiny(tmp_path)
    before = (folder / file).read_text()
    edit_json(folder / file, eos_token="\ud800")
    with pytest.raises(CheckpointError, match=f"{file}: holds a lone surrogate"):
        read(folder)
    (folder / file).write_text(before)
    read(folder)


def test_a_whole_character_of_two_halves_is_text(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    edit_json(folder / "tokenizer_config.json", pad_token="\U0001f600")
    assert "\\ud83d" in (folder / "tokenizer_config.json").read_text()
    assert Tokenizer.from_folder(folder).special_tokens["pad_token"] == "\U0001f600"


def test_a_template_that_writes_half_a_character_is_refused_as_a_template(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ '\\ud800' }}")
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(ChatTemplateError):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_a_model_without_finite_logits_is_refused_before_it_serves(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    edit_json(folder / "config.json", rope_theta=1e-300)
    engine = {"device": "cpu", "cpu_threads": 1, "kv": {"budget_mb": 4}, "native_kernels": "off"}
    args = AppArgs.model_validate({"model": {"path": str(folder)}, "engine": engine})
    with pytest.raises(CheckpointError, match=r"^the model gives no finite logits"):
        build_engine(args, folder)
