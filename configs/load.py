"""From files and the environment to AppArgs: the only reader of the environment.

Precedence: environment > serve_config.yaml > the schema's defaults. A setting is overridden by its
path with two underscores, its value as JSON or plain text: DEEPINFER_MODEL__PATH=/models/x,
DEEPINFER_ENGINE__KV__BUDGET_MB=512. The top of the module needs the standard library only, because
scripts/serve imports it before anything is installed.
"""

from __future__ import annotations

import json
import os
import reprlib
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
    ~/.cache/deepinfer-sm86. Raises ConfigError where the user has no home (a container's bare uid),
    or the name can be no folder's.
    """
    chosen = (os.environ if variables is None else variables).get(CACHE_DIR, "")
    try:
        folder = Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "deepinfer-sm86"
    except RuntimeError:
        raise ConfigError(f"there is no home folder here; set {CACHE_DIR} to a path") from None
    try:
        is_taken = folder.exists() and not folder.is_dir()
    except OSError as error:  # too long, or no way through to it
        raise ConfigError(f"{CACHE_DIR}: {error.strerror}: {str(folder)[:200]}") from None
    if is_taken:
        raise ConfigError(f"{CACHE_DIR}: {folder} is no folder")
    return folder


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

    Raises ConfigError for a name that is no path into AppArgs, DEEPINFER_CACHE_DIR apart, and where
    one name sets a part of what another sets to a plain value.
    """
    nested: dict[str, Any] = {}
    for name, text in sorted((os.environ if variables is None else variables).items()):
        if not name.startswith(PREFIX) or name == CACHE_DIR:
            continue
        section, *keys = name.removeprefix(PREFIX).lower().split("__")
        if section not in SECTIONS or not keys:
            example = f"{PREFIX}ENGINE__MAX_NUM_SEQS"
            raise ConfigError(f"{name}: is no setting; they are named by path, as {example}")
        place = nested
        for key in (section, *keys[:-1]):
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{name}: {key} is set to {place!r}, which has no parts")
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
    """AppArgs of `values` under the environment's overrides. Raises ConfigError, also where
    `values` are none by name.
    """
    from pydantic import ValidationError

    from configs.schema import AppArgs

    given = values.model_dump() if isinstance(values, AppArgs) else values
    if not isinstance(given, Mapping):
        raise ConfigError(f"args: must hold settings by name (got {given!r})")
    try:
        return AppArgs.model_validate(merged(given, environment_overrides(variables)))
    except ValidationError as error:
        raise ConfigError(one_line(error)) from None


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. Raises ConfigError, one line, whatever is wrong with it."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or str(error)
    except UnicodeDecodeError:
        why = "is not UTF-8 text"
    except RecursionError:
        why = "is nested too deeply"
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that there never was
        why = " ".join(str(error).split())
    raise ConfigError(f"{path}: {why}")


def read_serve_config(path: Path) -> dict[str, Any]:
    """A Serve configuration file as a dict. Raises ConfigError."""
    document = read_yaml(path)
    if not isinstance(document, dict) or not document.get("applications"):
        raise ConfigError(f"{path}: not a Serve configuration (no `applications`)")
    return document


def application(document: Mapping[str, Any]) -> dict[str, Any]:
    """Our application in a Serve configuration. Raises ConfigError."""
    listed = document["applications"]
    for candidate in listed if isinstance(listed, list) else ():
        if isinstance(candidate, dict) and candidate.get("name", APP_NAME) == APP_NAME:
            return dict(candidate)
    raise ConfigError(f"no application is named {APP_NAME!r}")


_shown = reprlib.Repr()
"""A value as it stands in a message: a YAML alias can stand for millions."""
_shown.maxstring = _shown.maxother = 200
_shown.maxlevel = 2


def one_line(error: ValidationError) -> str:
    """What is wrong and where, e.g. `engine.max_num_seqs: must be at least 1 (got 0)`."""
    parts = []
    for problem in error.errors(include_url=False):
        place = ".".join(str(part) for part in problem["loc"]) or "args"
        parts.append(f"{place}: {problem['msg']} (got {_shown.repr(problem['input'])})")
    return "; ".join(parts)


def _value(text: str) -> Any:
    """JSON where it is JSON (numbers, true, lists), else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
