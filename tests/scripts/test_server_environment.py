"""What `serve run` is started with: settings, ports beside the server's own, HAProxy."""

from __future__ import annotations

from pathlib import Path

from bootstrap.serving import settings_of
from serve_app.launch.server import Server, server_environment, side_port


def test_flags_become_settings():
    import argparse

    options = argparse.Namespace(model="/a b", device="cpu", no_prefill_decode_overlap=True)
    assert settings_of(options) == {
        "DEEPINFER_MODEL__PATH": '"/a b"',
        "DEEPINFER_ENGINE__DEVICE": '"cpu"',
        "DEEPINFER_ENGINE__ENABLE_PREFILL_DECODE_OVERLAP": "false",
    }


def test_two_servers_do_not_share_haproxys_side_ports():
    assert side_port(9101, 61000) != side_port(9101, 61001)
    assert side_port(8404, 20000) == 20404
    assert 0 < side_port(9101, 65500) <= 65535


def test_a_side_port_in_use_is_left_alone():
    import socket

    with socket.create_server(("0.0.0.0", 0)) as held:
        port = held.getsockname()[1]
        assert side_port(port, 8000) != port


def test_haproxy_is_started_as_the_plan_says(monkeypatch):
    plan = {"host": "127.0.0.1", "port": 8123, "haproxy": "/cache/haproxy-8123"}
    name = "RAY_SERVE_HAPROXY_BINARY_PATH"
    assert Server("/venv/bin/python", plan, {})._variables[name] == "/cache/haproxy-8123"
    assert name not in Server("/venv/bin/python", {**plan, "haproxy": None}, {})._variables
    monkeypatch.setenv(name, "/opt/haproxy")
    assert Server("/venv/bin/python", plan, {})._variables[name] == "/opt/haproxy"


def test_what_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", "7777")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    variables = server_environment(Path("/venv/bin/python"), {"RAY_X": "1"}, None, 8123)
    assert variables["RAY_SERVE_HAPROXY_STATS_PORT"] == "7777"
    assert variables["RAY_AUTH_MODE"] == "disabled"
    assert variables["RAY_X"] == "1"
    assert variables["PATH"].startswith("/venv/bin:")
