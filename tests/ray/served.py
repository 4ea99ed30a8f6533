"""A server in a process of its own, started and stopped exactly as scripts/serve does it, only with
this interpreter instead of .venv's; and what tests read of it from outside.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.load import environment
from serve_app.launch.processes import free_port, session_members
from serve_app.launch.server import cluster_address

START_S = 240.0
"""Longest wait for a start: 15 s on two idle cores, minutes on two that others use."""
READY = "[deepinfer-sm86] ready"
NODE_TIMED_OUT = "The current node timed out during startup"
"""Ray gives its own start 30 s and cannot be told otherwise: a machine whose cores others use may
need longer once.
"""
_PARENT = """
import sys
sys.path.insert(0, {scripts!r})
from bootstrap.serving import main
sys.exit(main(sys.argv[1:], python=sys.executable))
"""


def wait_until(ask: Callable[[], Any], seconds: float, what: str, pause_s: float = 0.01) -> Any:
    """The first truthy answer. Polls, because Ray and HTTP offer no event for it; fails after
    `seconds`.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = ask()
        if answer:
            return answer
        time.sleep(pause_s)
    raise AssertionError(f"not within {seconds:g} s: {what}")


class Served:
    """One scripts/serve. `lines` is what it printed."""

    def __init__(self, root: Path, *flags: str, **variables: str) -> None:
        is_up = self._begin(root, flags, variables)
        if not is_up and any(NODE_TIMED_OUT in line for line in self.lines):
            self._reader.join()
            is_up = self._begin(root, flags, variables)
        if not is_up:
            self.process.kill()
            raise AssertionError("the server did not come up:\n" + "".join(self.lines[-60:]))
        self.start_s = time.monotonic() - self._begun
        self.session = next(pid for pid in self._children() if cluster_address(pid) is not None)
        self.address = cluster_address(self.session)

    def _begin(self, root: Path, flags: tuple[str, ...], variables: dict[str, str]) -> bool:
        """Whether it came up."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        script = _PARENT.format(scripts=str(root / "scripts"))
        self._begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, "--port", str(self.port), *flags],
            cwd=root,
            env=_as_a_shell_has_it(environment(variables)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self._ready.wait(START_S) and any(READY in line for line in self.lines)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if READY in line:
                self._ready.set()
        self.process.stdout.close()
        self._ready.set()

    def _children(self) -> list[int]:
        mine = f"PPid:\t{self.process.pid}\n"
        found = []
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                if mine in status.read_text():
                    found.append(int(status.parent.name))
            except OSError:
                continue
        return found

    def every(self, pattern: str) -> list[re.Match[str]]:
        """Matches in all printed lines."""
        return [m for line in list(self.lines) if (m := re.search(pattern, line))]

    def members(self) -> list[Any]:
        """Every process of the server, Ray's and HAProxy's included."""
        return session_members(self.session)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON (or text) of a GET; (0, why) where nothing answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, _json(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _json(error.read())
        except OSError as error:
            return 0, str(error)

    def post(self, path: str, body: dict[str, Any], timeout: float = 60.0) -> tuple[int, Any]:
        """Status and JSON of a POST; (0, why) where nothing answers."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, _json(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _json(error.read())
        except OSError as error:
            return 0, str(error)

    def python(self, root: Path, script: str) -> str:
        """What a second Python process prints, connected to this server's cluster.

        Alone on its machine it would need neither variable: `address="auto"` finds the cluster and
        the token. Here another cluster may run beside.
        """
        address = {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "token"}
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env=environment(address),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> int:
        """SIGTERM, if it still runs; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.finish()

    def finish(self, seconds: float = 120.0) -> int:
        """Wait for its end; the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code


def _as_a_shell_has_it(variables: dict[str, str]) -> dict[str, str]:
    """Without what this test run set for itself: the server finds its own number of threads."""
    return {name: value for name, value in variables.items() if name != "OMP_NUM_THREADS"}


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
