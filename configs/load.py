"""From files and the environment to AppArgs: the only reader of the environment.

Precedence: environment > serve_config.yaml > the schema's defaults. A setting is overridden by its
path with two underscores, its value as JSON or plain text: DEEPINFER_MODEL__PATH=/models/x,
DEEPINFER_ENGINE__KV__BUDGET_MB=512. The top of the module needs the standard library only, because
scripts/serve imports it before anything is installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

    from configs.schema import AppArgs

PREFIX = "DEEPINFER_"
SECTIONS = ("model", "engine", "http")
CACHE_DIR = PREFIX + "CACHE_DIR"
APP_NAME = "default"


class ConfigError(Exception):
    """The configuration cannot be used; the message is one line and names the key."""


SMALL_WORKSPACES = ":4096:2:16:8"
"""cuBLAS's own default on cards before Hopper: 2 buffers of 4,096 KiB and 8 of 16."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of this process's environment, `extra` on top: for child processes."""
    return {**os.environ, **(extra or {})}


def cache_dir(variables: Mapping[str, str] | None = None) -> Path:
    """Where prepared models and compiled kernels are kept: DEEPINFER_CACHE_DIR, else
    ~/.cache/deepinfer-sm86. Raises ConfigError where the user has no home (a container's bare uid).
    """
    chosen = (os.environ if variables is None else variables).get(CACHE_DIR, "")
    try:
        return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "deepinfer-sm86"
    except RuntimeError:
        raise ConfigError(f"there is no home folder here; set {CACHE_DIR} to a path") from None


def wanted_compiler(variables: Mapping[str, str] | None = None) -> str | None:
    """The C++ compiler that $CXX names, for the kernels that are built on this machine."""
    return (os.environ if variables is None else variables).get("CXX") or None


def choose_small_workspaces() -> None:
    """Let cuBLAS take 8 MiB a stream, where nobody has said otherwise: on a Hopper card it would be
    32. To be called before the first product on the device.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", SMALL_WORKSPACES)


def environment_overrides(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings named in the environment as a nested dict.

    Only names whose first part is a section of AppArgs count, so DEEPINFER_CACHE_DIR is none.
    """
    nested: dict[str, Any] = {}
    for name, text in sorted((os.environ if variables is None else variables).items()):
        section, *keys = name.removeprefix(PREFIX).lower().split("__")
        if not name.startswith(PREFIX) or section not in SECTIONS or not keys:
            continue
        place = nested.setdefault(section, {})
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = _value(text)
    return nested


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with every leaf of `over` put in; neither is changed."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def app_args(
    values: Mapping[str, Any] | AppArgs, variables: Mapping[str, str] | None = None
) -> AppArgs:
    """AppArgs of `values` under the environment's overrides. Raises ConfigError."""
    from pydantic import ValidationError

    from configs.schema import AppArgs

    given = values.model_dump() if isinstance(values, AppArgs) else dict(values)
    try:
        return AppArgs.model_validate(merged(given, environment_overrides(variables)))
    except ValidationError as error:
        raise ConfigError(one_line(error)) from None


def read_serve_config(path: Path) -> dict[str, Any]:
    """A Serve configuration file as a dict. Raises ConfigError."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict) or not document.get("applications"):
        raise ConfigError(f"{path}: not a Serve configuration (no `applications`)")
    return document


def application(document: Mapping[str, Any]) -> dict[str, Any]:
    """Our application in a Serve configuration. Raises ConfigError."""
    for candidate in document["applications"]:
        if candidate.get("name", APP_NAME) == APP_NAME:
            return dict(candidate)
    raise ConfigError(f"no application is named {APP_NAME!r}")


def one_line(error: ValidationError) -> str:
    """What is wrong and where, e.g. `engine.max_num_seqs: must be at least 1 (got 0)`."""
    parts = []
    for problem in error.errors(include_url=False):
        place = ".".join(str(part) for part in problem["loc"]) or "args"
        parts.append(f"{place}: {problem['msg']} (got {problem['input']!r})")
    return "; ".join(parts)


def _value(text: str) -> Any:
    """JSON where it is JSON (numbers, true, lists), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
