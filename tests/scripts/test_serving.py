"""scripts/serve as a parent: ready, drain, cut, nothing left. `serve run` is a stand-in here; the
real one is in tests/ray.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from serve_app.launch.processes import (
    claimed,
    free_port,
    listener,
    port_is_free,
    session_leader,
    session_members,
)
from serve_app.launch.server import (
    Server,
    cluster_address,
    refuse_taken_port,
)

# `serve run`: answers HTTP, holds a child in a process group of its own as Ray's workers are, and
# an orphan of a dead middleman as HAProxy becomes.
_SERVE = """#!{python}
import http.server, json, os, subprocess, sys
wait = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", wait, "--gcs-address=127.0.0.1:6379"], process_group=0)
subprocess.run([sys.executable, "-c",
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {{wait!r}}])"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({{"data": [{{"id": "stand-in"}}]}}).encode())
    def log_message(self, *_): pass
sys.stdout.reconfigure(line_buffering=True)
{extra}
try:
    http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
_PYTHON = """#!{python}
import sys, time
print("drain called:", sys.argv[1:], flush=True)
time.sleep({drain_s})
"""
_PARENT = """
import json, sys
sys.path.insert(0, {root!r})
from serve_app.launch.server import Server
sys.exit(Server({python!r}, json.loads({plan!r}), {{}}).run())
"""


class Parent:
    """A Server in a process of its own over the stand-ins."""

    def __init__(self, folder: Path, root: Path, drain_s: float = 0.0, extra: str = "") -> None:
        self.port = free_port()
        facts = {"python": sys.executable, "port": self.port, "drain_s": drain_s, "extra": extra}
        for name, text in (("serve", _SERVE), ("python", _PYTHON)):
            (folder / name).write_text(text.format(**facts))
            (folder / name).chmod(0o755)
        plan = {
            "config": "x.yaml",
            "host": "127.0.0.1",
            "port": self.port,
            "drain_s": 5,
            "model": "m",
            "weights": "w",
        }
        script = _PARENT.format(
            root=str(root), python=str(folder / "python"), plan=json.dumps(plan)
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        )
        self.said: list[str] = []

    def read_until(self, text: str) -> None:
        """Read output up to a line with `text`; the line's arrival is the event."""
        for line in self.process.stdout:
            self.said.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} never came: {self.said}")

    def children(self) -> list[int]:
        """The session of `serve run`."""
        done = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=True,
        )
        return [int(pid) for pid in done.stdout.split()]

    def finish(self) -> int:
        """Read to the end; the exit code."""
        self.said += self.process.stdout.readlines()
        self.process.stdout.close()
        return self.process.wait(30)


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_then_stops_and_leaves_nothing(tmp_path, project_root, which):
    parent = Parent(tmp_path, project_root)
    parent.read_until("ready: ")
    session = next(pid for pid in parent.children() if session_members(pid))
    assert len(session_members(session)) == 3
    parent.process.send_signal(which)
    assert parent.finish() == 0
    said = "".join(parent.said)
    assert "'serve_app.drain', '--seconds', '5', '--address', '127.0.0.1:6379'" in said
    assert said.index("drain called") < said.index("interrupted")
    assert session_members(session) == []
    assert port_is_free(parent.port)


def test_a_second_signal_cuts(tmp_path, project_root):
    parent = Parent(tmp_path, project_root, drain_s=600)
    parent.read_until("ready: ")
    parent.process.send_signal(signal.SIGTERM)
    parent.read_until("drain called")
    parent.process.send_signal(signal.SIGTERM)
    assert parent.finish() == 130
    assert port_is_free(parent.port)


def test_a_server_that_ends_by_itself_is_told(tmp_path, project_root):
    parent = Parent(tmp_path, project_root, extra="sys.exit(3)")
    assert parent.finish() == 1
    assert "serve run ended by itself (exit code 3)" in "".join(parent.said)


def test_an_application_that_fails_stops_the_server(tmp_path, project_root):
    parent = Parent(tmp_path, project_root, extra="print(\"Deploying app 'default' failed: no\")")
    assert parent.finish() == 1
    assert "cannot be started" in "".join(parent.said)


