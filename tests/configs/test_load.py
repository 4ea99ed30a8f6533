"""configs.load: precedence, overrides by environment, errors of one line that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import (
    ConfigError,
    app_args,
    application,
    cache_dir,
    environment_overrides,
    merged,
    read_serve_config,
)
from configs.schema import AppArgs


def test_the_environment_wins_over_the_file_and_the_file_over_the_default():
    values = {"engine": {"max_num_seqs": 4, "kv": {"block_tokens": 8}}}
    args = app_args(values, {"DEEPINFER_ENGINE__MAX_NUM_SEQS": "7"})
    assert args.engine.max_num_seqs == 7
    assert args.engine.kv.block_tokens == 8
    assert args.engine.max_queue == AppArgs().engine.max_queue


def test_overrides_reach_any_depth_and_keep_their_type():
    variables = {
        "DEEPINFER_ENGINE__KV__BUDGET_MB": "512",
        "DEEPINFER_ENGINE__KV__PREFIX_CACHE": "false",
        "DEEPINFER_MODEL__PATH": "/models/x",
        "DEEPINFER_MODEL__REVISION": '"123"',
        "DEEPINFER_CACHE_DIR": "/cache",
        "PATH": "/bin",
    }
    assert environment_overrides(variables) == {
        "engine": {"kv": {"budget_mb": 512, "prefix_cache": False}},
        "model": {"path": "/models/x", "revision": "123"},
    }


def test_an_unknown_override_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"^engine\.max_sequences: .*$"):
        app_args({}, {"DEEPINFER_ENGINE__MAX_SEQUENCES": "4"})


@pytest.mark.parametrize("name", ["MAX_NUM_SEQS", "ENGINE", "ENGIN__MAX_NUM_SEQS", "CACHE_DIR__X"])
def test_a_variable_of_ours_that_names_no_setting_is_refused(name):
    """Overlooked in silence it would look as if it had been set."""
    with pytest.raises(ConfigError, match=rf"^DEEPINFER_{name}: is no setting; .*ENGINE__MAX"):
        environment_overrides({f"DEEPINFER_{name}": "3"})


def test_an_error_is_one_line_that_names_key_and_value():
    with pytest.raises(ConfigError) as caught:
        app_args({"engine": {"max_num_seqs": 0, "kv": {"block_tokens": "many"}}}, {})
    message = str(caught.value)
    assert "\n" not in message
    assert "engine.max_num_seqs" in message
    assert "(got 0)" in message
    assert "engine.kv.block_tokens" in message


def test_app_args_of_app_args_is_the_same():
    args = AppArgs.model_validate({"engine": {"max_num_seqs": 3}})
    assert app_args(args, {}) == args


def test_merged_changes_neither_side():
    base, over = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}
    assert merged(base, over) == {"a": {"b": 3, "c": 2}}
    assert (base, over) == ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})


def test_the_cache_folder_can_be_moved():
    assert cache_dir({"DEEPINFER_CACHE_DIR": "/elsewhere"}) == Path("/elsewhere")
    assert cache_dir({}) == Path.home() / ".cache" / "deepinfer-sm86"


def test_a_cache_that_can_be_no_folder_is_refused(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        cache_dir({"DEEPINFER_CACHE_DIR": str(taken)})
    with pytest.raises(ConfigError, match=r"^DEEPINFER_CACHE_DIR: File name too long") as caught:
        cache_dir({"DEEPINFER_CACHE_DIR": "x" * 300})
    assert len(str(caught.value)) < 300


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def no_home(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="no home folder here; set DEEPINFER_CACHE_DIR"):
        cache_dir({})
    assert cache_dir({"DEEPINFER_CACHE_DIR": "/elsewhere"}) == Path("/elsewhere")


def test_the_shipped_serve_config_is_valid_for_serve_and_for_us(project_root):
    document = read_serve_config(project_root / "serve_config.yaml")
    ours = application(document)
    assert ours["import_path"] == "serve_app.app:build"
    args = app_args(ours["args"], {})
    assert args.model.path == "demo"
    assert (
        args == AppArgs()
    )  # the file only repeats defaults, so that it can be edited line by line


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "serve.yaml"),
        ("just text", "no `applications`"),
        ("applications: []", "no `applications`"),
    ],
)
def test_what_is_no_serve_configuration_is_one_line(tmp_path, text, why):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        read_serve_config(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        read_serve_config(tmp_path / "absent.yaml")


def test_another_application_is_not_ours():
    with pytest.raises(ConfigError, match="default"):
        application({"applications": [{"name": "other"}]})


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[" * 5000, "is nested too deeply"),
        (b"a: 2020-13-45", "month must be in 1..12"),
        (b"applications: x", "no application is named 'default'"),
        (b"applications: [5, {name: other}]", "no application is named 'default'"),
        (b"- a", "not a Serve configuration"),
    ],
)
def test_whatever_a_file_holds_is_refused_in_one_line(tmp_path, raw, why):
    path = tmp_path / "serve.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=why) as caught:
        application(read_serve_config(path))
    assert "\n" not in str(caught.value)


def test_arguments_that_are_no_settings():
    for values in (5, ["a"], "model"):
        with pytest.raises(ConfigError, match=r"^args: must hold settings by name"):
            app_args(values, {})


def test_a_name_that_sets_a_part_of_a_plain_value_is_refused():
    variables = {"DEEPINFER_ENGINE__KV": "5", "DEEPINFER_ENGINE__KV__BUDGET_MB": "3"}
    with pytest.raises(ConfigError, match=r"^DEEPINFER_ENGINE__KV__BUDGET_MB: kv is set to 5"):
        environment_overrides(variables)
    variables["DEEPINFER_ENGINE__KV"] = '{"block_tokens": 8}'
    assert environment_overrides(variables) == {
        "engine": {"kv": {"block_tokens": 8, "budget_mb": 3}}
    }


def test_a_value_that_json_cannot_hold_is_text():
    assert environment_overrides({"DEEPINFER_MODEL__PATH": "[" * 5000}) == {
        "model": {"path": "[" * 5000}
    }


def test_a_value_in_a_message_is_short():
    wide: object = ["x"] * 9
    for _ in range(40):
        wide = [wide] * 9
    with pytest.raises(ConfigError) as caught:
        app_args({"engine": {"max_num_seqs": wide}}, {})
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"path": ""}},
        {"engine": {"cpu_threads": 10**12}},
        {"engine": {"kv": {"budget_mb": -5}}},
        {"engine": {"faults": [{"stage": "launch", "times": 0}]}},
        {"engine": {"lease_s": float("inf")}},
        {"engine": {"watchdog_s": float("nan")}},
        {"engine": {"drain_s": 1e300}},
        {"http": {"keep_alive_s": float("inf")}},
    ],
)
def test_values_that_nothing_could_be_made_of(values):
    with pytest.raises(ConfigError):
        app_args(values, {})
