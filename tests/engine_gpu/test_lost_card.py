"""A card that is lost: every waiter is answered before the process may end. Each in a process of
its own, in which nothing of CUDA works afterwards. Bug case B-22, row S-42.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

LOSE = """
import asyncio, faulthandler, os, sys, torch
from pathlib import Path
from engine_actor.errors import EngineRestarted, FatalDeviceError
from engine_actor.load.tiny import write_tiny
from engine_actor.messages import Flag
from engine_actor.work.memory_errors import is_fatal
from tests.engine.driver import CLIENT, Driver
from tests.engine.real_engine import load

faulthandler.enable()
half = {"packed": True, "dtype": "float16", "head_dim": 64, "hidden_size": 128}
shape = half if sys.argv[3] == "half" else {}
model = load(write_tiny(Path(sys.argv[1]), "llama", seed=5, **shape), "fast", "cuda")
if shape:
    model.runner.prepare_decode(16, 256, graphs=True)
engine = model.engine(depth=int(sys.argv[2]))

def lose_the_card():
    embed, decode = model.runner.embed, model.runner.decode_logits
    def out_of_bounds():
        torch.zeros(4, device="cuda").index_select(0, torch.tensor([10**6], device="cuda"))
    def embed_lost(inputs):
        out_of_bounds()
        return embed(inputs)
    def decode_lost(inputs):
        out_of_bounds()
        return decode(inputs)
    model.runner.embed, model.runner.decode_logits = embed_lost, decode_lost
"""

STEPPED = (
    LOSE
    + """
driver = Driver(engine)
for rid in range(3):
    sampling = {"temperature": 0.8, "top_k": 5, "logprobs": 2} if rid == 1 else {}
    driver.submit(rid, range(3, 20 + rid), 40, ignore_eos=True, **sampling)
for _ in range(4):
    driver.step()
lose_the_card()
try:
    for _ in range(4):
        driver.step()
except FatalDeviceError as error:
    print("fatal:", error)
else:
    raise SystemExit("the engine never noticed")
ends = engine.abort_all("engine_restarted").by_client[CLIENT]
assert sorted(end.rid for end in ends) == [0, 1, 2], ends
assert all((end.flag, end.extra.error_code) == (Flag.ERROR, "engine_restarted") for end in ends)
try:
    torch.ones(2, device="cuda").sum().item()
except RuntimeError as error:
    assert is_fatal(error), error
else:
    raise SystemExit("the card works")
print("all answered")
sys.stdout.flush()
os._exit(0)
"""
)

SERVED = (
    LOSE
    + """
from engine_actor.messages import PROTOCOL_VERSION, Submit, encode_messages
from engine_actor.core.params import SamplingParams
from engine_actor.service import EngineService
from engine_actor.watchdog import Watchdog, leave_process

service = EngineService(engine)
Watchdog(service.heartbeat, 60.0, leave=leave_process).start()

async def scene():
    attached = await service.attach("c", PROTOCOL_VERSION)
    sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    prompts = [Submit(rid, tuple(range(3, 20 + rid)), sampling) for rid in range(3)]
    await service.post("c", 0, encode_messages(prompts))
    heard = []
    try:
        async for batch in service.events("c", attached["epoch"], 0):
            heard.append(batch)
            if len(heard) == 3:
                lose_the_card()
    except EngineRestarted as error:
        print("told:", error, flush=True)
    ends = str(heard).count("engine_restarted")
    print("ends:", ends, flush=True)
    await asyncio.sleep(60)

asyncio.run(scene())
"""
)


def child(code: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("kind", ["half", "float"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_lost_card_is_fatal_and_every_waiter_is_answered(
    tmp_path: Path, depth: int, kind: str
) -> None:
    done = child(STEPPED, tmp_path, str(depth), kind)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fatal: " in done.stdout
    assert done.stdout.strip().endswith("all answered")


@pytest.mark.parametrize("kind", ["half", "float"])
def test_a_served_engine_tells_its_clients_and_then_leaves(tmp_path: Path, kind: str) -> None:
    """With the watchdog's exit code, so no destructor has ended the process before."""
    done = child(SERVED, tmp_path, "1", kind)
    assert done.returncode == 70, done.stdout + done.stderr
    assert "told: the engine is lost" in done.stdout
    assert "ends: 3" in done.stdout
    assert "engine watchdog: fatal error: FatalDeviceError" in done.stderr
