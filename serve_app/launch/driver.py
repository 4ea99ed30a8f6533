"""The NVIDIA driver of this machine, asked of nvidia-smi, for configs.install_plan."""

from __future__ import annotations

import subprocess

COMMAND = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
ANSWER_S = 20.0


def nvidia_driver() -> str | None:
    """The driver's version, None without a driver that answers."""
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)
