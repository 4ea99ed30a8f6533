"""The door to our `kernels` folder.

`kernels` is a namespace without __init__.py, because Hugging Face ships a package of that name that
transformers imports. Where that one is installed it wins the name; we then add our folder to its
search path, so that both can be used. Called by ops.py before its first `kernels.*` import, and not
by the package itself: the core must not pay for importing the other one.
"""

from __future__ import annotations

import importlib
from pathlib import Path

OURS = Path(__file__).resolve().parent.parent / "kernels"


def mount() -> None:
    """Make `import kernels.<ours>` work whoever owns the name. Idempotent."""
    package = importlib.import_module("kernels")
    search = package.__path__
    if str(OURS) not in [str(Path(entry).resolve()) for entry in search]:
        search.append(str(OURS))
