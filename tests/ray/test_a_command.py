"""The shipped thing: `scripts/serve` with serve_config.yaml and the demo model, then SIGTERM.

Named so that it runs first: it is over before the live server of the other modules starts.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Iterator

import pytest

from serve_app.launch.processes import port_is_free
from tests.ray.served import Served, wait_until
from tests.ray.streams import started_stream

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = "The capital of France is"
_HANDLE = """
import json, logging, ray
from ray import serve
ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
handle = serve.get_app_handle("default")
whole = handle.generate.remote({prompt!r}, max_tokens=12, temperature=0).result()
chunks = handle.options(stream=True).stream.remote({prompt!r}, max_tokens=12, temperature=0)
streamed = "".join(c["text"] for chunk in chunks for c in chunk["choices"])
print(json.dumps([whole["choices"][0]["text"], streamed, whole["usage"]]))
"""
_ACTORS = """
import json, ray, urllib.request
from ray.util.state import list_actors
ray.init(address="auto", log_to_driver=False)
node = ray.nodes()[0]
print(json.dumps({
    "actors": [[a.class_name, a.name, a.state] for a in list_actors()],
    "metrics": f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}",
}))
"""
MIRRORED = (
    "prefill_steps_total",
    "prefill_decode_overlap_steps",
    "prefill_decode_stream_overlap_steps",
)


@pytest.fixture(scope="module")
def served(project_root_of_session) -> Iterator[Served]:
    server = Served(project_root_of_session, DEEPINFER_ENGINE__DRAIN_S="300")
    print(f"\ndemo server ready after {server.start_s:.1f} s")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def project_root_of_session(request):
    return request.config.rootpath


def complete(served: Served, **fields) -> dict:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    status, answer = served.post("/v1/completions", body)
    assert status == 200, answer
    return answer


def test_the_demo_answers_and_the_ready_line_says_how_to_ask(served):
    assert "Paris" in complete(served)["choices"][0]["text"]
    assert served.every(rf"ready: {served.url}")
    assert any(f"curl {served.url}/v1/completions" in line for line in served.lines)


def test_on_one_node_nothing_of_a_token_goes_through_ray(served):
    complete(served)
    status, page = served.get("/v1/status")
    assert (status, page["ingress"]["carrier"]) == (200, "loopback socket")


def test_the_official_client_is_served(served):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        asked = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
        whole = client.completions.create(**asked, n=2, logprobs=2)
        assert [choice.text for choice in whole.choices] == [whole.choices[0].text] * 2
        assert "Paris" in whole.choices[0].text
        assert len(whole.choices[0].logprobs.tokens) == 12
        assert whole.usage.completion_tokens == 24
        stopped = client.completions.create(**asked, stop=["Paris"])
        assert stopped.choices[0].finish_reason == "stop"
        assert "Paris" not in stopped.choices[0].text
        chunks = list(
            client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
        assert chunks[-1].usage.completion_tokens == 12
        chat = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=24,
        )
        assert "Paris" in chat.choices[0].message.content


def test_a_second_python_process_gets_the_http_text_whole_and_streamed(served, project_root):
    answer = complete(served)
    said = served.python(project_root, _HANDLE.format(prompt=PROMPT))
    whole, streamed, usage = json.loads(said.splitlines()[-1])
    assert whole == streamed == answer["choices"][0]["text"]
    assert usage == answer["usage"]


def test_the_state_api_lists_the_engine_alive_under_a_readable_name(served, project_root):
    listed = json.loads(served.python(project_root, _ACTORS).splitlines()[-1])
    engines = [(name, state) for kind, name, state in listed["actors"] if kind == "EngineActor"]
    assert len(engines) == 1
    name, state = engines[0]
    assert state == "ALIVE"
    assert re.fullmatch(r"SERVE_DEPLOYMENT_ACTOR::default::Ingress::\w+::engine-0", name)


def test_the_nodes_metrics_port_shows_what_our_page_shows(served, project_root):
    complete(served)
    listed = json.loads(served.python(project_root, _ACTORS).splitlines()[-1])
    ours = samples(served.get("/metrics")[1], "")
    assert ours["prefill_steps_total"] > 0

    def ray_shows_ours() -> bool:
        with urllib.request.urlopen(listed["metrics"], timeout=10) as answer:
            rays = samples(answer.read().decode(), "ray_")
        return all(rays.get(name) == ours[name] for name in MIRRORED)

    # Ray's own agent collects every few seconds; there is no event to wait for.
    begun = time.monotonic()
    wait_until(ray_shows_ours, 60, f"{MIRRORED} on Ray's port equal {ours}", pause_s=0.2)
    print(f"\nmetrics reached Ray's port after {time.monotonic() - begun:.1f} s")


def samples(page: str, prefix: str) -> dict[str, float]:
    """The mirrored samples of a Prometheus page, by our names."""
    found = {}
    for name in MIRRORED:
        match = re.search(rf"^{prefix}{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        if match:
            found[name] = float(match[1])
    return found


def test_sigterm_lets_an_open_stream_reach_its_end(served):
    """The last test here: it stops the server. New requests hear 503 in JSON meanwhile."""

    async def drain() -> tuple[str, bool, str | None]:
        # Ten seconds alone on its core: a drain needs two or three of them to begin.
        stream = await started_stream(served.port, PROMPT, 1200)
        served.process.terminate()
        rest = asyncio.create_task(stream.rest())
        refused = await asyncio.to_thread(
            wait_until,
            lambda: (answer := served.get("/health/ready"))[0] == 503 and answer,
            60,
            "readiness 503 while draining",
        )
        assert refused[1]["error"]["code"] == "unavailable"
        assert not rest.done(), "the stream was too short for this test"
        status, answer = await asyncio.to_thread(
            served.post, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}
        )
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        return await rest, stream.is_done, stream.finish

    begun = time.monotonic()
    text, is_done, finish = asyncio.run(drain())
    assert is_done
    assert finish == "length"
    assert text
    assert served.finish(300) == 0
    print(f"\nSIGTERM to exit with a stream open: {time.monotonic() - begun:.1f} s")
    assert port_is_free(served.port)
    assert served.members() == []
