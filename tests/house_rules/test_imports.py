"""Who may import what. import-linter holds the layers (.importlinter), this the single doors."""

from __future__ import annotations

import ast

import pytest

from tests.house_rules.sources import (
    attribute_uses,
    imported_modules,
    product_files,
    relative,
    tree_of,
)

ALLOWED = {
    "ray": {
        "engine_actor/actor.py",
        "engine_actor/ray_metrics.py",
        "serve_app/app.py",
        "serve_app/cli.py",
        "serve_app/directory.py",
        "serve_app/drain.py",
        "serve_app/ingress_deployment.py",
        "serve_app/ray_port.py",
    },
    "cupy": "kernels/jit/",
    "transformers": set(),
    "torch.cuda": {
        "engine_actor/work/pair.py",
        "engine_actor/work/streams.py",
        "engine_actor/work/timing.py",
        "engine_actor/work/isolate.py",
        "engine_actor/model/memory.py",
        "engine_actor/model/graph_capture.py",
        "kernels/spec/device.py",
        "kernels/jit/cupy_memory.py",
        "kernels/jit/launch.py",
        "kernels/jit/timing.py",
    },
    "os.environ": {"configs/load.py"},
}
ENVIRONMENT = frozenset({"environ", "getenv", "putenv", "environb"})
TORCH_FREE = ("serve_app/", "configs/", "engine_actor/core/", "engine_actor/messages.py")
KERNELS_DOORS = {"engine_actor/ops.py", "engine_actor/_mount.py"}


def _may(path: str, rule: str) -> bool:
    allowed = ALLOWED[rule]
    return path.startswith(allowed) if isinstance(allowed, str) else path in allowed


def _under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _uses(path, rule: str) -> list[int]:
    if rule == "os.environ":
        found = list(attribute_uses(path, "os", ENVIRONMENT))
        found += [
            hit for hit in imported_modules(path) if hit[0] in {f"os.{n}" for n in ENVIRONMENT}
        ]
    else:
        found = [hit for hit in imported_modules(path) if _under(hit[0], rule)]
        if rule == "torch.cuda":
            found += list(attribute_uses(path, "torch", frozenset({"cuda"})))
    return [line for _, line in found]


@pytest.mark.parametrize("rule", sorted(ALLOWED))
def test_only_the_named_files_may_use(rule):
    broken = {
        f"{relative(path)}:{line}"
        for path in product_files()
        if not _may(relative(path), rule)
        for line in _uses(path, rule)
    }
    assert broken == set()


def test_page_locked_memory_comes_from_one_place():
    """Where torch frees it after a lost device, C++ ends the process (docs/adr/0014)."""
    found = {
        f"{relative(path)}:{node.lineno if isinstance(node, ast.Attribute) else node.value.lineno}"
        for path in product_files()
        if relative(path) != "kernels/spec/page_locked.py"
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and node.attr == "pin_memory")
        or (isinstance(node, ast.keyword) and node.arg == "pin_memory")
    }
    assert found == set()


def test_the_ingress_and_the_core_import_no_torch():
    tokenizer = "engine_actor/load/tokenizer.py"
    broken = {
        f"{relative(path)}:{line}"
        for path in product_files()
        if relative(path).startswith(TORCH_FREE) or relative(path) == tokenizer
        for name, line in imported_modules(path)
        if _under(name, "torch") or _under(name, "cupy")
    }
    assert broken == set()


def test_the_engine_reaches_kernels_by_ops_only():
    """The door must open before the first import of kernels.* (docs/adr/0001)."""
    broken = {
        f"{relative(path)}:{line}"
        for path in product_files()
        if not relative(path).startswith("kernels/") and relative(path) not in KERNELS_DOORS
        for name, line in imported_modules(path)
        if _under(name, "kernels") and not _under(name, "kernels.pack")
    }
    assert broken == set()


def test_kernel_families_do_not_import_each_other():
    families = ("linear", "attention", "kv", "elementwise", "sampling")
    broken = set()
    for path in product_files():
        parts = relative(path).split("/")
        if parts[0] != "kernels" or parts[1] not in families:
            continue
        for name, line in imported_modules(path):
            other = name.split(".")
            if other[0] == "kernels" and len(other) > 1 and other[1] in set(families) - {parts[1]}:
                broken.add(f"{relative(path)}:{line}")
    assert broken == set()


def test_no_exception_is_swallowed_in_silence():
    """`except Exception: pass` hides the one error that would have told us."""
    broken = set()
    for path in product_files():
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            wide = node.type is None or getattr(node.type, "id", "") in {
                "Exception",
                "BaseException",
            }
            if wide and all(isinstance(statement, ast.Pass) for statement in node.body):
                broken.add(f"{relative(path)}:{node.lineno}")
    assert broken == set()
