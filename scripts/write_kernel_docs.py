#!/usr/bin/env python3
"""Write docs/kernels: the occupancy table and the paper estimate. Needs NVRTC, no GPU.

scripts/write_kernel_docs.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kernels.jit.budget import all_checks, over_budget
from kernels.jit.kernel import Variant
from kernels.jit.occupancy import SHOWN, occupancy_page
from kernels.jit.shipped import compile_all, shipped_variants
from rtx3050_estimate import estimate_page

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "kernels"


def main() -> int:
    """Overwrites both pages. Returns 1 where --all-architectures found a budget broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--all-architectures",
        action="store_true",
        help="hold every variant to its budget on every card; tests do so for the hungriest only",
    )
    options = parser.parse_args()
    variants = shipped_variants()
    broken = check_all(variants) if options.all_architectures else 0
    compile_all((variant, SHOWN) for variant in variants if variant.first_sm <= SHOWN)
    FOLDER.mkdir(parents=True, exist_ok=True)
    pages = {"occupancy.md": occupancy_page(variants), "rtx3050_estimate.md": estimate_page()}
    for name, text in pages.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)
    return int(broken > 0)


def check_all(variants: Sequence[Variant]) -> int:
    """How many (variant, architecture) pairs break their budget; a line for each."""
    checks = all_checks(variants)
    compile_all(checks)
    found = [(variant, sm, over_budget(variant, sm)) for variant, sm in checks]
    broken = [f"{v.kernel()} sm_{sm}: {reason}" for v, sm, reason in found if reason]
    print("\n".join([*broken, f"{len(checks)} checked, {len(broken)} over budget"]))
    return len(broken)


if __name__ == "__main__":
    sys.exit(main())
