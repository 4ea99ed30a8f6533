"""Fixtures of the engine tests."""

from __future__ import annotations

from tests.demo_fixture import demo_folder

__all__ = ["demo_folder"]
