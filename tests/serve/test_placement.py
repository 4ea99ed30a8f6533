"""Where engines go: one pure function, and its table."""

from __future__ import annotations

import pytest

from configs.load import ConfigError
from configs.schema import EngineConfig
from serve_app.placement import Placement, installed_torch_cuda, place


@pytest.mark.parametrize(
    ("device", "gpus", "torch_cuda", "expected"),
    [
        ("auto", 0, "13.0", ("cpu", 0)),
        ("auto", 1, None, ("cpu", 0)),
        ("auto", 1, "13.0", ("cuda", 1)),
        ("cpu", 8, "13.0", ("cpu", 0)),
        ("cuda", 2, "12.8", ("cuda", 1)),
    ],
)
def test_the_device_follows_what_is_there(device, gpus, torch_cuda, expected):
    """B-37: auto falls to the CPU where there is no usable GPU."""
    placement = place(EngineConfig(device=device), gpus, torch_cuda)
    assert (placement.device, placement.num_gpus) == expected
    assert placement.why


@pytest.mark.parametrize(
    ("gpus", "torch_cuda", "why"),
    [(0, "13.0", "no GPU"), (1, None, "torch has no CUDA")],
)
def test_cuda_that_cannot_be_had_fails_with_the_reason(gpus, torch_cuda, why):
    """B-37: not a request that pends for ever."""
    with pytest.raises(ConfigError, match=rf"engine\.device: cuda, but .*{why}"):
        place(EngineConfig(device="cuda"), gpus, torch_cuda)


def test_a_cache_that_the_device_cannot_have_is_refused_before_anything_starts():
    for settings, gpus in (({"device": "auto"}, 0), ({"device": "cpu"}, 1)):
        with pytest.raises(ConfigError, match=r"engine\.kv\.dtype: int8 is read by the CUDA"):
            place(EngineConfig(kv={"dtype": "int8"}, **settings), gpus, "13.0")
    assert place(EngineConfig(kv={"dtype": "int8"}), 1, "13.0").device == "cuda"
    for dtype in ("int8", "fp16", "bf16"):
        with pytest.raises(ConfigError, match=rf"numerics exact needs fp32 or auto, got {dtype}"):
            place(EngineConfig(numerics="exact", kv={"dtype": dtype}), 1, "13.0")
    assert place(EngineConfig(numerics="exact", kv={"dtype": "fp32"}), 0, None).device == "cpu"


def test_more_engines_than_gpus_are_refused():
    with pytest.raises(ConfigError, match=r"engine\.num_engines: 4 .* has 2"):
        place(EngineConfig(num_engines=4), 2, "13.0")


def test_several_engines_share_a_cpu():
    assert place(EngineConfig(num_engines=4), 0, None).device == "cpu"


def test_an_engine_leaves_room_on_a_small_machine():
    options = Placement("cpu", 0, "").actor_options
    assert options["num_cpus"] < 1
    assert options["num_gpus"] == 0


def test_torchs_cuda_version_is_read_without_importing_it():
    import torch

    assert installed_torch_cuda() == torch.version.cuda
