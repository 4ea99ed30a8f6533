"""The plans on the wall: the typed configuration and its presets."""
