"""What scripts/serve, scripts/test and scripts/check share. Standard library only: it runs before
anything is installed, with whatever Python 3.11+ the machine has.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if sys.version_info < (3, 11):  # noqa: UP036 - an older interpreter may well read this file
    sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # for `configs`, which has the pure part of the install plan

from bootstrap.environment import BootstrapError, ensure_venv  # noqa: E402

__all__ = ["ROOT", "BootstrapError", "ensure_venv"]
