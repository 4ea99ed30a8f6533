"""`deepinfer-sm86 serve`: what scripts/serve does, for an installed package without a checkout.

Writes a Serve configuration around the settings, checks it, stays the parent of `serve run`. Loads
no Ray itself.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from configs.load import APP_NAME
from configs.schema import AppArgs
from serve_app.launch.server import Server, refuse_taken_port

TEMPLATE = "serve_template.yaml"


def serve(args: AppArgs, host: str, port: int) -> int:
    """Serve until told to stop; returns the exit code. Raises CheckpointError, ConfigError; exits
    with one line where the port is in use.
    """
    from engine_actor.load.progress import ConsoleProgress
    from serve_app.preflight import prepare_start, write_config

    refuse_taken_port(port)
    path = write_config(f"command-{port}.yaml", serve_document(args, host, port))
    start = prepare_start(path, port, ConsoleProgress("model"))
    return Server(sys.executable, asdict(start), {}).run()


def serve_document(args: AppArgs, host: str, port: int) -> dict[str, Any]:
    """A whole Serve configuration with these settings."""
    import yaml

    document = yaml.safe_load((files("configs") / TEMPLATE).read_text("utf-8"))
    document["http_options"] |= {"host": host, "port": port}
    for application in document["applications"]:
        if application["name"] == APP_NAME:
            application["args"] = args.model_dump(mode="json")
    return dict(document)
