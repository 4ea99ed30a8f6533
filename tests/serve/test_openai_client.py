"""The official `openai` client against a real server over a real engine with a scripted model:
completes, streams, usage, logprobs, n = 2, stop strings, errors, disconnects.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from engine_actor.service import EngineService
from serve_app.client import LocalPort
from serve_app.engine_link import EngineLink
from serve_app.ingress import build_api
from serve_app.intake import Facts
from tests.doubles.scripted_runner import ScriptedRunner, make_service
from tests.serve.doubles import PieceTokenizer
from tests.serve.wire import serving

TOKENIZER = PieceTokenizer(" Paris", ".", " EN", "D", "long")
PARIS = (*TOKENIZER.ids(" Paris", ".", "x", " EN", "D", "!", "y"), TOKENIZER.eos)
ENDLESS = 3000


@dataclass
class Server:
    """A running server and what stands behind it."""

    port: int
    service: EngineService
    runner: ScriptedRunner

    def client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, **more
        )

    def quiet(self) -> dict[str, float]:
        """The engine's metrics once it has nothing left to do."""
        self.service._loop.when_idle().result(60)
        return self.service._engine.metrics.snapshot()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts = {
        tuple(TOKENIZER.encode("The capital of France is")): PARIS,
        tuple(TOKENIZER.encode("[user]Where?[assistant]")): PARIS,
        tuple(TOKENIZER.encode("go")): TOKENIZER.ids("long") * ENDLESS,
    }
    runner = ScriptedRunner(TOKENIZER.vocab_size, scripts, eos=TOKENIZER.eos, block_tokens=16)
    service = make_service(runner, kv_blocks=512, max_model_len=4096)

    async def port() -> LocalPort:
        return LocalPort(service)

    link = EngineLink(port, beat_s=0.05)
    app = build_api(link, TOKENIZER, Facts(attach_wait_s=10), run_link=True)
    try:
        with serving(app) as number:
            yield Server(number, service, runner)
    finally:
        service.close()


def test_completes(server: Server) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model="scripted", prompt="The capital of France is", temperature=0, max_tokens=2
        )
    assert answer.choices[0].text == " Paris."
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert answer.id.startswith("cmpl-")


def test_streams_the_same_text_with_usage(server: Server) -> None:
    request: Any = {"model": "scripted", "prompt": "The capital of France is", "temperature": 0}
    with server.client() as client:
        whole = client.completions.create(**request, max_tokens=50)
        stream = client.completions.create(
            **request, max_tokens=50, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text == " Paris.x END!y"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8


def test_logprobs_echo_and_n(server: Server) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model="scripted",
            prompt="The capital of France is",
            temperature=0,
            max_tokens=1,
            logprobs=2,
            echo=True,
            n=2,
        )
    assert [choice.text for choice in answer.choices] == ["The capital of France is Paris"] * 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.top_logprobs or []) == len(logprobs.tokens)


def test_stop_strings(server: Server) -> None:
    """B-01 through the whole of it."""
    with server.client() as client:
        for stream in (False, True):
            answer: Any = client.completions.create(
                model="scripted",
                prompt="The capital of France is",
                temperature=0,
                max_tokens=50,
                stop=["END!", "zz"],
                stream=stream,
            )
            parts = list(answer) if stream else [answer]
            assert "".join(part.choices[0].text for part in parts) == " Paris.x "
            assert parts[-1].choices[0].finish_reason == "stop"


def test_chat(server: Server) -> None:
    request: Any = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Where?"}],
        "temperature": 0,
        "max_completion_tokens": 2,
        "logprobs": True,
        "top_logprobs": 1,
    }
    with server.client() as client:
        whole = client.chat.completions.create(**request)
        stream = client.chat.completions.create(**request, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        models = client.models.list().data
    assert text == whole.choices[0].message.content == " Paris."
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert [entry.token for entry in logprobs.content or []] == [" Paris", "."]
    assert [model.id for model in models] == ["scripted"]


def test_errors_are_the_client_s_own_kinds(server: Server) -> None:
    with server.client() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="scripted", prompt="a", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-4", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="scripted", prompt=[1] * 50, max_tokens=10**6)
        assert long.value.code == "context_length_exceeded"


def test_many_at_once_are_each_their_own(server: Server) -> None:
    """Texts do not depend on who runs beside: the runner checks every KV entry it reads."""
    prompts = [f"prompt number {index}" for index in range(12)]
    texts: dict[str, str] = {}

    def ask(prompt: str) -> None:
        with server.client() as client:
            answer = client.completions.create(
                model="scripted", prompt=prompt, temperature=0, max_tokens=20
            )
            texts[prompt] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in prompts:
        expected = server.runner.expected(TOKENIZER.encode(prompt), 20)
        # Bytes of no character at the very end are flushed as one replacement character.
        assert texts[prompt].rstrip("\ufffd") == TOKENIZER.decode(expected).rstrip("\ufffd")


def raw_stream(port: int, n: int) -> socket.socket:
    """A streamed request on a bare socket, its first byte read."""
    body = b'{"prompt":"go","max_tokens":2000,"temperature":0,"stream":true,"n":%d}' % n
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(head + body)
    assert connection.recv(1) == b"H"
    return connection


def test_b09_closed_sockets_leave_nothing_running(server: Server) -> None:
    """B-09: n = 4, closed after the first byte, again and again."""
    before = server.quiet()
    for _ in range(20):
        raw_stream(server.port, 4).close()
    after = server.quiet()
    assert after["cancelled_total"] - before["cancelled_total"] == 80
    assert after["kv_blocks_free"] == after["kv_blocks_total"]
    with server.client() as client:
        answer = client.completions.create(
            model="scripted", prompt="The capital of France is", temperature=0, max_tokens=1
        )
    assert answer.choices[0].text == " Paris"


def test_a_closed_socket_frees_its_blocks_soon(server: Server) -> None:
    """decisions.md section 4 asks for 250 ms at p99; here only a generous bound is held."""
    server.quiet()
    connection = raw_stream(server.port, 1)
    begun = time.monotonic()
    connection.close()
    server.quiet()
    assert time.monotonic() - begun < 5
