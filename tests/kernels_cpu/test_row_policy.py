"""Which backend for how many rows: the seed's rule and the tables, by names only, no GPU (S-16)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kernels.linear.cuda import BACKENDS, EXPERIMENTS, Cuda
from kernels.linear.op import LinearPolicy, explain_rows
from kernels.linear.row_policy import choose_for_rows, row_choices, row_steps
from kernels.spec.op import OpKey
from kernels.spec.registry import NoBackend
from kernels.spec.tuned import (
    TableError,
    TunedRow,
    TunedTable,
    shipped_table,
    tuned_tables,
    user_table,
    write_table,
)
from tests.house_rules.sources import ROOT
from tests.kernels_cpu.layers import random_layer

KEY = OpKey("linear", "cuda", "float16", n=5632, k=2048, bits=4, group=128, sm=86)


@dataclass(frozen=True)
class Named:
    """Refuses more rows than it takes."""

    name: str
    most: int = 1 << 30

    def refuse(self, key: OpKey) -> str | None:
        return None if key.m <= self.most else f"takes {self.most} rows"


def seed_backend(rows: int, **change: object) -> str:
    """What the seed's rule takes."""
    key = replace(KEY, m=rows, **change)
    return choose_for_rows(BACKENDS, key, "seed", ())[1].backend


@pytest.mark.parametrize(
    ("rows", "w4", "w3"),
    [
        (1, "cuda.seed_gemv", "cuda.seed_gemv"),
        (2, "cuda.seed_w4_batch_tile", "cuda.seed_gemv"),
        (8, "cuda.seed_w4_batch_tile", "cuda.seed_gemv"),
        (9, "cuda.seed_tiled", "cuda.seed_tiled"),
        (37, "cuda.seed_tiled", "cuda.seed_tiled"),
    ],
)
def test_the_seeds_rule(rows: int, w4: str, w3: str) -> None:
    """1 row: GEMV. 2 to 8: the batch kernels, W3 keeping grid.y = batch. More: tiled."""
    assert (seed_backend(rows), seed_backend(rows, bits=3)) == (w4, w3)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 37])
def test_the_seed_dequantises_what_is_not_fp16(rows: int) -> None:
    """Other activations go to cuBLAS on dense rows; on a CPU every CUDA backend says no."""
    assert seed_backend(rows, dtype="bfloat16") == "cuda.dequantise_cublas"
    with pytest.raises(NoBackend, match=r"cuda\.dequantise_cublas: runs on a GPU only"):
        seed_backend(rows, device="cpu")
    assert Cuda("seed").refuse(replace(KEY, device="cpu", m=rows)) == "runs on a GPU only"


def test_the_w3_batch_tile_is_chosen_by_nobody() -> None:
    """It read less and was slower (S-15)."""
    names = {backend.name for backend in BACKENDS}
    assert "cuda.seed_w3_batch_tile" in {backend.name for backend in EXPERIMENTS}
    assert names & {backend.name for backend in EXPERIMENTS} == set()


def table(*rows: TunedRow) -> TunedTable:
    """In memory."""
    return TunedTable("test", rows)


def test_the_first_matching_row_wins_and_a_refusal_passes_on() -> None:
    """Ranges include both ends; why each was passed over is kept."""
    rows = (
        TunedRow("linear", "a", "file a", m=(1, 16)),
        TunedRow("linear", "unknown", "file u", m=(1, 16)),
        TunedRow("linear", "b", "file b", bits=(4,), n=(5632, 5632)),
    )
    backends = (Named("c"), Named("a", most=4), Named("b"))
    found = row_choices(backends, KEY, "tuned", (table(*rows),))
    assert [(c.first, c.last, c.backend, c.why) for _, c in found] == [
        (1, 4, "a", "file a"),
        (5, (1 << 20) - 1, "b", "file b"),
    ]
    passed = {verdict.backend: verdict.refusal for verdict in found[1][1].passed_over}
    assert passed == {"a": "takes 4 rows", "unknown": "not part of this version"}
    other = row_choices(backends, replace(KEY, bits=3, m=0), "tuned", (table(rows[2]),))
    assert [choice.backend for _, choice in other] == ["c"]


