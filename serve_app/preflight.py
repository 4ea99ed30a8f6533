"""All that can be refused before anything starts: configuration, checkpoint, device. No Ray here.

Used by the Serve builder and by scripts/serve: `python -m serve_app.preflight serve_config.yaml`
prepares the model with a progress bar and prints one JSON object, or one line of error.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs import load
from configs.load import ConfigError
from configs.schema import AppArgs
from engine_actor.errors import CheckpointError
from engine_actor.load.progress import ConsoleProgress, Progress, silent
from serve_app.haproxy import has_haproxy, write_launcher
from serve_app.limits import limit_of

HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
HA_PROXY_HOSTS = ("0.0.0.0", "127.0.0.1", "localhost")
"""HAProxy asks a replica of its own machine at 127.0.0.1, but the replica listens on the server's
host: with any other, every answer would be a 500."""
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint whose headers are whole, and the arguments it was found by."""

    args: AppArgs
    folder: Path
    weights: str


@dataclass(frozen=True, slots=True)
class Start:
    """What scripts/serve needs to know. `config` is the file to run: the given one, or a copy with
    the port or the HTTP mode changed. `host`: where this machine reaches the server, as a URL has
    it. `haproxy`: what starts HAProxy, None where Serve is to find it.
    """

    config: str
    host: str
    port: int
    drain_s: float
    model: str
    weights: str
    haproxy: str | None = None


def verify(args: AppArgs, progress: Progress = silent) -> Verified:
    """Find the model, prove its headers, and that it has the context asked for. Raises
    CheckpointError or ConfigError, one line.
    """
    from engine_actor.load.checkpoint import context_length, open_checkpoint
    from engine_actor.load.source import resolve

    source = args.model
    folder = resolve(source.path, load.cache_dir(), source.revision, progress)
    checkpoint = open_checkpoint(folder)
    context_length(source, checkpoint)
    return Verified(args, folder, str(checkpoint.quantisation))


def with_port(document: dict[str, Any], port: int | None) -> tuple[dict[str, Any], int]:
    """The Serve configuration with this HTTP port, and the port it then has. Raises ConfigError."""
    options = _part(document, "http_options")
    if port is not None:
        options["port"] = port
    found = options.get("port", DEFAULT_PORT)
    if type(found) is not int:
        raise ConfigError(f"http_options.port: must be a number (got {found!r})")
    return {**document, "http_options": options}, found


def without_haproxy(document: dict[str, Any]) -> dict[str, Any]:
    """The same configuration over Ray's own Python proxy, for machines without HAProxy. Raises
    ConfigError.
    """
    options = _part(document, "controller_options")
    runtime = _part(options, "runtime_env")
    variables = {k: v for k, v in _part(runtime, "env_vars").items() if k != HA_PROXY}
    options["runtime_env"] = {**runtime, "env_vars": variables}
    return {**document, "controller_options": options}


def refuse_limits(deployments: Any) -> None:
    """Raise ConfigError for live limits (`user_config`) that are none: the replica would, minutes
    later and three times.
    """
    for deployment in deployments if isinstance(deployments, list) else ():
        given = deployment.get("user_config") if isinstance(deployment, dict) else None
        try:
            if given is not None:
                limit_of(given)
        except ValueError as error:
            raise ConfigError(f"user_config: {error}") from None


def _part(document: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy of a part that may be left out."""
    found = document.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: must hold settings by name (got {found!r})")
    return dict(found)


def run_folder() -> Path:
    """Where files of running servers are, named by their ports."""
    return load.cache_dir() / "run"


def write_config(name: str, document: dict[str, Any]) -> Path:
    """A Serve configuration as a file in the cache folder. Raises ConfigError."""
    folder = run_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(document, indent=1))  # JSON is YAML
    except OSError as error:
        raise ConfigError(
            f"{folder}: the configuration cannot be kept ({error.strerror})"
        ) from None
    return folder / name


def url_host(host: str) -> str:
    """The host of a URL by which this machine reaches a server that listens on `host`."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def prepare_start(path: Path, port: int | None, progress: Progress) -> Start:
    """Check everything, write the derived configuration if one is needed."""
    document = load.read_serve_config(path)
    application = load.application(document)
    args = load.app_args(application.get("args") or {})
    refuse_limits(application.get("deployments"))
    derived, port = with_port(document, port)
    host = derived["http_options"].get("host", DEFAULT_HOST)
    if not isinstance(host, str):
        raise ConfigError(f"http_options.host: must be a name or an address (got {host!r})")
    takes_haproxy = has_haproxy() and host in HA_PROXY_HOSTS
    if not takes_haproxy:
        derived = without_haproxy(derived)
    verified = verify(args, progress)
    target = path
    if derived != document:
        target = write_config(f"serve-{port}.yaml", derived)
    return Start(
        str(target.resolve()),
        url_host(host),
        port,
        args.engine.drain_s,
        args.model.path,
        verified.weights,
        write_launcher(run_folder() / f"haproxy-{port}") if takes_haproxy else None,
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; 2 and one line on stderr where the server could not start."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.preflight")
    parser.add_argument("config", type=Path)
    parser.add_argument("--port", type=int)
    options = parser.parse_args(arguments)
    try:
        start = prepare_start(options.config, options.port, ConsoleProgress("model"))
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(start)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
