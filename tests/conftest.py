"""Rules for every test: only `gpu` may skip, every run draws the same numbers, the door is open."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is loaded: workers that have a thread for every core each wait for one another,
    # and the GPU tests take many times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Derandomised: a red run is red again. No deadline: the machine may be busy.
settings.register_profile("house", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("house")


def _open_kernels_door() -> None:
    """Let `kernels.*` mean ours as well where Hugging Face's `kernels` is installed too."""
    if importlib.util.find_spec("engine_actor._mount") is None:
        return
    from engine_actor import _mount

    _mount.mount()


if importlib.util.find_spec("kernels") is not None:
    _open_kernels_door()


ONE_WORKER = ("tests/ray/", "tests/kernels_gpu/", "tests/engine_gpu/")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where no CUDA device is. torch is imported only if there is such a test.
    Several workers begin with the files that take longest.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: 1 - (item.path in slow))
        items.sort(key=lambda item: 1 - (item.get_closest_marker("ray") is not None))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`: a file stays with one worker, and so do files that share what only one can
    have: Ray's tests their live server and the machine's patience, the GPU's the card.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # a plugin that need not be there

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((name for name in ONE_WORKER if file.startswith(name)), file)

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """One thread for torch: two that wait for each other on a busy machine are many times slower.

    What is imported and collected stays, millions of objects: out of the garbage collector's sight
    with them, or each collection, which some tests ask for by the hundred, takes half a second.
    """
    _use_one_thread()
    gc.collect()
    gc.freeze()


def _use_one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip that is not a `gpu` test's is a failure: it would hide a part that nobody runs."""
    report = yield
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    if is_skip and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped without the marker gpu: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole module that skips itself."""
    report = yield
    if report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} skips itself at import: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Seed whatever generator is loaded; a test that imports no torch does not pay for torch."""
    random.seed(0)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(0)
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread for torch before and behind each test: an engine takes more for its process, and
    fixed threads are part of every claim that two results are equal bit for bit.
    """
    _use_one_thread()
    yield
    _use_one_thread()


@pytest.fixture
def project_root() -> Path:
    """The checkout."""
    return ROOT
