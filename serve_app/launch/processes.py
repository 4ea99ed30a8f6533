"""What is asked of the operating system about processes and ports: the one place with calls that
only POSIX has. On Windows the same functions do what they can.

`serve run` is started in a session of its own, so whatever Ray and HAProxy start carries that
session's id, however it is re-parented, and nothing of ours is left behind or confused with a
stranger's process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POSIX = os.name == "posix"
if POSIX:
    import fcntl

_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Process:
    """One running process."""

    pid: int
    command: str


def start_session(
    command: Sequence[str], cwd: Path | None, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `command` in a session (on Windows a process group) of its own, its output piped.

    The caller must handle SIGINT itself before: a child inherits an ignored signal.
    """
    flags = 0 if POSIX else subprocess.CREATE_NEW_PROCESS_GROUP  # type: ignore[attr-defined]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=POSIX,
        creationflags=flags,
    )


def interrupt(child: subprocess.Popen[bytes]) -> None:
    """What Ctrl-C does, to this one process."""
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(signal.SIGINT if POSIX else signal.CTRL_BREAK_EVENT)  # type: ignore[attr-defined]


def session_members(session: int) -> list[Process]:
    """Every living process of a session."""
    if not POSIX:
        return []
    proc = Path("/proc")
    if (proc / "self" / "stat").exists():
        return list(_members_by_proc(proc, session))
    return list(_members_by_ps(session))


def end_session(session: int, grace_s: float) -> list[Process]:
    """End what is left of a session: SIGTERM, after `grace_s` SIGKILL. Returns what was left."""
    if not POSIX:
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(session)], capture_output=True)
        return []
    left = session_members(session)
    for process in left:
        _send(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while session_members(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    while survivors := session_members(session):
        for process in survivors:
            _send(process.pid, signal.SIGKILL)
        time.sleep(0.02)
    return left


def port_is_free(port: int, host: str = "0.0.0.0") -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if POSIX:  # as servers do; on Windows the option would share a port in use
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def claimed(port: int) -> Iterator[bool]:
    """Whether nobody else has claimed the port; it is ours until the block ends, or this process.

    A name in Linux's abstract namespace, which reaches as far as ports do; elsewhere always true.
    """
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            claim = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                claim.bind(f"\0deepinfer-sm86 serves port {port}")
            except OSError:
                yield False
                return
        yield True


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def listener(port: int) -> Process | None:
    """Who listens on a TCP port, as far as we may see it."""
    if Path("/proc/net/tcp").exists():
        return _listener_by_proc(port)
    try:
        done = subprocess.run(
            ["lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc"], capture_output=True, text=True
        )
    except OSError:
        return None
    fields = {line[0]: line[1:] for line in done.stdout.splitlines() if line}
    return Process(int(fields["p"]), fields.get("c", "?")) if "p" in fields else None


def session_leader(pid: int) -> Process | None:
    """Who began the session of a process: for HAProxy and Ray's workers the `serve run`. None where
    it is gone or not to be seen.
    """
    if not POSIX:
        return None
    with contextlib.suppress(OSError):
        leader = os.getsid(pid)
        return next((one for one in session_members(leader) if one.pid == leader), None)
    return None


@contextlib.contextmanager
def exclusive(path: Path, waiting: str) -> Iterator[None]:
    """Hold a lock file; says `waiting` once where somebody else holds it."""
    if not POSIX:
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(waiting, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _send(pid: int, which: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, which)


def _members_by_proc(proc: Path, session: int) -> Iterator[Process]:
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # After the command in brackets: state, parent, process group, session.
            state, _, _, owner = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(owner) == session and state not in "ZX":
                yield Process(int(folder.name), _command(folder))
        except (OSError, ValueError):
            continue  # it ended while we looked


def _members_by_ps(session: int) -> Iterator[Process]:
    done = subprocess.run(["ps", "-A", "-o", "pid=,args="], capture_output=True, text=True)
    for line in done.stdout.splitlines():
        pid, _, command = line.strip().partition(" ")
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(pid)) == session:
                yield Process(int(pid), command.strip())


def _command(folder: Path) -> str:
    text = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return text or f"[{(folder / 'comm').read_text().strip()}]"


def _listener_by_proc(port: int) -> Process | None:
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) in inodes:
                folder = link.parent.parent
                return Process(int(folder.name), _command(folder))
    return None
