"""Write the commented sample configuration from the schema, so that the two cannot drift.

`python -m configs.sample > configs/sample.yaml`. Reads no configuration itself.
"""

from __future__ import annotations

import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.schema import AppArgs

HEAD = """\
# Every setting with its default: the `args:` of serve_config.yaml, and what --config reads.
# Made from configs/schema.py by `python -m configs.sample`; do not edit by hand.
"""
_BOUNDS = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}


def render() -> str:
    """The sample as YAML text; loading it gives AppArgs()."""
    return HEAD + "\n".join(_section(AppArgs, AppArgs(), indent=0)) + "\n"


def _section(model: type[BaseModel], value: BaseModel, indent: int) -> list[str]:
    lines: list[str] = []
    pad = "  " * indent
    for name, field in model.model_fields.items():
        current = getattr(value, name)
        if isinstance(current, BaseModel):
            summary = (type(current).__doc__ or "").strip().splitlines()[0]
            lines += ["", f"{pad}# {summary}", f"{pad}{name}:"]
            lines += _section(type(current), current, indent + 1)
        else:
            lines.append(f"{pad}{name}: {_scalar(current)}{_comment(field)}")
    return lines


def _scalar(value: Any) -> str:
    """A YAML flow value; JSON is YAML."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _comment(field: FieldInfo) -> str:
    parts = [
        part for part in (field.description, _range(field), _choices(field.annotation)) if part
    ]
    return f"  # {'; '.join(parts)}" if parts else ""


def _range(field: FieldInfo) -> str:
    bounds = (
        f"{sign} {getattr(mark, attribute):g}"
        for mark in field.metadata
        for kind, (attribute, sign) in _BOUNDS.items()
        if isinstance(mark, kind)
    )
    return ", ".join(bounds)


def _choices(annotation: Any) -> str:
    """ "one of a, b" for a Literal with more than one value, also inside a union."""
    if get_origin(annotation) is Literal and len(get_args(annotation)) > 1:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return "; ".join(filter(None, (_choices(part) for part in get_args(annotation))))
    return ""


if __name__ == "__main__":
    print(render(), end="")
