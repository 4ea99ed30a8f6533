"""Plans of whole configurations for cards that are not here: 7B on 4 GiB, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from configs.schema import AppArgs, EngineConfig
from engine_actor import build, planning
from engine_actor.build import context_in
from engine_actor.errors import CheckpointError
from engine_actor.load.footprint import head_of
from engine_actor.model.card_plan import Card, CardPlan
from engine_actor.model.kv_store import kv_bytes_per_block
from engine_actor.model.ledger import MIB
from engine_actor.planning import plan_for, prefill_graph_rows, render, with_chunk
from random_model import SHAPES, RandomCheckpoint, Shape, random_checkpoint

LARGE_CARD = Card(143_771 * MIB, outside=600 * MIB)
SMALL_TABLES = replace(
    SHAPES["7b-mixed"], leaf_bits={"gate_up": 3, "down": 3, "embed": 4, "head": 4}
)
CPU = torch.device("cpu")


def args_of(max_model_len: int | None = None, **engine: Any) -> AppArgs:
    model = {"path": "random", "max_model_len": max_model_len}
    return AppArgs.model_validate({"model": model, "engine": engine})


def planned(
    shape: Shape, max_model_len: int | None = None, card: Card = LARGE_CARD, **engine: Any
) -> CardPlan:
    settings = {"memory_limit_mb": 4096, "max_num_seqs": 16, "prefill_chunk_tokens": 128} | engine
    return plan_for(args_of(max_model_len, **settings), random_checkpoint(shape, CPU), card, 86)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_7b_in_4_gib(dtype: str) -> None:
    """S-41: with the tables in W4 as well there is room for thousands of tokens beside 384 MiB."""
    plan = planned(SMALL_TABLES, kv={"dtype": dtype})
    assert plan.refusal is None
    assert plan.planned <= plan.allowance == (4096 - 384) * MIB
    assert plan.kv_tokens > (9_000 if dtype == "int8" else 5_000)
    kv_dtype = torch.int8 if dtype == "int8" else torch.float16
    config = random_checkpoint(SMALL_TABLES, CPU).config
    exact = plan.kv_blocks * kv_bytes_per_block(config, kv_dtype, 16)
    assert exact <= plan.kv_bytes <= exact + 2 * MIB + 256 * 2 * config.n_layers


def test_the_limit_plans_as_the_small_card_would() -> None:
    """The card of a rehearsal has a larger context; the reserve stands for it."""
    small = planned(SMALL_TABLES, card=Card(4096 * MIB, outside=180 * MIB), memory_limit_mb=None)
    rehearsed = planned(SMALL_TABLES)
    assert rehearsed.kv_blocks == small.kv_blocks


def test_tables_in_8_bits_leave_no_room_and_the_refusal_says_what_would() -> None:
    more: dict[str, Any] = {"kv": {"dtype": "int8"}, "max_num_seqs": 4, "memory_limit_mb": 4096}
    plan = planned(SHAPES["7b-mixed"], **more)
    assert plan.refusal is not None
    named = dict(line.split(": ") for line in plan.instead[:-1])
    value = named["engine.prefill_chunk_tokens"]
    assert planned(SHAPES["7b-mixed"], **more, prefill_chunk_tokens=int(value)).refusal is None
    one_more = planned(SHAPES["7b-mixed"], **more, prefill_chunk_tokens=int(value) + 1)
    assert one_more.refusal is not None


def test_an_embedding_in_4_bits_is_named_where_it_would_fit() -> None:
    plan = planned(SHAPES["7b-mixed"])
    assert plan.refusal is not None
    name, _, tokens = plan.instead[-1].rpartition(": ")
    assert name == "quantize --embedding-bits 4, model.max_model_len"
    # Groups of 64, as quantize makes them, where this shape has 128.
    small = planned(SHAPES["7b-4gib"]).settings.max_model_len
    assert small - 400 < int(tokens) <= small
    tied = planned(SHAPES["3b"], memory_limit_mb=2100)
    assert tied.refusal is not None
    assert not any("embedding" in line for line in tied.instead)


def test_packed_models_call_no_library_and_plan_no_room_for_one() -> None:
    def parts(shape: Shape, **engine: Any) -> dict[str, int]:
        found = planned(shape, 2048, prefill_chunk_tokens=512, memory_limit_mb=8192, **engine)
        return {part.name: part.nbytes for part in found.parts}

    packed = parts(SHAPES["3b"])
    dense = parts(replace(SHAPES["3b"], leaf_bits={"down": 8}))
    assert "library workspaces" not in packed
    assert dense["library workspaces"] > 30 * MIB
    # The dense slice, and two more matrices of the MLP's width.
    assert dense["prompt chunk"] - packed["prompt chunk"] > 48 * MIB
    assert parts(SHAPES["3b"], max_num_seqs=300)["library workspaces"] > 30 * MIB


@pytest.mark.parametrize(
    "other", [{"numerics": "exact"}, {"kv": {"dtype": "fp32"}}], ids=["exact", "another cache"]
)
def test_nothing_is_kept_free_for_graphs_that_no_step_can_have(other: dict[str, Any]) -> None:
    def names(**engine: Any) -> set[str]:
        found = planned(SHAPES["3b"], 2048, memory_limit_mb=40_000, prefill_graphs=True, **engine)
        return {part.name for part in found.parts}

    fixed = {"decode buckets", "decode graphs", "prefill buckets", "prefill graphs"}
    assert fixed <= names()
    assert not fixed & names(**other)


def test_the_head_says_how_many_rows_it_is_read_packed_for() -> None:
    def of(shape: Shape, **changed: Any) -> tuple[int, int]:
        found = random_checkpoint(shape, CPU)
        entries = [
            replace(entry, **changed) if entry.name in ("embed", "head") else entry
            for entry in found.entries
        ]
        return head_of(found.config, entries)

    assert of(SHAPES["3b"]) == (8, 256)
    assert of(SHAPES["7b"], group=32) == (8, 16)
    assert of(SMALL_TABLES) == (4, 1 << 20)
    assert of(SHAPES["7b"], bits=0, group=0) == (0, 0)


def test_the_table_says_what_it_means() -> None:
    text = render(planned(SHAPES["3b"], max_model_len=2048))
    assert "  weights " in text
    assert "  KV pool " in text
    assert text.splitlines()[-1].startswith("context 2048 tokens; sequences at once: 16 of that")
    refused = render(planned(SHAPES["7b"], max_model_len=4096))
    assert "does not fit: loading takes" in refused


def test_nothing_is_loaded_where_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unread(RandomCheckpoint):
        __slots__ = ()

        def weights(self) -> Any:
            raise AssertionError("a weight was read")

    held: list[int] = []
    ledger = type("Ledger", (), {"hold": lambda self, cap: held.append(cap)})()
    monkeypatch.setattr(build, "keep_in_one_piece", lambda: None)
    monkeypatch.setattr(planning, "card_of", lambda device: (LARGE_CARD, 0))
    monkeypatch.setattr(build, "card_ledger", lambda device: ledger)
    monkeypatch.setattr(build, "choose_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(
        build.ops, "device_info", lambda device: build.ops.DeviceInfo("cuda", "a card", sm=86)
    )
    found = random_checkpoint(SHAPES["7b"], CPU)
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
    with pytest.raises(CheckpointError, match="does not fit on the card: loading takes 4381 MiB"):
        build.engine_around(args_of(memory_limit_mb=4096), Unread(**fields))
    assert held == []


def test_what_the_process_holds_already_is_there_while_it_loads() -> None:
    found = random_checkpoint(SHAPES["3b"], CPU)

    def refusal(limit: int, held: int) -> str:
        few = {"max_num_seqs": 1, "prefill_chunk_tokens": 16, "memory_limit_mb": limit}
        return str(plan_for(args_of(256, **few), found, LARGE_CARD, 86, held * MIB).refusal)

    least = next(limit for limit in range(2000, 3000, 4) if "loading" not in refusal(limit, 0))
    assert "loading takes" in refusal(least + 96, 100)
    assert "loading takes" not in refusal(least + 104, 100)


def test_no_context_is_promised_that_the_pool_cannot_hold(caplog: pytest.LogCaptureFixture) -> None:
    assert context_in(336, 16, 5376) == 5376
    assert context_in(400, 16, 5376) == 5376
    assert context_in(291, 16, 5376) == 4656
    assert "from 5376 to 4656" in caplog.text


@pytest.mark.parametrize(
    ("card_mb", "length", "chunk"),
    [(4096, 1024, 256), (12_288, 4096, 2048), (24_576, 4096, 8192), (143_771, 32_768, 8192)],
)
def test_an_open_chunk_is_as_large_as_the_card_allows(
    card_mb: int, length: int, chunk: int
) -> None:
    plan = plan_for(args_of(length), random_checkpoint(SHAPES["3b"], CPU), Card(card_mb * MIB), 86)
    assert plan.refusal is None
    assert plan.settings.chunk_tokens == chunk


def test_a_chosen_chunk_is_sliced_beside_decodes() -> None:
    config = EngineConfig()
    assert config.chunk_tokens == 256
    large, least = with_chunk(config, 8192), with_chunk(config, 256)
    assert (large.chunk_tokens, large.prefill_slice_tokens) == (8192, 256)
    assert (least.chunk_tokens, least.prefill_slice_tokens) == (256, None)
    assert (large.prefill_burst_tokens, least.prefill_burst_tokens) == (2048, None)
    smooth = with_chunk(EngineConfig(prefill_slice_tokens=64), 2048)
    assert (smooth.prefill_slice_tokens, smooth.prefill_burst_tokens) == (64, None)
    asked = EngineConfig(prefill_chunk_tokens=512)
    assert with_chunk(asked, 8192) is asked


@pytest.mark.parametrize(
    ("card_mb", "settings", "rows"),
    [
        (4096, {}, 0),
        (12_288, {}, 0),
        (24_576, {}, 512),
        (24_576, {"prefill_burst_tokens": 2048}, 512),
        (143_771, {}, 2048),
        (143_771, {"prefill_chunk_tokens": 8192}, 512),
        (143_771, {"prefill_chunk_tokens": 300, "prefill_burst_tokens": 300}, 300),
        (143_771, {"prefill_slice_tokens": 256, "prefill_burst_tokens": 1024}, 1024),
        (143_771, {"prefill_slice_tokens": 256}, 512),
        (143_771, {"memory_limit_mb": 4096}, 0),
        (143_771, {"cuda_graphs": False}, 0),
        (143_771, {"prefill_graphs": False}, 0),
        (4096, {"prefill_graphs": True}, 256),
        (24_576, {"prefill_graphs": True}, 512),
    ],
)
def test_graphs_of_chunks_where_the_card_is_fast(
    card_mb: int, settings: dict[str, Any], rows: int
) -> None:
    """Those of bursts where it computes one as fast as its host launches it."""
    args = args_of(1024, **settings)
    plan = plan_for(args, random_checkpoint(SHAPES["3b"], CPU), Card(card_mb * MIB), 90)
    names = {part.name: part.nbytes for part in plan.parts}
    config = with_chunk(args.engine, plan.settings.chunk_tokens)
    assert prefill_graph_rows(config, plan.allowance) == rows
    assert ("prefill graphs" in names) == ("prefill buckets" in names) == bool(rows)
    if rows:
        most = 200 if rows <= 512 else 350
        assert 20 * MIB < names["prefill graphs"] < most * MIB