def test_the_users_table_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement on this very card beats ours."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    assert [found.source for found in tuned_tables(86, "RTX 3050")] == [shipped_table(86).source]
    own = user_table(86, "RTX 3050")
    assert own == tmp_path / "tuned" / "sm_86-rtx-3050.yaml"
    row = TunedRow("linear", "cuda.seed_tiled", "measured here", (3, 4), (1, 2), n=(16, 16))
    write_table(own, [row], "A line\n\nand another")
    first, second = tuned_tables(86, "RTX 3050")
    assert first.rows == (row,)
    assert second is shipped_table(86)
    assert own.read_text().startswith("# A line\n#\n# and another\nrows:\n")
    found = choose_for_rows(BACKENDS, replace(KEY, m=1, n=16), "tuned", (first, second))
    assert found[1].backend == "cuda.seed_tiled"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: {}", "no list of rows"),
        ("- 1", "no list of rows"),
        ("rows: [{op: linear}]", "row 1: needs op, backend and evidence"),
        ("rows: [{op: a, backend: b, evidence: c, q: 1}]", "row 1: no field is named 'q'"),
        ("rows: [{op: a, backend: b, evidence: c, m: [3, 1]}]", "row 1: bits are integers"),
        ("rows: [", "sm_86-x.yaml: while parsing"),
    ],
)
def test_a_broken_table_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    """File, row and field."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    path = user_table(86, "x")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(TableError, match=message):
        tuned_tables(86, "x")


def test_other_cards_use_the_nearest_table() -> None:
    """Ampere and Ada share one, what is newer takes Hopper's, what is older Ampere's."""
    names = {sm: Path(shipped_table(sm).source).name for sm in (75, 80, 86, 89, 90, 120)}
    assert names == dict.fromkeys((75, 80, 86, 89), "sm_86.yaml") | dict.fromkeys(
        (90, 120), "sm_90.yaml"
    )


@pytest.mark.parametrize("sm", [86, 90])
def test_shipped_rows_name_backends_and_their_evidence(sm: int) -> None:
    """A row is worth what its result file is worth."""
    names = {backend.name for backend in BACKENDS}
    for row in shipped_table(sm).rows:
        assert row.backend in names
        assert (ROOT / row.evidence).is_file(), row.evidence
        for bound in (row.m[0], row.m[1] + 1):
            # Above 256 rows a policy can only change at powers of two.
            assert bound <= 257 or bound & (bound - 1) == 0


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 120])
def test_every_shape_has_a_backend(sm: int, bits: int) -> None:
    """Any N and K, and any number of rows; only groups that cut through eights are refused."""
    for n, k, group in ((5632, 2048, 128), (21, 35, 16), (1, 7, 7), (16, 64, 32)):
        key = replace(KEY, sm=sm, bits=bits, n=n, k=k, group=group)
        found = Cuda().choices(key)
        assert (found[0][1].first, found[-1][1].last) == (1, (1 << 20) - 1)
    with pytest.raises(NoBackend, match="group 12 is no multiple of 8"):
        Cuda().choices(replace(KEY, sm=sm, bits=bits, group=12))


def test_rows_are_cut_without_gaps() -> None:
    """One by one, then by powers of two."""
    steps = list(row_steps())
    assert steps[0] == (1, 1)
    assert [first for first, _ in steps[1:]] == [last + 1 for _, last in steps[:-1]]
    assert steps[255:258] == [(256, 256), (257, 511), (512, 1023)]


@pytest.mark.parametrize(
    ("shape", "rows", "expect"),
    [
        ((22016, 2048), 16, "cuda.strip_few"),
        ((22016, 2048), 17, "cuda.strip_stream"),
        ((22016, 2048), 24, "cuda.strip_stream"),
        ((22016, 2048), 25, "cuda.gemm_hopper"),
        ((12288, 2048), 32, "cuda.strip_stream"),
        ((5632, 2048), 24, "cuda.strip_few"),
        ((151936, 2048), 24, "cuda.strip_stream"),
        ((151936, 2048), 32, "cuda.strip_order"),
        ((37888, 3584), 24, "cuda.gemm_hopper"),
    ],
)
def test_17_to_32_rows_of_wide_layers(shape: tuple[int, int], rows: int, expect: str) -> None:
    """On sm_90, where x fits the registers."""
    key = replace(KEY, sm=90, m=rows, n=shape[0], k=shape[1])
    assert choose_for_rows(BACKENDS, key, "tuned", (shipped_table(90),))[1].backend == expect


@pytest.mark.parametrize(
    ("sm", "rows", "expect"),
    [
        (86, 1, "cuda.strip_few"),
        (86, 64, "cuda.strip_few"),
        (86, 65, "cuda.gemm_ampere"),
        (90, 64, "cuda.strip_few"),
        (90, 65, "cuda.gemm_hopper"),
        (90, 4096, "cuda.gemm_hopper"),
        (120, 4096, "cuda.gemm_ampere"),
    ],
)
def test_what_the_shipped_tables_say(sm: int, rows: int, expect: str) -> None:
    """The regimes; a layer without strips falls to the kernels on the bytes on disk."""
    key = replace(KEY, sm=sm, m=rows)
    assert choose_for_rows(BACKENDS, key, "tuned", (shipped_table(sm),))[1].backend == expect
    odd = replace(key, group=16)
    found, choice = choose_for_rows(BACKENDS, odd, "tuned", (shipped_table(sm),))
    assert "strip" not in found.name
    assert choice.why == "docs/results/qwen_sm86_tiled_prefill.json"
    reasons = [str(verdict.refusal) for verdict in choice.passed_over]
    assert any("group 16 is none of" in reason for reason in reasons)


def test_eight_bits_have_a_way_for_any_rows() -> None:
    """The head: kernels of its own for a few rows and for some more, made dense for many."""
    key = replace(KEY, bits=8, group=2048, n=151936)
    names = [choice.backend for _, choice in Cuda().choices(key)]
    assert names == ["cuda.w8_gemv", "cuda.w8_rows", "cuda.dequantise_cublas"]


def test_rows_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doctor shows on a GPU; nothing on a CPU."""
    layer = random_layer(64, 128, group=64)
    policy = LinearPolicy(torch.device("cuda"), torch.float16)
    assert explain_rows(layer, LinearPolicy(torch.device("cpu"), torch.float32)) == ()
    monkeypatch.setattr("kernels.linear.cuda.why_no_jit", lambda: "no usable CUDA driver")
    assert explain_rows(layer, policy) == ()
    monkeypatch.setattr("kernels.linear.cuda.why_no_jit", lambda: None)
    found = explain_rows(layer, policy)
    assert (found[0].first, found[0].backend) == (1, "cuda.strip_few")
    assert found[0].why == "docs/results/2026-11-30-tuned-linear.json"


def test_bf16_is_cast_for_kernels_that_want_fp16() -> None:
    """The tuned policy asks as for fp16; the seed's makes the weights dense."""
    bf16 = replace(KEY, dtype="bfloat16")
    tuned = [choice.backend for _, choice in Cuda().choices(bf16)]
    assert tuned == [choice.backend for _, choice in Cuda().choices(KEY)]
    assert [choice.backend for _, choice in Cuda("seed").choices(bf16)] == [
        "cuda.dequantise_cublas"
    ]
    with pytest.raises(NoBackend, match="not float32"):
        Cuda().choices(replace(KEY, dtype="float32"))
