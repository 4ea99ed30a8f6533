"""The Serve deployment around the HTTP API: one replica = one app, one tokenizer, all engines.

Holds no logic of requests: HTTP is `ingress.build_api`, Python handles go through `PythonFace`.
Loads no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve

from configs import load
from configs.schema import AppArgs
from engine_actor.messages import Limit
from serve_app.client import EnginePort
from serve_app.directory import EngineDirectory, engine_names
from serve_app.engine_link import EngineLink
from serve_app.engine_links import EngineLinks
from serve_app.ingress import build_api
from serve_app.intake import Facts, Intake
from serve_app.limits import limit_of
from serve_app.protocol.errors import ApiError
from serve_app.python_face import PythonFace

log = logging.getLogger("ray.serve")

FIRST_ATTACH_S = 30.0
HEADROOM = 128
"""Serve's own limit stays this much above ours, so that a client sees our JSON, not its text."""


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What the builder tells each replica. `folder`: where the checkpoint was when checked."""

    args: dict[str, Any]
    folder: str
    engines: tuple[str, ...] = engine_names(1)
    created: int = field(default_factory=lambda: int(time.time()))
    meta: dict[str, Any] = field(default_factory=dict)


def max_live_sequences(args: AppArgs) -> int:
    """Most sequences an ingress lets live at once: what its engine can run and queue."""
    return args.engine.max_num_seqs + args.engine.max_queue


# Not in .options() of ray 2.60: with less than 1.0 two replicas and one GPU block each other on a
# redeploy, the old replica keeping the old engine and with it the GPU that the new one needs.
@serve.deployment(name="Ingress", rolling_update_percentage=1.0)
@serve.ingress()
class Ingress:
    """HTTP through Serve's proxy, and from Python: `serve.get_app_handle("default").generate`."""

    def __init__(self, settings: IngressSettings) -> None:
        self._settings = settings
        self._args = AppArgs.model_validate(settings.args)
        self._limit: Limit | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: EngineLinks | None = None
        self._face: PythonFace | None = None

    async def __serve_build_asgi_app__(self) -> FastAPI:
        from engine_actor.load.source import resolve
        from engine_actor.load.tokenizer import Tokenizer

        directory = EngineDirectory(self._settings.engines)
        engine = directory.name_for(serve.get_replica_context().rank.rank)
        folder, model = Path(self._settings.folder), self._args.model
        if not folder.exists():  # another node than the one that checked it
            folder = await asyncio.to_thread(resolve, model.path, load.cache_dir(), model.revision)
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, folder)
        links = self._links = EngineLinks(
            self._new_link(directory, engine),
            [self._new_link(directory, name) for name in directory.names if name != engine],
        )
        links.start()
        if not await links.home.wait_ready(FIRST_ATTACH_S):
            log.warning("%s does not answer yet; serving 503 until it does", engine)
        facts = Facts(
            created=self._settings.created,
            max_sequences=max_live_sequences(self._args),
            meta=self._settings.meta,
        )
        # Serve puts x-request-id into every answer, and into a request that came without one.
        app = build_api(links, tokenizer, facts, self._args.http, adds_id=False)
        intake: Intake = app.state.intake
        self._face = PythonFace(intake)
        return app

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Live limits, changed without a restart: Serve calls it at the start and at each change of
        `user_config`. Kept, and sent again to an engine that was restarted. Limits that are none
        change nothing: where this raised, Serve would end all replicas and with them all streams.
        """
        try:
            self._limit = limit_of(user_config)
        except ValueError as error:
            log.error("user_config is refused, the limits stay as they are: %s", error)
            return
        for link in self._links.all if self._links is not None else ():
            self._later(self._send_limit(link))

    async def generate(self, prompt: Any = None, **parameters: Any) -> dict[str, Any]:
        """A whole answer, the very body HTTP gives. Raises ApiError."""
        return await self._python.generate(prompt, **parameters)

    async def stream(self, prompt: Any = None, **parameters: Any) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer; call it with `handle.options(stream=True)`."""
        async for chunk in self._python.stream(prompt, **parameters):
            yield chunk

    async def evict(self, request_id: str, requeue: bool = False) -> None:
        """Free a request's memory: it ends `oom`, or runs again from its prompt if `requeue`.
        Raises ApiError where it does not run.
        """
        await self._up.evict(request_id, requeue)

    async def cancel(self, request_id: str) -> None:
        """End a request by its public id. Raises ApiError where it does not run."""
        await self._up.cancel(request_id)

    async def limit(self, **limits: Any) -> None:
        """Change live limits until the next reconfigure: kv_fraction, max_num_seqs,
        prefill_chunk_tokens. Raises ValueError for another name, or a value that is no limit.
        """
        self._limit = limit_of(limits)
        self._up.tell(self._limit)

    async def status(self) -> dict[str, Any]:
        """The engine's status(). Raises ApiError."""
        return await self._up.pick().status()

    async def drain(self) -> int:
        """Refuse new requests from now on; returns how many sequences are still served."""
        self._up.drain()
        return self._up.live

    def _new_link(self, directory: EngineDirectory, name: str) -> EngineLink:
        async def port() -> EnginePort:
            found = await directory.port(name)
            self._later(self._send_limit(link))
            return found

        link = EngineLink(port)
        return link

    async def _send_limit(self, link: EngineLink) -> None:
        limit = self._limit
        if limit is None or limit == Limit():
            return
        if await link.wait_ready(FIRST_ATTACH_S):
            link.tell(limit)

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def _up(self) -> EngineLinks:
        if self._links is None:
            raise ApiError("unavailable")
        return self._links

    @property
    def _python(self) -> PythonFace:
        if self._face is None:
            raise ApiError("unavailable")
        return self._face
