"""`/v1/chat/completions` over a scripted engine. F-22, F-23."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actor.messages import Submit
from tests.serve.conftest import ApiMaker
from tests.serve.doubles import PieceTokenizer
from tests.serve.wire import chunks, joined

pytestmark = pytest.mark.anyio

TOKENIZER = PieceTokenizer("hel", "lo", "é")


def hello(submit: Submit) -> list[int]:
    return [*TOKENIZER.ids("hel", "lo"), TOKENIZER.eos]


async def test_whole_and_streamed_are_the_same_text(make_api: ApiMaker) -> None:
    api = await make_api(TOKENIZER, hello)
    whole = (await api.chat(n=2)).json()
    assert whole["object"] == "chat.completion"
    assert whole["id"].startswith("chatcmpl-")
    assert [c["message"]["content"] for c in whole["choices"]] == ["hello", "hello"]
    assert whole["choices"][0]["message"]["role"] == "assistant"
    stream = (await api.chat(n=2, stream=True)).text
    assert [joined(stream, index) for index in (0, 1)] == ["hello", "hello"]
    first, second, *_ = chunks(stream)
    assert first["object"] == "chat.completion.chunk"
    for index, chunk in enumerate((first, second)):
        assert chunk["choices"][0]["index"] == index
        assert chunk["choices"][0]["delta"]["role"] == "assistant"
    assert chunks(stream)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_the_template_makes_the_prompt(make_api: ApiMaker) -> None:
    api = await make_api(TOKENIZER, hello)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    await api.client.post("/v1/chat/completions", json={"messages": messages})
    submit = next(m for m in api.service.received if isinstance(m, Submit))
    assert TOKENIZER.decode(submit.prompt_ids) == "[system]s[user]ab[assistant]"
    assert submit.sampling.max_tokens == 512 - len(submit.prompt_ids)


async def test_logprobs_have_chat_s_shape(make_api: ApiMaker) -> None:
    api = await make_api(TOKENIZER, hello)
    body = (await api.chat(logprobs=True, top_logprobs=2)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["hel", "lo"]
    assert content[0]["bytes"] == list(b"hel")
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    stream = await api.chat(logprobs=True, top_logprobs=2, stream=True)
    entries: list[Any] = []
    for chunk in chunks(stream.text):
        entries += (chunk["choices"][0]["logprobs"] or {}).get("content", [])
    assert entries == content
    assert (await api.chat()).json()["choices"][0]["logprobs"] is None


async def test_stop_usage_and_limits(make_api: ApiMaker) -> None:
    api = await make_api(TOKENIZER, hello)
    stopped = (await api.chat(stop=["ll"])).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("he", "stop")
    short = (await api.chat(max_completion_tokens=1)).json()
    assert short["choices"][0]["message"]["content"] == "hel"
    assert short["choices"][0]["finish_reason"] == "length"
    stream = await api.chat(stream=True, stream_options={"include_usage": True})
    *body, last = chunks(stream.text)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("logprobs", 3),
        ("top_logprobs", 2),
        ("max_completion_tokens", -1),
        ("echo", True),
        ("messages", []),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    make_api: ApiMaker, name: str, value: Any
) -> None:
    """F-22, B-28."""
    api = await make_api(TOKENIZER, hello)
    body = {"messages": [{"role": "user", "content": "x"}], name: value}
    response = await api.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


async def test_a_template_that_cannot_render_is_a_400(make_api: ApiMaker) -> None:
    from serve_app.chat import ChatTemplateError

    api = await make_api(TOKENIZER, hello)

    def refuse(messages: Any, add_generation_prompt: bool = True) -> str:
        raise ChatTemplateError("conversation roles must alternate")

    api.app.state.intake.tokenizer.apply_chat_template = refuse
    try:
        response = await api.chat()
    finally:
        del api.app.state.intake.tokenizer.apply_chat_template
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert "roles must alternate" in error["message"]
