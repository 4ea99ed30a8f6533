"""Whether kernels can be compiled and launched in this process, in words."""

from __future__ import annotations

from functools import cache

from kernels.jit.driver import LaunchError, driver
from kernels.jit.nvrtc import nvrtc
from kernels.jit.toolkit import ToolkitMissing, include_folders


@cache
def why_no_jit() -> str | None:
    """None where NVRTC, the CUDA headers and a driver are here, else one line that says what is
    missing and what to install.
    """
    try:
        driver()
        nvrtc()
        include_folders()
    except (LaunchError, ToolkitMissing) as error:
        return str(error)
    return None
