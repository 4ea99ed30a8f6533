"""What the machine can do, as far as a backend's choice depends on it.

The one place of `kernels` that asks torch.cuda about a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device. capability: torch's name of the CPU vector level ("AVX2", "AVX512", "DEFAULT");
    empty on a GPU. sm: 86 for compute capability 8.6, 0 on a CPU. multiprocessors: 0 on a CPU.
    uuid: which card it is among several, as nvidia-smi -L lists them; empty on a CPU.
    """

    kind: str
    name: str
    capability: str = ""
    sm: int = 0
    multiprocessors: int = 0
    uuid: str = ""


def device_info(device: torch.device) -> DeviceInfo:
    """Describe `device`. Raises ValueError for a kind other than cpu or cuda."""
    if device.type == "cpu":
        return DeviceInfo("cpu", "cpu", capability=torch.backends.cpu.get_cpu_capability())
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return DeviceInfo(
            "cuda",
            found.name,
            sm=found.major * 10 + found.minor,
            multiprocessors=found.multi_processor_count,
            uuid=f"GPU-{found.uuid}",
        )
    raise ValueError(f"no kernels for device {device.type!r}; there are cpu and cuda")


@cache
def compute_capability(device: torch.device) -> int:
    """86 for compute capability 8.6; 0 on a CPU, and on a GPU that torch does not find."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return device_info(device).sm


def card_name() -> str:
    """The current CUDA device as torch calls it; "" where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def cuda_devices() -> int:
    """How many CUDA devices torch can use here; 0 without a driver or with a CPU build."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
