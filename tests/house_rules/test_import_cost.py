"""What a process really loads: the core only the standard library, the ingress no torch."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.house_rules.sources import ROOT

_LIST_NEW_MODULES = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
for name in {names!r}:
    module = importlib.import_module(name)
    for part in pkgutil.iter_modules(getattr(module, "__path__", ()), name + "."):
        importlib.import_module(part.name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def _modules_loaded_by(*names: str) -> set[str]:
    """Top-level names of the modules a fresh interpreter loads to import `names` whole."""
    script = _LIST_NEW_MODULES.format(names=names)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_the_core_loads_the_standard_library_only():
    loaded = _modules_loaded_by("engine_actor.core")
    foreign = loaded - set(sys.stdlib_module_names) - {"engine_actor"}
    assert foreign == set()


def test_messages_unpickle_without_torch():
    loaded = _modules_loaded_by("engine_actor.messages")
    assert loaded - set(sys.stdlib_module_names) == {"engine_actor"}


def test_the_ingress_loads_no_torch_cupy_or_transformers():
    loaded = _modules_loaded_by(
        "serve_app.ingress", "serve_app.chat", "engine_actor.load.tokenizer"
    )
    assert loaded & {"torch", "cupy", "transformers", "ray", "kernels"} == set()


def test_the_protocol_loads_neither_fastapi_nor_ray():
    loaded = _modules_loaded_by("serve_app.protocol")
    assert loaded & {"fastapi", "starlette", "ray", "torch"} == set()


def test_the_command_line_starts_light():
    """`--help` must not wait three seconds for torch and ray."""
    loaded = _modules_loaded_by("serve_app.cli")
    assert loaded & {"torch", "cupy", "transformers", "ray", "fastapi"} == set()


def test_what_the_scripts_import_needs_no_installation():
    """scripts/serve runs before .venv exists."""
    loaded = _modules_loaded_by("serve_app.launch", "configs.load", "configs.install_plan")
    assert loaded - set(sys.stdlib_module_names) == {"serve_app", "configs"}
