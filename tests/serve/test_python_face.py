"""The Python door: the bodies of HTTP, without HTTP. What `handle.generate.remote` gives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve_app.protocol.errors import ApiError
from serve_app.python_face import PythonFace
from tests.serve.conftest import Api, ApiMaker
from tests.serve.doubles import PieceTokenizer
from tests.serve.wire import chunks

pytestmark = pytest.mark.anyio

TOKENIZER = PieceTokenizer("hel", "lo")


async def face_of(make_api: ApiMaker, **more: Any) -> tuple[Api, PythonFace]:
    api: Api = await make_api(
        TOKENIZER, lambda s: [*TOKENIZER.ids("hel", "lo"), TOKENIZER.eos], **more
    )
    return api, PythonFace(api.app.state.intake)


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("id", "created")}


@pytest.mark.parametrize(
    "parameters",
    [
        {"prompt": "a", "max_tokens": 5, "logprobs": 1},
        {"prompt": ["a", "b"], "n": 2, "echo": True},
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True},
    ],
)
async def test_the_same_bodies_as_over_http(make_api: ApiMaker, parameters: dict[str, Any]) -> None:
    api, face = await face_of(make_api)
    path = "/v1/chat/completions" if "messages" in parameters else "/v1/completions"
    over_http = (await api.client.post(path, json=parameters)).json()
    assert without_ids(await face.generate(parameters)) == without_ids(over_http)
    assert without_ids(await face.generate(**parameters)) == without_ids(over_http)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = chunks((await api.client.post(path, json={**parameters, **options})).text)
    direct = [chunk async for chunk in face.stream(**parameters, **options)]

    def order(chunk: dict[str, Any]) -> int:
        return chunk["choices"][0]["index"] if chunk["choices"] else 99

    assert sorted(map(without_ids, direct), key=order) == sorted(
        map(without_ids, streamed), key=order
    )


async def test_a_plain_prompt_and_keywords(make_api: ApiMaker) -> None:
    _, face = await face_of(make_api)
    assert (await face.generate("a", max_tokens=1))["choices"][0]["text"] == "hel"


async def test_errors_are_raised_by_name(make_api: ApiMaker) -> None:
    _, face = await face_of(make_api)
    for parameters, param in (
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({}, "prompt"),
    ):
        with pytest.raises(ApiError) as caught:
            await face.generate(**parameters)
        assert caught.value.param == param
    with pytest.raises(ApiError, match="name must be a string"):
        await face.generate({"prompt": "a", 1: 2})


async def test_what_only_python_can_send(make_api: ApiMaker, caplog: Any) -> None:
    """None is as if it were not there; a list may hold itself; a misspelt name is logged, since
    there is no response header to say so."""
    _, face = await face_of(make_api)
    message = {"role": "user", "content": "a"}
    bodies: list[dict[str, Any]] = [
        {"prompt": "a", "messages": None},
        {"prompt": None, "messages": [message]},
    ]
    for body in bodies:
        assert (await face.generate(body, max_tokens=1))["usage"]["completion_tokens"] == 1
    assert not caplog.records
    around: list[Any] = []
    around.append(around)
    assert (await face.generate("a", metadata=around, max_token=1))["choices"][0]["text"] == "hello"
    assert "unknown parameters: max_token" in caplog.text
    with pytest.raises(ApiError) as caught:
        await face.generate("a", stop=around)
    assert caught.value.param == "stop"


async def test_what_a_json_writer_would_turn_into_json(make_api: ApiMaker) -> None:
    """Tuples are lists, integer keys are text: OpenAI's client takes both."""
    _, face = await face_of(make_api)
    ids = TOKENIZER.ids("hel", "lo")
    asked: list[tuple[Any, dict[str, Any], int]] = [
        (tuple(ids), {}, 2),
        ((tuple(ids), ids), {}, 4),
        (("a", "a"), {}, 2),
        (None, {"messages": ({"role": "user", "content": "a"},)}, 1),
        ("a", {"stop": ("lo",)}, 1),
        ("a", {"logit_bias": {ids[0]: 1}, "stop_token_ids": (ids[0],)}, 1),
    ]
    for prompt, parameters, _ in asked:
        as_lists = json.loads(json.dumps({"prompt": prompt, **parameters}))
        body = await face.generate(prompt, **parameters)
        assert without_ids(body) == without_ids(await face.generate(as_lists))
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ApiError, match="nested too deeply"):
        await face.generate("a", metadata=deep)


async def test_a_stream_is_asked_for_by_its_method(make_api: ApiMaker) -> None:
    _, face = await face_of(make_api)
    for asked in (face.generate("a", stream=True), anext(face.stream("a", stream=False))):
        with pytest.raises(ApiError, match="stream: generate gives whole answers") as caught:
            await asked
        assert caught.value.param == "stream"
    assert (await face.generate("a", stream=False))["choices"][0]["text"] == "hello"


async def test_a_caller_that_stops_reading_frees_its_sequences(make_api: ApiMaker) -> None:
    """B-09 without HTTP."""
    api, face = await face_of(make_api, auto=False)
    stream = face.stream("a", n=3, max_tokens=100)
    first = asyncio.ensure_future(anext(stream))
    while len(api.service.running) < 3:
        await asyncio.sleep(0)
    api.service.tick()
    assert (await first)["choices"][0]["text"] == "hel"
    await stream.aclose()
    while api.service.running:
        await asyncio.sleep(0)
    assert api.link.live == 0
    whole = asyncio.ensure_future(face.generate("a", n=2))
    while len(api.service.running) < 2:
        await asyncio.sleep(0)
    whole.cancel()
    while api.service.running:
        await asyncio.sleep(0)
