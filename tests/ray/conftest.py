"""One live server on a tiny random model for all tests that cut, kill and evict, and a driver
connected to its cluster. Started at first use, stopped at the end of the run.
"""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray.served import Served, wait_until

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 2.0
MAX_NUM_SEQS = 8
MAX_QUEUE = 64
SETTINGS = {
    "DEEPINFER_ENGINE__NUMERICS": "exact",  # the same text in any batch: neighbours can be compared
    "DEEPINFER_ENGINE__MAX_NUM_SEQS": str(MAX_NUM_SEQS),
    "DEEPINFER_ENGINE__MAX_QUEUE": str(MAX_QUEUE),
    "DEEPINFER_ENGINE__LEASE_S": str(LEASE_S),
    "DEEPINFER_ENGINE__PREFILL_CHUNK_TOKENS": "32",
    "DEEPINFER_ENGINE__KV__BUDGET_MB": "8",
    "DEEPINFER_ENGINE__CPU_THREADS": "1",
    # A driver at an explicit address would have to be in token mode before `import ray`.
    "RAY_AUTH_MODE": "disabled",
}


class Live:
    """The server, its app handle and its engine actor."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.port = served.port

    @property
    def handle(self) -> Any:
        from ray import serve

        return serve.get_app_handle("default")

    def actor(self, class_name: str, name_ends: str = "") -> Any:
        """The living actor of this class, as Ray's state API lists it."""
        from ray.util.state import list_actors

        found = [
            actor
            for actor in list_actors(self.served.address, filters=[("state", "=", "ALIVE")])
            if actor.class_name == class_name and actor.name.endswith(name_ends)
        ]
        return found[0] if found else None

    def engine(self) -> Any:
        """A handle to the engine actor."""
        import ray

        found = wait_until(lambda: self.actor("EngineActor"), 60, "an engine actor")
        return ray.get_actor(found.name, namespace="serve")

    def metric(self, name: str) -> float:
        """The sample of this name, without labels, in GET /metrics."""
        with urllib.request.urlopen(f"{self.served.url}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        return next(float(line.split(" ")[1]) for line in lines if line.startswith(f"{name} "))

    def status(self) -> dict[str, Any]:
        """The engine's status(), asked of the actor itself."""
        import ray

        return ray.get(self.engine().status.remote(), timeout=30)

    def wait_idle(self, seconds: float = 30.0) -> dict[str, Any]:
        """Wait until nothing runs or waits and every block is free; the status then."""
        import ray

        engine = self.engine()

        def idle() -> dict[str, Any] | None:
            status = ray.get(engine.status.remote(), timeout=30)
            queue, kv = status["queue"], status["kv"]
            is_idle = queue["running"] == queue["waiting"] == 0
            return status if is_idle and kv["blocks_free"] == kv["blocks_total"] else None

        return wait_until(idle, seconds, "an idle engine with every block free")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a context long enough that no stream ends by itself."""
    from engine_actor.load.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


@pytest.fixture(scope="session")
def live(tiny_folder: Path) -> Iterator[Live]:
    """The live server; the driver of this process is connected to its cluster."""
    import ray

    served = Served(ROOT, "--model", str(tiny_folder), **SETTINGS)
    print(f"\ntiny server ready after {served.start_s:.1f} s")
    try:
        ray.init(
            address=served.address,
            namespace="serve",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield Live(served)
    finally:
        ray.shutdown()
        served.stop()
