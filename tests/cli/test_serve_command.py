"""`deepinfer-sm86 serve`: the Serve configuration it makes, and how it stops what it started."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import yaml

from configs.schema import AppArgs
from serve_app.serve_command import serve_document

CHILD = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print("child up", flush=True)
signal.sigwait({signal.SIGINT})
print("child interrupted", flush=True)
"""
DRAINS = {
    "ends": "print('drained', flush=True)",
    "hangs": "import signal; print('draining', flush=True); signal.pause()",
}
DRIVER = """
import subprocess, sys
from serve_app.serve_command import supervise

def start(code):
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

sys.exit(supervise(start({child!r}), lambda: start({drain!r})))
"""


def _driver(drain: str, child: str = CHILD) -> subprocess.Popen[str]:
    code = DRIVER.format(child=child, drain=DRAINS[drain])
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def _read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert next(process.stdout).strip() == line


def test_the_first_signal_drains_then_interrupts():
    with _driver("ends") as driver:
        _read_until(driver, "child up")
        driver.send_signal(signal.SIGTERM)
        _read_until(driver, "drained")
        _read_until(driver, "child interrupted")
    assert driver.returncode == 0


def test_the_second_signal_cuts():
    with _driver("hangs") as driver:
        _read_until(driver, "child up")
        driver.send_signal(signal.SIGINT)
        _read_until(driver, "draining")
        driver.send_signal(signal.SIGINT)
        _read_until(driver, "child interrupted")
    assert driver.returncode == 130


def test_a_server_that_ends_by_itself_gives_its_code():
    with _driver("ends", child="raise SystemExit(7)") as driver:
        pass
    assert driver.returncode == 7


def test_the_document_is_serve_config_with_these_settings(project_root):
    committed = yaml.safe_load((project_root / "serve_config.yaml").read_text(encoding="utf-8"))
    args = AppArgs.model_validate(committed["applications"][0]["args"])
    made = serve_document(args, "0.0.0.0", 8000)
    assert AppArgs.model_validate(made["applications"][0].pop("args")) == args
    committed["applications"][0].pop("args")
    assert made == committed


@pytest.mark.parametrize("port", [8000, 9000])
def test_host_and_port_are_those_asked_for(port):
    made = serve_document(AppArgs(), "127.0.0.1", port)
    assert made["http_options"]["host"] == "127.0.0.1"
    assert made["http_options"]["port"] == port
