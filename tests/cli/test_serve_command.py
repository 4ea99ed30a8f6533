"""`deepinfer-sm86 serve`: the Serve configuration it makes. Its parent is tests/scripts's."""

from __future__ import annotations

import socket

import pytest
import yaml

from configs.schema import AppArgs
from serve_app.serve_command import serve, serve_document


def test_the_document_is_serve_config_with_these_settings(project_root):
    committed = yaml.safe_load((project_root / "serve_config.yaml").read_text(encoding="utf-8"))
    args = AppArgs.model_validate(committed["applications"][0]["args"])
    made = serve_document(args, "0.0.0.0", 8000)
    assert AppArgs.model_validate(made["applications"][0].pop("args")) == args
    committed["applications"][0].pop("args")
    assert made == committed


@pytest.mark.parametrize("port", [8000, 9000])
def test_host_and_port_are_those_asked_for(port):
    made = serve_document(AppArgs(), "127.0.0.1", port)
    assert made["http_options"]["host"] == "127.0.0.1"
    assert made["http_options"]["port"] == port


def test_a_port_in_use_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    with socket.create_server(("0.0.0.0", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(SystemExit, match=f"error: port {port} is held by process"):
            serve(AppArgs(), "127.0.0.1", port)
    assert list(tmp_path.iterdir()) == []
