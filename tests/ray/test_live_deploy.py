"""The builder's refusals, and a live change of user_config, on the live server's cluster."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import pytest

from configs.load import read_serve_config
from configs.schema import AppArgs
from tests.ray.conftest import Live
from tests.ray.served import wait_until

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"engine": {"device": "cuda"}}, r"engine\.device: cuda, but this Ray cluster has no GPU"),
        ({"model": {"path": "/nowhere/at/all"}}, "/nowhere/at/all"),
    ],
)
def test_the_builder_refuses_in_one_line_before_anything_starts(live: Live, args, why):
    """B-37: within 10 s with the reason, not an actor that pends for ever."""
    from ray.serve.exceptions import RayServeException

    from serve_app.app import build

    begun = time.monotonic()
    with pytest.raises(RayServeException, match=why) as caught:
        build(AppArgs.model_validate(args))
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 10


def test_a_changed_user_config_reaches_the_engine_without_a_restart(live: Live, tiny_folder):
    pid = live.actor("EngineActor").pid
    (config,) = live.served.every(r"Running config file: '([^']+)'")
    (dashboard,) = live.served.every(r"View the dashboard at \S*?(http://[\d.:]+)")
    document = read_serve_config(Path(config[1]))

    def deploy(user_config: dict) -> None:
        document["applications"][0]["deployments"][0]["user_config"] = user_config
        request = urllib.request.Request(
            f"{dashboard[1]}/api/serve/applications/",
            json.dumps(document).encode(),
            {"content-type": "application/json"},
            method="PUT",
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200

    deploy({"prefill_chunk_tokens": 20})
    wait_until(
        lambda: live.status()["queue"]["prefill_chunk_tokens"] == 20, 60, "the new limit", 0.1
    )
    assert live.actor("EngineActor").pid == pid
    # One that is none is refused in the log, and nobody hears of it: Serve would end all replicas.
    deploy({"prefill_chunk_tokens": 24, "kv_fracton": 0.5})
    refused = "user_config is refused, the limits stay as they are: no such limit: kv_fracton"
    wait_until(lambda: any(refused in line for line in live.served.lines), 60, "the refusal", 0.1)
    assert live.status()["queue"]["prefill_chunk_tokens"] == 20
    deploy({"prefill_chunk_tokens": 32})
    wait_until(
        lambda: live.status()["queue"]["prefill_chunk_tokens"] == 32, 60, "the old limit", 0.1
    )


def test_a_handle_refuses_what_http_refuses(live: Live):
    from serve_app.protocol.errors import ApiError

    with pytest.raises(ApiError, match="temperature") as caught:
        live.handle.generate.remote("x", temperature=9).result()
    assert caught.value.status == 400
    with pytest.raises(ApiError) as caught:
        live.handle.evict.remote("no-such-id").result()
    assert caught.value.code == "request_not_found"
