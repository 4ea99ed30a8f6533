"""The parent of `serve run`: starts it, says when it is ready, drains before it stops.

`serve run` alone would cut its streams on a signal. The first SIGTERM or Ctrl-C stops admission,
waits for the open streams and deletes the app; the second cuts; nothing is left behind. Standard
library only, because scripts/serve uses it as the command line does. Knows no settings: its plan
is made by serve_app.preflight.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from configs.load import environment
from serve_app.launch.processes import (
    claimed,
    end_session,
    free_port,
    interrupt,
    listener,
    port_is_free,
    session_leader,
    session_members,
    start_session,
)

HAPROXY_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
}
"""Ports HAProxy mode takes beside HTTP port 8000. Beside another they move along with it, so that
two servers on one machine never race for them; where one is in use all the same, a free one."""
USUAL_PORT = 8000
LAST_PORT = 65535
FAILED = re.compile(r"Deploying app '[^']*' failed|DEPLOY_FAILED")
FAILED_ONCE = re.compile(
    r"Deployment actor '[^']*' .* failed to become ready|Exception in Replica\("
)
CAUSE = re.compile(r"(?:CheckpointError|ConfigError|RayServeException|ValueError): (.+)")
TRIES = 3
"""Serve tries a constructor so often (serve_app.app), then gives up without a word in its log."""
GCS = re.compile(r"--gcs-address=(\S+)")
READY_POLL_S = 0.1
STOP_GRACE_S = 20.0
CUT_EXIT = 130


class Server:
    """One `serve run` and what happens to it. Events come from threads and signals, one at a time.

    python: the interpreter of .venv. plan: what serve_app.preflight printed. settings: environment
    variables for the server.
    """

    def __init__(
        self, python: str, plan: dict[str, Any], settings: dict[str, str], root: Path | None = None
    ) -> None:
        self._python = python
        self._plan = plan
        self._base = f"http://{plan['host']}:{plan['port']}"
        self._root = root
        self._events: SimpleQueue[str] = SimpleQueue()  # its put may be called from a signal
        self._variables = server_environment(Path(python), settings, root, plan["port"])
        if plan.get("haproxy") is not None:
            self._variables.setdefault("RAY_SERVE_HAPROXY_BINARY_PATH", plan["haproxy"])
        self._child: subprocess.Popen[bytes] | None = None
        self._drain: subprocess.Popen[bytes] | None = None
        self._started = time.monotonic()
        self._is_over = threading.Event()
        self._cause = "see the lines above"
        self._was_ready = False  # from then on a dead engine is Serve's to restart, again and again

    def run(self) -> int:
        """Serve until told to stop; returns the exit code. Exits with one line where another server
        is just being started on this port: HAProxy listens last, and beside any other.
        """
        with claimed(self._plan["port"]) as is_ours:
            if not is_ours:
                sys.exit(f"error: port {self._plan['port']}: another server is starting there")
            return self._run()

    def _run(self) -> int:
        for which in (signal.SIGINT, signal.SIGTERM):
            signal.signal(which, lambda *_: self._events.put("signal"))
        command = [str(Path(self._python).with_name("serve")), "run", self._plan["config"]]
        self._child = start_session(command, self._root, self._variables)
        for work in (self._show_output, self._await_exit, self._await_ready):
            threading.Thread(target=work, daemon=True).start()
        try:
            return self._until_over()
        finally:
            self._is_over.set()
            self._clean_up()

    def _until_over(self) -> int:
        is_stopping = False
        while True:
            event = self._events.get()
            if event == "ready" and not is_stopping:
                self._was_ready = True
                self._say_ready()
            elif event == "signal" and not is_stopping:
                is_stopping = True
                self._begin_stop()
            elif event == "signal":
                say("cutting open streams")
                return CUT_EXIT
            elif event == "drained":
                interrupt(self._process)
                self._after(STOP_GRACE_S, "overdue")
            elif event == "overdue":
                return 0
            elif event == "failed" and not is_stopping:
                say(f"the application cannot be started: {self._cause}")
                interrupt(self._process)
                self._process.wait(STOP_GRACE_S)
                return 1
            elif event == "exit":
                if not is_stopping:
                    say(f"serve run ended by itself (exit code {self._process.returncode})")
                return 0 if is_stopping else 1

    def _begin_stop(self) -> None:
        address = cluster_address(self._process.pid)
        if address is None:
            say("stopping")
            self._events.put("drained")
            return
        seconds = self._plan["drain_s"]
        say(f"draining: no new requests, open streams have {seconds:g} s (again: cut them)")
        command = [self._python, "-m", "serve_app.drain", "--seconds", str(seconds)]
        self._drain = subprocess.Popen(
            [*command, "--address", address],
            cwd=self._root,
            env=self._variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is for us alone
        )
        drain = self._drain

        def tell_when_drained() -> None:
            drain.wait()
            self._events.put("drained")

        self._in_thread(tell_when_drained)

    def _clean_up(self) -> None:
        """Nothing that we or Ray started stays: also a HAProxy whose manager died before it."""
        if self._drain is not None and self._drain.poll() is None:
            self._drain.kill()
            self._drain.wait()
        end_session(self._process.pid, grace_s=3.0)
        self._process.wait()
        port = self._plan["port"]
        say("stopped" if port_is_free(port) else f"stopped, but port {port} is still in use")

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._child is not None
        return self._child

    def _show_output(self) -> None:
        assert self._process.stdout is not None
        failures = 0
        for line in self._process.stdout:
            text = line.decode(errors="replace")
            sys.stdout.write(text)
            sys.stdout.flush()
            failures += bool(FAILED_ONCE.search(text)) and not self._was_ready
            if found := CAUSE.search(text):
                self._cause = found[1]
            has_failed = FAILED.search(text) is not None
            if has_failed and self._was_ready:
                say("a new deployment failed, what is served stays as it is; see the lines above")
            elif has_failed or failures == TRIES:
                self._events.put("failed")

    def _await_exit(self) -> None:
        self._process.wait()
        self._events.put("exit")

    def _await_ready(self) -> None:
        """Polls: readiness is a fact of the HTTP side, and only HTTP can tell."""
        url = f"{self._base}/health/ready"
        while not self._is_over.wait(READY_POLL_S):
            # Patient: Serve holds the question until the first replica is there to answer it.
            if get_json(url, timeout=30) is not None:
                self._events.put("ready")
                return

    def _after(self, seconds: float, event: str) -> None:
        def tell_later() -> None:
            if not self._is_over.wait(seconds):
                self._events.put(event)

        self._in_thread(tell_later)

    @staticmethod
    def _in_thread(work: Callable[[], object]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def _say_ready(self) -> None:
        base = self._base
        models = get_json(f"{base}/v1/models") or {"data": [{"id": self._plan["model"]}]}
        model = models["data"][0]["id"]
        seconds = time.monotonic() - self._started
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 16}
        say(
            f"ready: {base}  model {model} ({self._plan['weights']}), started in {seconds:.0f} s\n"
            f"  curl {base}/v1/completions -H 'content-type: application/json' \\\n"
            f"    -d '{json.dumps(body | {'temperature': 0})}'\n"
            "  Ctrl-C drains and stops."
        )


def server_environment(
    python: Path, settings: dict[str, str], root: Path | None, port: int
) -> dict[str, str]:
    """The environment of `serve run`: .venv first, HAProxy's side ports beside `port`, Ray's usage
    statistics off unless somebody chose.
    """
    variables = environment(settings)
    variables.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's own default for a local cluster, said aloud, so that our drain finds the token as well.
    variables.setdefault("RAY_AUTH_MODE", "token")
    variables["PATH"] = f"{python.parent}:{variables.get('PATH', '')}"
    if root is not None:
        variables["PYTHONPATH"] = ":".join(filter(None, [str(root), variables.get("PYTHONPATH")]))
    variables["PYTHONUNBUFFERED"] = "1"
    for name, usual in HAPROXY_PORTS.items():
        if name not in variables:
            variables[name] = str(side_port(usual, port))
    return variables


def side_port(usual: int, http_port: int) -> int:
    """The place of one of HAPROXY_PORTS beside this HTTP port."""
    port = usual + http_port - USUAL_PORT
    return port if 0 < port <= LAST_PORT and port_is_free(port) else free_port()


def cluster_address(session: int) -> str | None:
    """The address of the Ray cluster of this session, so that another one on the same machine is
    never meant; None where it has not come up yet.
    """
    found = (GCS.search(process.command) for process in session_members(session))
    return next((match[1] for match in found if match), None)


def get_json(url: str, timeout: float = 5) -> Any:
    """The JSON at a URL, or None where there is no 200 yet."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return json.load(answer)
    except (OSError, ValueError, urllib.error.URLError):
        return None


def say(text: str) -> None:
    """One line of ours among Ray's."""
    print(f"[deepinfer-sm86] {text}", flush=True)


def refuse_taken_port(port: int) -> None:
    """Exit with the holder's name where the port is in use, or with the range where it is none."""
    if not 0 < port <= LAST_PORT:
        sys.exit(f"error: port {port}: there are 1 to {LAST_PORT}")
    if port_is_free(port):
        return
    holder = listener(port)
    if holder is None:
        sys.exit(f"error: port {port} is in use; stop its holder or give another with --port")
    begun_by = session_leader(holder.pid) or holder
    whole = f", begun by process {begun_by.pid}: {begun_by.command[:120]}"
    sys.exit(
        f"error: port {port} is held by process {holder.pid}: {holder.command[:120]}"
        f"{whole if begun_by.pid != holder.pid else ''}; "
        f"stop it (kill {begun_by.pid}) or give another with --port"
    )
