"""The whole path of a request in one process: no Ray, no HTTP. What `generate` runs on.

The same intake, link and text as behind HTTP; only the port is local.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from configs.schema import AppArgs
from serve_app.client import EnginePort, LocalPort
from serve_app.engine_link import EngineLink
from serve_app.engine_links import EngineLinks
from serve_app.intake import Facts, Intake, ServingTokenizer
from serve_app.python_face import PythonFace

ATTACH_S = 30.0


@asynccontextmanager
async def local_face(
    args: AppArgs, service: Any, tokenizer: ServingTokenizer
) -> AsyncIterator[PythonFace]:
    """A PythonFace over a service in this process; the link ends with the block, the service stays.

    Raises RuntimeError where the service does not answer.
    """

    async def port() -> EnginePort:
        return LocalPort(service)

    link = EngineLink(port)
    link.start()
    try:
        if not await link.wait_ready(ATTACH_S):
            raise RuntimeError("the engine does not answer")
        yield PythonFace(Intake(EngineLinks(link), tokenizer, Facts(), args.http))
    finally:
        await link.stop()


async def generate_locally(
    args: AppArgs, body: Mapping[str, Any], write: Callable[[str], None]
) -> None:
    """Load the model, stream one answer into `write`, close. Raises ApiError, CheckpointError."""
    from engine_actor.build import build_service
    from engine_actor.load.progress import ConsoleProgress
    from engine_actor.load.tokenizer import Tokenizer
    from serve_app.preflight import verify

    verified = verify(args, ConsoleProgress("model"))
    service = build_service(args.model_dump(mode="json"), name="local")
    try:
        tokenizer = Tokenizer.from_folder(verified.folder)
        async with local_face(args, service, tokenizer) as face:
            async for chunk in face.stream(body):
                for choice in chunk["choices"]:
                    write(choice.get("text") or choice.get("delta", {}).get("content") or "")
    finally:
        service.close()
