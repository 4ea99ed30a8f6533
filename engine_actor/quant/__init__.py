"""The converter: from any readable checkpoint to our packed folder, at 3, 4 or 8 bits."""
