"""Checkpoint formats: each reads headers first, then hands over canonical weights one by one."""
