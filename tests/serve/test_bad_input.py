"""Whatever a client sends: a clear 4xx in OpenAI's shape, and the next request is served.
B-08, B-14, B-28, F-02.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.conftest import Api, ApiMaker
from tests.serve.doubles import PieceTokenizer

pytestmark = pytest.mark.anyio

TOKENIZER = PieceTokenizer("ab")
VOCAB = TOKENIZER.vocab_size


async def api_of(make_api: ApiMaker, **more: Any) -> Api:
    api: Api = await make_api(TOKENIZER, lambda submit: [120, TOKENIZER.eos], **more)
    return api


async def check(api: Api, response: Any, status: int, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error shape, and a served neighbour."""
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    assert "Traceback" not in response.text
    assert "/work" not in response.text
    assert "serve_app" not in response.text
    assert response.headers["x-request-id"]
    assert (await api.complete()).json()["choices"][0]["text"] == "x"
    return dict(error)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [2**80]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"suffix": "x"}, "suffix"),
        ({"seed": 2**64}, "seed"),
        ({"timeout": 10**30}, "timeout"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_bad_parameters_are_named(
    make_api: ApiMaker, body: dict[str, Any], param: str
) -> None:
    """B-14, B-28."""
    api = await api_of(make_api)
    for stream in (False, True):
        sent = {"prompt": "a", "stream": stream, **body}
        if param == "stream_options" and stream:
            continue
        response = await api.client.post("/v1/completions", json=sent)
        await check(api, response, 400, param)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"not json", None),
        (b"[]", None),
        (b"null", None),
        (b'{"prompt": "a", "temperature": NaN}', None),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "a", "stop": ["\\udfff"]}', "stop"),
        (b'{"prompt": "a", "user": "\\ud800"}', "user"),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt":' + b"[" * 50_000, None),
        (b'{"n":' + b"1" * 10_000 + b"}", None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_bad_bodies(make_api: ApiMaker, path: str, raw: bytes, param: str | None) -> None:
    api = await api_of(make_api)
    response = await api.client.post(path, content=raw)
    if path == "/v1/completions":
        await check(api, response, 400, param)
    else:
        assert response.status_code in (200, 400)


async def test_too_large_is_413_declared_or_not(make_api: ApiMaker) -> None:
    api = await api_of(make_api, http={"max_body_mb": 1})
    big = b'{"prompt": "' + b"a" * (1 << 20) + b'"}'
    await check(api, await api.client.post("/v1/completions", content=big), 413)

    async def pieces() -> Any:
        for _ in range(20):
            yield b"a" * 100_000

    await check(api, await api.client.post("/v1/completions", content=pieces()), 413)


async def test_unknown_routes_models_and_methods(make_api: ApiMaker) -> None:
    """F-02."""
    api = await api_of(make_api)
    await check(api, await api.client.get("/nope"), 404)
    await check(api, await api.client.post("/v1/nope"), 404)
    response = await api.client.get("/v1/completions")
    await check(api, response, 405)
    assert response.headers["allow"] == "POST"
    await check(api, await api.complete(model="gpt-4"), 404, "model")
    await check(api, await api.chat(model="gpt-4"), 404, "model")
    await check(api, await api.client.get("/v1/models/gpt-4"), 404, "model")
    assert (await api.complete(model="m")).status_code == 200
    assert (await api.client.get("/v1/models/m")).json()["id"] == "m"


async def test_b08_a_request_larger_than_the_pool_is_refused_with_numbers(
    make_api: ApiMaker,
) -> None:
    """B-08: refused at the door, and the small one behind it is served."""
    api = await api_of(make_api, kv_blocks=4)
    response = await api.complete(list(range(50)), max_tokens=100)
    error = await check(api, response, 400, "max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert "needs 150 tokens" in error["message"]
    assert "holds 64" in error["message"]
    error = await check(api, await api.complete(list(range(70))), 400, "prompt")
    assert error["code"] == "context_length_exceeded"


async def test_more_sequences_than_the_server_ever_runs(make_api: ApiMaker) -> None:
    api = await api_of(make_api, facts={"max_sequences": 4})
    error = await check(api, await api.complete(n=5), 400, "n")
    assert "limit is 4" in error["message"]
    await check(api, await api.complete(["a"] * 5), 400, "prompt")


async def test_tokenize_and_detokenize(make_api: ApiMaker) -> None:
    """F-29."""
    api = await api_of(make_api)
    body = (await api.client.post("/tokenize", json={"prompt": "abc"})).json()
    assert body == {"count": 2, "max_model_len": 512, "tokens": TOKENIZER.ids("ab", "c")}
    back = await api.client.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "abc"}
    messages = [{"role": "user", "content": "x"}]
    ids = (await api.client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    assert TOKENIZER.decode(ids) == "[user]x[assistant]"
    long = await api.client.post("/tokenize", json={"prompt": "z" * 6000})
    assert long.json()["count"] == 6000
    for path, sent, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "x"}, "model"),
    ):
        status = 404 if param == "model" else 400
        await check(api, await api.client.post(path, json=sent), status, param)


async def test_parameters_of_tokenize_are_taken_or_spoken_of(make_api: ApiMaker) -> None:
    """F-22 beside the endpoints that generate: a template's flag would change the count."""
    api = await api_of(make_api)
    messages = [{"role": "user", "content": "x"}]
    for path, sent in (
        ("/tokenize", {"messages": messages, "add_generation_prompt": False}),
        ("/tokenize", {"messages": messages, "tools": [{"type": "function"}]}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/detokenize", {"tokens": [1], "skip_special_tokens": True}),
    ):
        error = await check(api, await api.client.post(path, json=sent), 400, list(sent)[-1])
        assert error["code"] == "unsupported_parameter"
    sent = {"messages": messages, "add_generation_prompt": True, "tools": None, "odd": 1}
    response = await api.client.post("/tokenize", json=sent)
    assert response.status_code == 200
    assert response.headers["x-warnings"] == "ignored unknown parameters: odd"


async def test_bad_text_in_unknown_names_and_models_is_survived(make_api: ApiMaker) -> None:
    api = await api_of(make_api)
    response = await api.complete(**{"x\r\nset-cookie: a=b": 1, "é": 2})
    assert response.status_code == 200
    assert response.headers["x-warnings"] == "ignored unknown parameters: 2 more"
    assert "set-cookie" not in response.headers
    assert (await api.complete(model="é\n\u2028")).status_code == 404
    json.loads((await api.complete(model="x" * 600)).text)
