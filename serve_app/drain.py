"""Stops the application in peace: no new requests, wait for the open ones, then delete the app.

A client of a running cluster: `python -m serve_app.drain --address HOST:PORT --seconds 60`.
`serve run` alone would cut its streams, because the HTTP proxies die first.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError

from configs.load import APP_NAME

POLL_S = 0.1


def open_requests(handle: Any) -> int:
    """Sequences that all ingress replicas still serve; they refuse new ones from the first call."""
    try:
        return sum(handle.broadcast("drain").results())
    except DeploymentUnavailableError:
        return 0  # it never came up: nobody to wait for


def drain(seconds: float, app_name: str = APP_NAME) -> int:
    """Drain and delete the application; returns how many requests were cut at the end.

    Polls: Serve offers no event for the end of a request.
    """
    if app_name not in serve.status().applications:
        return 0  # not deployed yet, or gone already
    handle = serve.get_app_handle(app_name)
    deadline = time.monotonic() + seconds
    left = open_requests(handle)
    if left:
        print(f"draining: {left} open", flush=True)
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = open_requests(handle)
    serve.delete(app_name)
    return left


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 where every request ended by itself, 3 where some were cut."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.drain", description=__doc__)
    parser.add_argument("--address", default="auto", help="the cluster; auto: the local one")
    parser.add_argument("--seconds", type=float, default=60.0, help="longest wait")
    options = parser.parse_args(arguments)
    ray.init(
        address=options.address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR
    )
    left = drain(options.seconds)
    print(f"drained, {left} cut" if left else "drained", flush=True)
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
