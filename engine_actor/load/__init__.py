"""From a name or a folder to checked, canonical weights. The package itself imports no torch."""
