"""`deepinfer-sm86 serve`: what scripts/serve does, for an installed package without a checkout.

Writes a Serve configuration around the settings, checks it, stays the parent of `serve run` and
drains it at the first SIGTERM or Ctrl-C; the second cuts. Loads no Ray itself.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from configs.load import APP_NAME, cache_dir, environment
from configs.schema import AppArgs

STOP_GRACE_S = 20.0
CUT_EXIT = 130
TEMPLATE = "serve_template.yaml"


def serve(args: AppArgs, host: str, port: int) -> int:
    """Serve until told to stop; returns the exit code. Raises CheckpointError, ConfigError."""
    from engine_actor.load.progress import ConsoleProgress
    from serve_app.preflight import prepare_start

    path = cache_dir() / "run" / f"command-{port}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(serve_document(args, host, port), indent=1))  # JSON is YAML
    start = prepare_start(path, port, ConsoleProgress("model"))
    command = [str(Path(sys.executable).with_name("serve")), "run", start.config]
    # A session of its own: a Ctrl-C at the terminal is for us alone, who drain first.
    child = subprocess.Popen(
        command, env=environment({"RAY_USAGE_STATS_ENABLED": "0"}), start_new_session=True
    )
    drain = [sys.executable, "-m", "serve_app.drain", "--seconds", str(start.drain_s)]
    return supervise(child, lambda: subprocess.Popen(drain, start_new_session=True))


def serve_document(args: AppArgs, host: str, port: int) -> dict[str, Any]:
    """A whole Serve configuration with these settings."""
    import yaml

    document = yaml.safe_load((files("configs") / TEMPLATE).read_text("utf-8"))
    document["http_options"] |= {"host": host, "port": port}
    for application in document["applications"]:
        if application["name"] == APP_NAME:
            application["args"] = args.model_dump(mode="json")
    return dict(document)


def supervise(
    child: subprocess.Popen[bytes],
    start_drain: Callable[[], subprocess.Popen[bytes]],
    grace_s: float = STOP_GRACE_S,
) -> int:
    """Wait for the child or for a signal. The first signal drains, then interrupts the child; the
    second interrupts it at once. Returns 0 after a drain, 130 after a cut, else the child's code.
    """
    signals = threading.Semaphore(0)
    wake = threading.Event()

    def heard(*_: object) -> None:
        signals.release()
        wake.set()

    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, heard)
    _wake_at_end(child, wake)
    wake.wait()
    if child.poll() is not None:
        return child.returncode
    signals.acquire()
    wake.clear()
    drain = start_drain()
    _wake_at_end(drain, wake)
    wake.wait()
    was_cut = drain.poll() is None
    if was_cut:
        drain.kill()
        drain.wait()
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return CUT_EXIT if was_cut else 0


def _wake_at_end(process: subprocess.Popen[bytes], wake: threading.Event) -> None:
    """Set `wake` when the process has ended."""

    def wait() -> None:
        process.wait()
        wake.set()

    threading.Thread(target=wait, daemon=True).start()
