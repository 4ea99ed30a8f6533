"""Bytes before the run: sizes as people write them, exact plans, refusals that name what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_actor.load.tiny import tiny_config
from engine_actor.model.config import ModelConfig
from engine_actor.quant.grid import Grid
from engine_actor.quant.plan import (
    FOUR_BITS,
    MIB,
    PlanError,
    engine_bytes,
    kv_floor,
    make_plan,
    read_size,
    require_fit,
)
from engine_actor.quant.recipe import Recipe, fixed_recipe

QWEN_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}


def config_7b() -> ModelConfig:
    """Qwen2.5-7B's shape."""
    return ModelConfig.from_hf(tiny_config("qwen2", **QWEN_7B), None)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("4g", 4 << 30),
        ("4 GiB", 4 << 30),
        ("3.5GiB", 7 << 29),
        ("4GB", 4_000_000_000),
        ("3500MiB", 3500 << 20),
        ("123456789", 123456789),
        ("512 kb", 512_000),
    ],
)
def test_sizes_as_people_write_them(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-4GiB", "4QiB", "4GiBs", "four", "0", "nan", "inf", "1e9x"]
)
def test_what_is_no_size_is_refused_in_one_line(text):
    with pytest.raises(PlanError, match="not a size; write it like 4GiB") as caught:
        read_size(text)
    assert "\n" not in str(caught.value)


def test_a_7b_by_hand():
    """28 layers; W3 group 128 in the MLP, W4 in attention, INT8 embedding and head."""
    plan = make_plan(config_7b(), fixed_recipe("mixed", 128))
    attention = (3584 + 2 * 512) * 3584 + 3584 * 3584
    mlp = 3 * 3584 * 18944
    assert plan.layers == 28 * (attention * (4 / 8 + 2 / 128) + mlp * (3 / 8 + 2 / 128))
    assert plan.tables == 2 * 152064 * (3584 + 2)
    assert plan.vectors == (28 * 2 + 1) * 3584 * 4 + 28 * (3584 + 1024) * 4
    assert plan.kv_floor == 2 * 28 * 4 * 128 * 2 * 4096
    assert plan.bits_per_weight == pytest.approx(3.125 + 1 * attention / (attention + mlp))


def test_a_short_context_needs_a_short_cache():
    config = ModelConfig.from_hf(tiny_config(max_position_embeddings=512), None)
    assert kv_floor(config) == 2 * 2 * 2 * 16 * 2 * 512


def test_what_fits_is_let_through_and_what_does_not_is_told_what_would():
    config = config_7b()
    plan = make_plan(config, fixed_recipe("w4", 64))
    require_fit(config, plan, None)
    require_fit(config, plan, plan.total)
    with pytest.raises(
        PlanError,
        match=r"w4 needs .* MiB, the budget is 4,096 MiB; this fits: "
        r"--recipe mixed --group 128 --embedding-bits 4 \(",
    ):
        require_fit(config, plan, 4 << 30)
    with pytest.raises(
        PlanError,
        match="the smallest recipe, --recipe w3 --group 128 --embedding-bits 4 --head-bits 4",
    ):
        require_fit(config, plan, 1 << 30)


def test_a_card_needs_room_for_more_than_weights_and_cache():
    """The reserve of 384 MiB, and a step as the engine's own plan has it."""
    config = config_7b()
    plan = make_plan(config, fixed_recipe("mixed", 128))
    assert 450 * MIB < engine_bytes(config) == plan.beside < 600 * MIB
    assert plan.total == plan.layers + plan.tables + plan.vectors + plan.kv_floor + plan.beside


def test_an_embedding_and_a_head_have_grids_of_their_own():
    config = config_7b()
    recipe = replace(fixed_recipe("mixed", 128), embedding=FOUR_BITS)
    row = 3584 // 2 + 2 * 3584 // 64
    assert make_plan(config, recipe).tables == 152064 * (row + 3584 + 2)
    assert recipe.described()["head"] == {"bits": 8, "group": -1, "offsets": False}
    tied = ModelConfig.from_hf(
        {**tiny_config("qwen2", **QWEN_7B), "tie_word_embeddings": True}, None
    )
    assert make_plan(tied, recipe).tables == 152064 * row


@pytest.mark.parametrize("budget", [3_730 * MIB, 4_000 * MIB, 4_400 * MIB])
def test_the_recipe_that_is_named_does_fit(budget):
    config = config_7b()
    with pytest.raises(PlanError) as caught:
        require_fit(config, make_plan(config, fixed_recipe("w4", 64)), budget)
    words = str(caught.value).split("this fits: ")[1].split()
    tables = {
        name: Grid(4, 64) if f"--{name}-bits" in words else Grid(8, -1)
        for name in ("embedding", "head")
    }
    named = Recipe("named", fixed_recipe(words[1], int(words[3])).grids, **tables)
    assert make_plan(config, named).total <= budget


def test_the_plan_is_printed_with_its_budget():
    lines = make_plan(config_7b(), fixed_recipe("w4", 64)).lines(4 << 30)
    assert [line.split("MiB")[0].split()[-1] for line in lines][-1] == "4,096.0"
    assert "layers (w4, 4.250 bits a weight)" in lines[0]
    assert f"{make_plan(config_7b(), fixed_recipe('w4', 64)).total / MIB:,.1f}" in lines[5]
