"""From what a user writes in `model.path` to a folder on disk: the demo, a folder, or a Hub id.

Downloads weights only as safetensors or GGUF; a pickle is never fetched and never opened. Knows
nothing of what is in the folder (checkpoint.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from engine_actor.load.demo import prepare_demo
from engine_actor.load.place import SUFFIX
from engine_actor.load.progress import Progress, silent
from engine_actor.load.refusal import refusal

DEMO = "demo"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILE = re.compile(HUB_ID.pattern + r"/[\w.-]+\.gguf")
"""org/name/file.gguf: one file of a repository that holds many of them."""
ALLOWED = ["*.safetensors", "*.json", "*.jinja"]
"""What a checkpoint needs. No *.bin, *.pt, *.py: those could run code."""
IGNORED = ["*/*", "consolidated*.safetensors"]
"""Sub-folders and second copies of the weights in another layout."""


def resolve(
    path: str,
    cache_dir: Path,
    revision: str | None = None,
    progress: Progress = silent,
) -> Path:
    """The checkpoint folder, or GGUF file, that `path` means.

    A folder that exists wins over a Hub id of the same spelling. Raises CheckpointError, one line.
    """
    if path == DEMO:
        return prepare_demo(cache_dir, progress)
    here = on_disk(path) if path else None
    if here is not None:
        return here
    require_hub_name(path)
    return (_file_from_hub if HUB_FILE.fullmatch(path) else _from_hub)(path, revision)


def require_hub_name(path: str) -> None:
    """Raise CheckpointError, one line, for a name under which nothing can be fetched."""
    is_name = HUB_FILE.fullmatch(path) or HUB_ID.fullmatch(path)
    if not is_name or ".." in path or "--" in path:
        raise refusal(path, f"no such folder, and neither {DEMO!r} nor a Hub id (org/name)")


def on_disk(path: str) -> Path | None:
    """The folder or GGUF file of that name, None where there is nothing. Raises CheckpointError."""
    try:
        folder = Path(path).expanduser()
        if folder.is_dir() or (folder.exists() and folder.suffix == SUFFIX):
            return folder
        there = folder.exists()
    except (OSError, RuntimeError) as error:  # no permission, too long, `~nobody`
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise refusal(path, f"cannot be looked up ({reason})") from None
    if there:
        raise refusal(path, "is a file; give the folder of a checkpoint, or a .gguf file")
    return None


def _from_hub(repo_id: str, revision: str | None) -> Path:
    """A snapshot in Hugging Face's own cache, so that what other programs fetched is found."""
    from huggingface_hub import snapshot_download

    return _fetched(
        repo_id,
        lambda: snapshot_download(
            repo_id, revision=revision, allow_patterns=ALLOWED, ignore_patterns=IGNORED
        ),
    )


def _file_from_hub(path: str, revision: str | None) -> Path:
    """One GGUF file in the same cache."""
    from huggingface_hub import hf_hub_download

    repo_id, _, file = path.rpartition("/")
    return _fetched(path, lambda: hf_hub_download(repo_id, file, revision=revision))


def _fetched(name: str, fetch: Callable[[], str]) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = fetch()
    except LocalEntryNotFoundError:
        raise refusal(
            name,
            "no such folder here, the Hub cannot be reached and its cache does not have the model",
        ) from None
    except HFValidationError as error:
        raise refusal(name, f"not a Hub id ({error})") from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise refusal(name, f"the Hub refuses it ({reason[0]})") from None
    return Path(found)
