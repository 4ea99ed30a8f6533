"""Parameters that we know and do not honour: each with the values that change nothing.

Anything else than a neutral value is a 400 that names the parameter (or a warning, by config):
silent ignoring is a bug. Names nobody knows are ignored, and said so in a response header.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from serve_app.protocol.errors import ApiError
from serve_app.protocol.fields import StreamOptions

_SHARED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "early_stopping": (None, False),
    "grammar": (None, ""),
    "guided_choice": (None, []),
    "guided_decoding_backend": (None,),
    "guided_grammar": (None, ""),
    "guided_json": (None, {}),
    "guided_regex": (None, ""),
    "json_schema": (None, {}),
    "kv_transfer_params": (None, {}),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None, []),
    "lora": (None, []),
    "mirostat": (None, 0),
    "prompt_logprobs": (None,),
    "dry_multiplier": (None, 0, 0.0),
    "regex": (None, ""),
    "repetition_detection": (None,),
    "response_format": (None, {"type": "text"}),
    "return_progress": (None, False),
    "return_token_ids": (None, False),
    "return_tokens": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "stop_regex": (None, "", []),
    "stream_interval": (None, 1),
    "structured_outputs": (None, {}),
    "tfs_z": (None, 1, 1.0),
    "truncate_prompt_tokens": (None,),
    "typical_p": (None, 1, 1.0),
    "use_beam_search": (None, False),
    "xtc_probability": (None, 0, 0.0),
}

COMPLETIONS: dict[str, tuple[Any, ...]] = {
    **_SHARED,
    "add_special_tokens": (None, True),
    "suffix": (None, ""),
    "top_logprobs": (None,),
}

CHAT: dict[str, tuple[Any, ...]] = {
    **_SHARED,
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None, False),
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}

TOKENIZE: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "return_token_strs": (None, False),
    "tools": (None, []),
    "with_pieces": (None, False),
}

DETOKENIZE: dict[str, tuple[Any, ...]] = {"skip_special_tokens": (None, False)}

HARMLESS = frozenset({"metadata", "prompt_cache_key", "safety_identifier"})
"""Labels and hints that ask for nothing a client could miss."""

MAX_WARNED = 8


def refuse_unsupported(
    body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], refuse: bool
) -> list[str]:
    """Names of known parameters in use that we do not honour. Raises ApiError where `refuse`."""
    used = [name for name in body if name in table and not _neutral(body[name], table[name])]
    if used and refuse:
        raise ApiError(
            "unsupported_parameter", f"{used[0]} is not supported by this server", used[0]
        )
    return used


def unknown_parameters(
    body: Mapping[str, Any], fields: Iterable[str], table: Mapping[str, tuple[Any, ...]]
) -> list[str]:
    """Names in the body that nobody here has heard of; those in `stream_options` by their path."""
    known = set(fields) | set(table) | HARMLESS
    options = body.get("stream_options")
    inner = [
        f"stream_options.{name}"
        for name in (options if isinstance(options, dict) else ())
        if "stream_options" in known and name not in StreamOptions.model_fields
    ]
    return [name for name in body if name not in known] + inner


def warning_header(unsupported: list[str], unknown: list[str]) -> str | None:
    """The `x-warnings` header, or None. A name that cannot stand in a header is only counted."""
    parts = []
    for label, names in (("unsupported", unsupported), ("unknown", unknown)):
        if names:
            plain = [name for name in names if _plain(name)]
            shown = [name for name in plain if len(name) <= 64][:MAX_WARNED]
            more = len(names) - len(shown)
            listed = ", ".join(shown + ([f"{more} more"] if more else []))
            parts.append(f"ignored {label} parameters: {listed}")
    return "; ".join(parts) or None


def _plain(name: str) -> bool:
    return name.isascii() and all(part.isidentifier() for part in name.split("."))


def _neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """True where `value` equals a neutral one; True and 1 are told apart."""
    numbers = (int, float)
    return any(
        value == item
        and (type(value) is type(item) or (type(value) in numbers and type(item) in numbers))
        for item in neutral
    )
