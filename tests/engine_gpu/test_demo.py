"""The real demo model on a GPU: the CPU's greedy tokens by the rule of decisions.md section 1, and
the same text however the card is shared.

tests/golden/demo_greedy.json holds the texts of the exact CPU engine, which tests/engine/
test_demo_exact.py holds to transformers. They are not believed here: one forward of the exact
engine along each says that every token is its best.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine_actor.core.plan import OverlapMode, PrefillChunk
from engine_actor.model.layer_ops import CUDA_ATTENTION
from engine_actor.work.inputs import build_prefill
from tests.engine.real_engine import BLOCK, ForcedSampler, Loaded, load, texts

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

GOLDEN = Path(__file__).parents[1] / "golden" / "demo_greedy.json"
EXCUSED_AT_MOST = 0.01


@pytest.fixture(scope="module")
def golden() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and 64 tokens after each."""
    record = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return record["prompts"], record["tokens"]


@pytest.fixture(scope="module")
def gpu(demo_gguf: Path) -> Loaded:
    """As a server runs it: packed weights, the kernels of a layer, decode steps from graphs."""
    loaded = load(demo_gguf, "fast", "cuda")
    assert loaded.runner.op_set.attention is CUDA_ATTENTION
    loaded.runner.prepare_decode(16, 512, graphs=True)
    return loaded


def reference_logits(cpu: Loaded, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """f32[len(text), vocab]: what the exact engine says before each token of the text."""
    tokens = (*prompt, *text[:-1])
    blocks = tuple(range(-(-len(tokens) // BLOCK)))
    cpu.runner.resize_kv(len(blocks))
    chunk = PrefillChunk(("c", 0), 0, len(tokens), tokens, blocks, True)
    inputs = build_prefill([chunk], BLOCK, cpu.runner.device)
    hidden = cpu.runner.run_layers(cpu.runner.embed(inputs), inputs, 0, cpu.runner.n_layers)
    rows = torch.arange(len(prompt) - 1, len(tokens))
    return cpu.runner.logits(hidden, rows)[:, : cpu.runner.vocab_size]


def forced(
    gpu: Loaded, prompts: Sequence[list[int]], tokens: Sequence[list[int]]
) -> dict[tuple[int, int], torch.Tensor]:
    """Logits by (rid, step) with the reference's tokens fed back."""
    sampler = ForcedSampler(gpu.runner.vocab_size, tokens, [len(prompt) for prompt in prompts])
    engine = gpu.engine(sampler=sampler)
    assert texts(engine, prompts, len(tokens[0])) == list(tokens)
    return sampler.logits


def test_greedy_tokens_are_the_cpus(
    gpu: Loaded,
    demo_gguf: Path,
    golden: tuple[list[list[int]], list[list[int]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The reference's tokens are forced; our best is the reference's, or the gap between its two
    best is below the largest difference between M = 1 and M = 16 on this card."""
    prompts, right = golden
    steps = len(right[0])
    cpu = load(demo_gguf, "exact")
    alone = forced(gpu, prompts[:1], right[:1])
    batch = forced(gpu, [prompts[i % 4] for i in range(16)], [right[i % 4] for i in range(16)])
    bound = max(float((alone[0, step] - batch[0, step]).abs().max()) for step in range(steps))
    assert bound < 1.0
    excused = wrong = 0
    for rid, (prompt, text) in enumerate(zip(prompts, right, strict=True)):
        best = reference_logits(cpu, prompt, text).topk(2)
        assert best.indices[:, 0].tolist() == text
        for run in (batch, alone) if rid == 0 else (batch,):
            ours = [int(run[rid, step].argmax()) for step in range(steps)]
            gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
            others = [step for step in range(steps) if ours[step] != text[step]]
            excused += len(others)
            wrong += sum(gaps[step] >= bound for step in others)
    free = texts(gpu.engine(), prompts, steps)
    same = sum(mine == text for mine, text in zip(free, right, strict=True))
    share = excused / (5 * steps)
    with capsys.disabled():
        print(
            f"\ndemo on {torch.cuda.get_device_name()}: bound {bound:.3f}, excused {share:.2%} of "
            f"{5 * steps}, {same} of {len(right)} free texts are the reference's"
        )
    assert wrong == 0
    assert share <= EXCUSED_AT_MOST
    assert gpu.runner.graph_counts.replays > 0


@pytest.mark.parametrize("mode", ["two_streams", "two_streams_capped", "green"])
def test_however_the_card_is_shared_the_text_is_the_same(
    gpu: Loaded, golden: tuple[list[list[int]], list[list[int]]], mode: str
) -> None:
    """Only the schedule differs, so the bits are equal."""
    prompts, _ = golden
    crowd = [prompts[i % 4][: 5 + 7 * i] for i in range(16)]
    serial, shared = (
        texts(gpu.engine(prefill_chunk_tokens=16, overlap_mode=each), crowd, 32)
        for each in (OverlapMode.SERIAL.value, mode)
    )
    assert shared == serial
