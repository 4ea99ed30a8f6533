"""Every kernel that is shipped, found by reading `SHIPPED` of each module of `kernels`.

Knows no kernel by name: a new source is checked as soon as its module lists its variants.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

from kernels.jit.kernel import Variant
from kernels.jit.source import KERNELS_FOLDER

ARCHITECTURES = (80, 86, 89, 90)


def shipped_variants() -> tuple[Variant, ...]:
    """All variants, ordered by source, entry and defines."""
    found = {
        str(variant.kernel()): variant
        for module in _modules()
        for variant in getattr(module, "SHIPPED", ())
    }
    return tuple(found[name] for name in sorted(found))


def compile_all(checks: Iterable[tuple[Variant, int]], workers: int = 2) -> None:
    """Compile what is needed of each (variant, architecture), once; NVRTC lets go of Python's lock.

    Raises CompileError for the first program with errors.
    """
    programs = {(v.source, tuple(sorted(v.defines.items())), sm) for v, sm in checks}
    with ThreadPoolExecutor(workers) as pool:
        tasks = [
            pool.submit(source.compiled, dict(defines), sm)
            for source, defines, sm in sorted(programs, key=str)
        ]
    for task in tasks:
        task.result()


def _modules() -> Iterator[ModuleType]:
    """Only modules whose text names SHIPPED are imported."""
    for path in sorted(KERNELS_FOLDER.rglob("*.py")):
        name = path.relative_to(KERNELS_FOLDER).with_suffix("").as_posix().replace("/", ".")
        if not name.startswith("jit.") and "\nSHIPPED" in path.read_text(encoding="utf-8"):
            yield importlib.import_module(f"kernels.{name}")
