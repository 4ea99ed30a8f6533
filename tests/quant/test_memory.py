"""A conversion holds one layer, however many there are."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine_actor.load.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "dtype": "bfloat16",
}
LAYER_BYTES = 4 * (512 * 768 + 512 * 512 + 3 * 512 * 2048)
SCRIPT = """
import sys
import threading
from pathlib import Path
import torch
torch.set_num_threads(1)
from engine_actor.load.checkpoint import open_checkpoint
from engine_actor.load.progress import silent
from engine_actor.quant.convert import Job, convert
from engine_actor.quant.recipe import fixed_recipe
from tests.quant.conftest import token_rows
rows = token_rows(4, 64, 1), token_rows(2, 64, 2)
source = open_checkpoint(Path(sys.argv[1]))
job = Job(source, "x", fixed_recipe("w3", 64), *rows, torch.device("cpu"))
# What is ours alone: VmHWM and getrusage count pages of the source file too, which the kernel
# keeps or drops as it likes.
own, done = [0], threading.Event()
def watch():
    while not done.wait(0.002):
        status = Path("/proc/self/status").read_text().splitlines()
        own.append(next(int(line.split()[1]) * 1024 for line in status if "RssAnon" in line))
watching = threading.Thread(target=watch)
watching.start()
convert(job, Path(sys.argv[2]), silent)
done.set()
watching.join()
print(max(own))
"""


def _peak(folder: Path, layers: int) -> int:
    write_tiny(folder / "source", num_hidden_layers=layers, **WIDTHS)
    arguments = [sys.executable, "-c", SCRIPT, folder / "source", folder / "out"]
    # Freed memory goes back at once, so that what is counted is what is held.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.mark.slow
def test_the_peak_does_not_grow_with_depth(tmp_path):
    """Two layers more are 30 MB of fp32, or 15 as they are stored: neither may show. The packed
    ones (3 MB) pass through memory once, as one shard.
    """
    with ThreadPoolExecutor(2) as both:
        few, many = both.map(lambda layers: _peak(tmp_path / str(layers), layers), (2, 4))
    assert many - few < 0.7 * LAYER_BYTES
