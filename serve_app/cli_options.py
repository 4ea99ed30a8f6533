"""Flags of the command line -> AppArgs. Flags win over the environment, that over the file.

Knows no command; imports nothing heavy.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

from configs.load import (
    ConfigError,
    app_args,
    application,
    environment_overrides,
    merged,
    read_yaml,
)
from configs.schema import AppArgs

# flag, place in the configuration, and how the flag is read
_VALUES: tuple[tuple[str, tuple[str, ...], type, str], ...] = (
    ("--model", ("model", "path"), str, "demo, a checkpoint folder, a .gguf file, or a Hub id"),
    ("--revision", ("model", "revision"), str, "Hub revision"),
    ("--served-name", ("model", "served_name"), str, "name in /v1/models"),
    ("--max-model-len", ("model", "max_model_len"), int, "context limit, tokens"),
    ("--device", ("engine", "device"), str, "auto, cpu or cuda"),
    ("--numerics", ("engine", "numerics"), str, "fast or exact"),
    ("--cpu-threads", ("engine", "cpu_threads"), int, "torch threads"),
    ("--max-num-seqs", ("engine", "max_num_seqs"), int, "most sequences running at once"),
    ("--max-queue", ("engine", "max_queue"), int, "most sequences waiting"),
    ("--prefill-chunk-tokens", ("engine", "prefill_chunk_tokens"), int, "prompt tokens a step"),
    (
        "--prefill-slice-tokens",
        ("engine", "prefill_slice_tokens"),
        int,
        "a longer chunk runs in ranges of layers while a stream decodes",
    ),
    ("--overlap-mode", ("engine", "overlap_mode"), str, "how decode and prefill share a GPU"),
    (
        "--overlap-max-ctas",
        ("engine", "overlap_max_ctas"),
        int,
        "multiprocessors of a prefill beside a decode",
    ),
    ("--max-partial-prefills", ("engine", "max_partial_prefills"), int, "prompts in prefill"),
    ("--reserve-memory-mb", ("engine", "reserve_memory_mb"), int, "device memory left alone, MiB"),
    ("--memory-limit-mb", ("engine", "memory_limit_mb"), int, "hard cap on GPU memory, MiB"),
    ("--kv-budget-mb", ("engine", "kv", "budget_mb"), int, "most memory of the KV pool, MiB"),
)
_SWITCHES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "--no-prefill-decode-overlap",
        ("engine", "enable_prefill_decode_overlap"),
        "run decode and prefill of a step one after the other",
    ),
    (
        "--no-async-steps",
        ("engine", "async_steps"),
        "wait for each step before the next one is launched",
    ),
    ("--no-prefix-cache", ("engine", "kv", "prefix_cache"), "share no blocks of equal prefixes"),
)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Every flag that ends in AppArgs."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", type=Path, help="YAML: settings, or a whole serve_config.yaml")
    source.add_argument(
        "--preset", choices=preset_names(), help="settings that come with the package"
    )
    for flag, place, kind, text in _VALUES:
        parser.add_argument(flag, dest="/".join(place), type=kind, metavar=kind.__name__, help=text)
    for flag, place, text in _SWITCHES:
        parser.add_argument(
            flag, dest="/".join(place), action="store_const", const=False, help=text
        )


def preset_names() -> list[str]:
    """The presets of the installed package."""
    folder = files("configs") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir())


def args_of(options: argparse.Namespace) -> AppArgs:
    """The configuration that the flags, the environment and the file make. Raises ConfigError."""
    values = merged(_file_values(options), environment_overrides())
    # The environment is in already; given again it would win over the flags.
    return app_args(merged(values, _flag_values(options)), variables={})


def _flag_values(options: argparse.Namespace) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    places = [place for _, place, _, _ in _VALUES] + [place for _, place, _ in _SWITCHES]
    for place in places:
        value = getattr(options, "/".join(place))
        if value is None:
            continue
        target = nested
        for key in place[:-1]:
            target = target.setdefault(key, {})
        target[place[-1]] = value
    return nested


def _file_values(options: argparse.Namespace) -> dict[str, Any]:
    """Settings of --config or --preset, {} without either."""
    import yaml

    if options.preset:
        text = (files("configs") / "presets" / f"{options.preset}.yaml").read_text("utf-8")
        return _settings(options.preset, yaml.safe_load(text))
    return _settings(str(options.config), read_yaml(options.config)) if options.config else {}


def _settings(name: str, document: Any) -> dict[str, Any]:
    if isinstance(document, dict) and "applications" in document:
        document = application(document).get("args")
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{name}: must hold settings by name")
    return document


def require_range(least: int, most: int | None, **values: int | None) -> None:
    """Raise ConfigError naming the first flag whose value is out of range; None was not given."""
    for name, value in values.items():
        if value is None:
            continue
        flag = f"--{name.replace('_', '-')} {value}"
        if value < least:
            raise ConfigError(f"{flag}: must be at least {least}")
        if most is not None and value > most:
            raise ConfigError(f"{flag}: must be at most {most}")
