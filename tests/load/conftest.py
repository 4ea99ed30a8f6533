"""Fixtures of the loading tests."""

from __future__ import annotations

from tests.demo_fixture import demo_folder, demo_gguf

__all__ = ["demo_folder", "demo_gguf"]
