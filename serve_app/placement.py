"""Which device the engines get, and what they ask of Ray: a pure function of the configuration and
of what the cluster has. An impossible wish fails here, in one line, instead of pending for ever.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.load import ConfigError
from configs.schema import EngineConfig

ENGINE_CPUS = 0.5
"""What an engine reserves of Ray's CPU count. Ray's default of a whole one would leave a 2-core
machine without room for the rest; the engine's threads follow `cpu_threads`, not this."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and, for each engine actor, what it reserves. `why` is one line for the log."""

    device: Literal["cpu", "cuda"]
    num_gpus: int
    why: str

    @property
    def actor_options(self) -> dict[str, Any]:
        """Ray's resource options of one engine actor."""
        return {"num_cpus": ENGINE_CPUS, "num_gpus": self.num_gpus}


def place(engine: EngineConfig, gpus: float, torch_cuda: str | None) -> Placement:
    """Where the engines go. `gpus`: what the whole cluster has; `torch_cuda`: the CUDA version
    torch was built for, None for a CPU build.

    auto falls to the CPU where there is no usable GPU. Raises ConfigError where `cuda` is asked for
    and cannot be had, there are fewer GPUs than engines, or the cache's dtype is none there.
    """
    placement = _place(engine, gpus, torch_cuda)
    dtype = engine.kv.dtype
    if dtype == "int8" and placement.device == "cpu":
        why = f"read by the CUDA kernels only, and {placement.why}"
        raise ConfigError(f"engine.kv.dtype: int8 is {why}")
    if engine.numerics == "exact" and dtype not in ("auto", "fp32"):
        raise ConfigError(f"engine.kv.dtype: numerics exact needs fp32 or auto, got {dtype}")
    return placement


def _place(engine: EngineConfig, gpus: float, torch_cuda: str | None) -> Placement:
    if engine.device == "cpu":
        return Placement("cpu", 0, "engine.device is cpu")
    if gpus < 1:
        lack = "this Ray cluster has no GPU (none there, or hidden by CUDA_VISIBLE_DEVICES)"
    elif torch_cuda is None:
        lack = "the installed torch has no CUDA"
    elif gpus < engine.num_engines:
        raise ConfigError(
            f"engine.num_engines: {engine.num_engines} engines need a GPU each, "
            f"this Ray cluster has {gpus:g}"
        )
    else:
        return Placement("cuda", 1, f"{gpus:g} GPU(s), torch for CUDA {torch_cuda}")
    if engine.device == "cuda":
        raise ConfigError(f"engine.device: cuda, but {lack}; use auto or cpu")
    return Placement("cpu", 0, lack)


def installed_torch_cuda() -> str | None:
    """The CUDA version torch was built for, read from its version file: importing torch would take
    seconds and, in the ingress, memory. None for a CPU build or without torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    cuda = re.search(r"""^cuda\b[^=]*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
    return cuda[1] if cuda else None
