"""A checkpoint's own chat template: messages to prompt text, in Jinja's immutable sandbox.

Knows no tokens. A template comes with the weights, so it is code of strangers: it can neither reach
attributes of Python objects nor change what it is given. Settings, globals and filters are those
that Hugging Face's templates are written for (`apply_chat_template`), so the text is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_actor.errors import CheckpointError, EngineError


class ChatTemplateError(EngineError):
    """The messages cannot be rendered; the text is the template's own or says what is missing."""

    code = "invalid_value"


class ChatTemplate:
    """One compiled template. Raises CheckpointError where its syntax is broken."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            message = " ".join(str(error.message).split())
            raise CheckpointError(f"chat_template: line {error.lineno}: {message}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Prompt text. `variables` are extra names the template may read (enable_thinking, tools).
        Raises ChatTemplateError whatever goes wrong inside the template.
        """
        names = {**self._special_tokens, "tools": None, "documents": None, **variables}
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **names,
            )
            text.encode()  # an escape in the template may be half a character
            return text
        except jinja2.TemplateError as error:
            raise ChatTemplateError(_reason(error)) from None
        except Exception as error:  # a template is a program: any error of its own lands here
            raise ChatTemplateError(_reason(error)) from error


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks training spans; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:400] or type(error).__name__