@pytest.mark.parametrize(("failures", "is_over"), [(2, False), (3, True)])
def test_a_constructor_that_fails_three_times_stops_the_server(
    tmp_path, project_root, failures, is_over
):
    line = "Deployment actor 'engine-0' for Deployment(name='I', app='d') failed to become ready: x"
    hang = "import time; time.sleep(600)" if is_over else ""
    cause = "(Controller pid=7) engine_actor.errors.CheckpointError: no memory for the KV pool"
    extra = f"print({line!r})\nprint({cause!r})\n" * failures + hang
    parent = Parent(tmp_path, project_root, extra=extra)
    if is_over:
        assert parent.finish() == 1
        said = "the application cannot be started: no memory for the KV pool\n"
        assert said in "".join(parent.said)
    else:
        parent.read_until("ready: ")
        parent.process.send_signal(signal.SIGTERM)
        assert parent.finish() == 0


_FAILS_WHEN_ASKED = """
answer = Handler.do_GET
def do_GET(self):
    answer(self)
    if self.path == "/deploy":
        print("Deploying app 'default' failed with exception: no", flush=True)
Handler.do_GET = do_GET
"""


def test_a_deployment_that_fails_later_ends_nothing(tmp_path, project_root):
    """Serve goes on with what ran before; so do we."""
    parent = Parent(tmp_path, project_root, extra=_FAILS_WHEN_ASKED)
    parent.read_until("ready: ")
    with urllib.request.urlopen(f"http://127.0.0.1:{parent.port}/deploy", timeout=10) as answer:
        assert answer.status == 200
    parent.read_until("a new deployment failed, what is served stays as it is")
    parent.process.send_signal(signal.SIGTERM)
    assert parent.finish() == 0
    assert "cannot be started" not in "".join(parent.said)


def test_the_ready_line_can_be_copied(tmp_path, project_root):
    parent = Parent(tmp_path, project_root)
    parent.read_until("Ctrl-C drains")
    text = "".join(parent.said)
    body = text.partition("-d '")[2].partition("'")[0]
    assert json.loads(body)["model"] == "stand-in"
    assert f"http://127.0.0.1:{parent.port}/v1/completions" in text
    parent.process.send_signal(signal.SIGINT)
    assert parent.finish() == 0


def test_the_holder_of_a_port_is_named():
    import os
    import socket

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert not port_is_free(port)
        assert listener(port).pid == os.getpid()
    assert port_is_free(port)
    assert listener(port) is None


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999])
def test_a_port_that_does_not_exist_is_refused_in_one_line(port):
    with pytest.raises(SystemExit, match=rf"error: port {port}: there are 1 to 65535"):
        refuse_taken_port(port)


def test_two_servers_that_start_at_once_do_not_share_a_port():
    """Before either listens: HAProxies would take the port together and deal requests out."""
    plan = {
        "config": "x.yaml",
        "host": "127.0.0.1",
        "port": free_port(),
        "drain_s": 5,
        "model": "m",
        "weights": "w",
    }
    with claimed(plan["port"]) as first, claimed(plan["port"]) as second:
        assert (first, second) == (True, False)
        with pytest.raises(SystemExit, match=rf"port {plan['port']}: another server is starting"):
            Server(sys.executable, plan, {}).run()
    with claimed(plan["port"]) as again:
        assert again


def test_who_began_the_holder_is_named_too(tmp_path, project_root):
    """Serve would start HAProxy again: it is `serve run` that has to be stopped."""
    parent = Parent(tmp_path, project_root)
    parent.read_until("Ctrl-C drains")
    leader = parent.children()[0]
    with pytest.raises(SystemExit) as caught:
        refuse_taken_port(parent.port)
    assert f"port {parent.port} is held by process {leader}" in str(caught.value)
    worker = next(one.pid for one in session_members(leader) if one.pid != leader)
    assert session_leader(worker).pid == leader
    parent.process.send_signal(signal.SIGINT)
    assert parent.finish() == 0
    assert session_leader(worker) is None
    refuse_taken_port(parent.port)


def test_a_session_without_a_cluster_has_no_address():
    import os

    assert cluster_address(os.getpid()) is None
