"""An ingress with several engines: its own first, another while that is away, and one page of
metrics in which no counter jumps."""

from __future__ import annotations

import asyncio

import pytest

from engine_actor.messages import Limit
from serve_app.client import LocalPort, PortDied
from serve_app.metrics_page import merged
from serve_app.protocol.errors import ApiError
from tests.serve.conftest import ApiMaker
from tests.serve.doubles import PieceTokenizer
from tests.serve.test_operation import nowhere, open_stream
from tests.serve.wire import events

pytestmark = pytest.mark.anyio

TOKENIZER = PieceTokenizer("home", "away")


async def test_requests_go_to_another_engine_while_their_own_is_away(make_api: ApiMaker) -> None:
    """An ingress that only refused would be the idlest of all, and all would come to it. What runs
    on the other engine is left there when the own one is back."""
    other = await make_api(TOKENIZER, lambda submit: TOKENIZER.ids("away") * 300)
    api = await make_api(TOKENIZER, lambda submit: TOKENIZER.ids("home"), others=[other.port])
    assert await api.links.all[1].wait_ready(10)
    answer = await api.complete(max_tokens=1)
    assert answer.json()["choices"][0]["text"] == "home"
    home = api.link._port_factory
    api.link._port_factory = nowhere
    api.ports[-1].kill()
    while api.link.ready:
        await asyncio.sleep(0)
    answer = await api.complete(max_tokens=1)
    assert answer.json()["choices"][0]["text"] == "away"
    assert (await api.client.get("/health/ready")).status_code == 200
    other.service.auto = False
    call, name = await open_stream(api, other.service)
    api.link._port_factory = home
    while not api.link.ready:
        await asyncio.sleep(0.001)
    assert (await api.complete(max_tokens=1)).json()["choices"][0]["text"] == "home"
    assert api.links.live == 1
    assert (await api.client.post(f"/v1/requests/{name}/cancel")).status_code == 200
    assert events(await call.rest())[-1] == "[DONE]"


async def test_without_any_engine_requests_are_refused(make_api: ApiMaker) -> None:
    api = await make_api(TOKENIZER, lambda submit: [120], others=[nowhere, nowhere])
    api.links.tell(Limit(max_num_seqs=3))
    api.link._port_factory = nowhere
    api.ports[-1].kill()
    while api.link.ready:
        await asyncio.sleep(0)
    assert (await api.complete()).status_code == 503
    with pytest.raises(ApiError, match="not available"):
        api.links.tell(Limit(max_num_seqs=3))


async def test_a_drained_ingress_takes_nothing_on_any_engine(make_api: ApiMaker) -> None:
    other = await make_api(TOKENIZER, lambda submit: [120])
    api = await make_api(TOKENIZER, lambda submit: [120], others=[other.port])
    assert await api.links.all[1].wait_ready(10)
    api.links.drain()
    assert (await api.complete()).status_code == 503
    assert "draining" in (await api.client.get("/health/ready")).text


async def test_metrics_of_all_engines_that_answer(make_api: ApiMaker) -> None:
    """Each sample names its engine, so that it does not matter which ingress is asked."""
    other = await make_api(TOKENIZER, lambda submit: [120], name="second")
    api = await make_api(TOKENIZER, lambda submit: [120], others=[other.port, nowhere])
    assert await api.links.all[1].wait_ready(10)
    page = (await api.client.get("/metrics")).text
    assert 'prefill_steps_total{engine="double"} 3' in page
    assert 'prefill_steps_total{engine="second"} 3' in page
    assert page.count("# TYPE prefill_steps_total counter") == 1
    assert f'ingress_live_sequences{{ingress="{api.link.client}"}} 0' in page


async def test_an_engine_that_was_never_there_is_not_waited_for(make_api: ApiMaker) -> None:
    async def dies() -> LocalPort:
        raise PortDied("no actor")

    api = await make_api(TOKENIZER, lambda submit: [120], others=[dies])
    assert (await api.complete()).status_code == 200


def test_one_page_of_several_texts() -> None:
    """Families once, in the order of the first text; buckets, labels and values untouched."""
    texts = {
        "a": "# HELP x X {y}\n# TYPE x counter\nx 1\n"
        '# TYPE h histogram\nh_bucket{le="+Inf"} 2\nh_sum 0.5\n',
        "b": '# HELP x X {y}\n# TYPE x counter\nx 4\n# TYPE z gauge\nz{r="s t",q="}"} NaN\n',
    }
    assert merged("engine", texts).splitlines() == [
        "# HELP x X {y}",
        "# TYPE x counter",
        'x{engine="a"} 1',
        'x{engine="b"} 4',
        "# TYPE h histogram",
        'h_bucket{engine="a",le="+Inf"} 2',
        'h_sum{engine="a"} 0.5',
        "# TYPE z gauge",
        'z{engine="b",r="s t",q="}"} NaN',
    ]
