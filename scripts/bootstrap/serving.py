"""scripts/serve: from a checkout to a running server, and back to nothing left.

Makes .venv, lets it check the configuration and prepare the model, then stays the parent of
`serve run` (serve_app/launch/server.py). Standard library only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bootstrap.environment import ROOT, ensure_venv
from configs.load import environment
from serve_app.launch.server import Server, refuse_taken_port


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """The flags as the environment variables that configs.load reads."""
    chosen = {
        "DEEPINFER_MODEL__PATH": options.model,
        "DEEPINFER_ENGINE__DEVICE": options.device,
    }
    settings = {name: json.dumps(value) for name, value in chosen.items() if value is not None}
    if options.no_prefill_decode_overlap:
        settings["DEEPINFER_ENGINE__ENABLE_PREFILL_DECODE_OVERLAP"] = "false"
    return settings


def main(arguments: Sequence[str] | None = None, python: str | None = None) -> int:
    """Command line of scripts/serve. python: an interpreter that has the project already; None:
    .venv's, made where it is missing.
    """
    parser = argparse.ArgumentParser(prog="scripts/serve", description="Install, then serve.")
    parser.add_argument("--config", type=Path, default=ROOT / "serve_config.yaml")
    parser.add_argument("--port", type=int, help="HTTP port (default: the file's)")
    parser.add_argument("--model", help="demo, a checkpoint folder, or a Hub id")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--no-prefill-decode-overlap", action="store_true")
    options = parser.parse_args(arguments)
    settings = settings_of(options)
    python = python or ensure_venv(extras=())
    command = [python, "-m", "serve_app.preflight", str(options.config.resolve())]
    if options.port is not None:
        command += ["--port", str(options.port)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(settings), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        return done.returncode
    plan = json.loads(done.stdout)
    refuse_taken_port(plan["port"])
    return Server(python, plan, settings, ROOT).run()
