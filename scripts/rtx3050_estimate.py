"""What the RTX 3050 Laptop could do at best, on paper: the page docs/kernels/rtx3050_estimate.md.

Bytes and FLOPs are those of the linear op's spec; the card's figures are NVIDIA's. Nothing here was
measured on such a card but the seed's own times, which stand beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kernels.linear.op import LINEAR
from kernels.spec.op import OpKey

MULTIPROCESSORS = 16
"""2,048 CUDA cores, 128 each."""
CLOCK_GHZ = 1.5
"""Boost clocks are 1.06 to 1.74 GHz by the laptop's power limit; the middle is taken."""
BANDWIDTH = 192e9
"""128 bits of GDDR6 at 12 Gbit/s, bytes a second."""
TENSOR_FLOPS = MULTIPROCESSORS * 512 * CLOCK_GHZ * 1e9
"""Dense fp16 with fp32 sums: 512 FLOPs a clock and multiprocessor on GA10x."""
CUDA_FLOPS = MULTIPROCESSORS * 128 * 2 * CLOCK_GHZ * 1e9
"""fp32 on the CUDA cores."""
READING, MULTIPLYING = 0.80, 0.60
"""The part of the floor we expect to reach where DRAM and where the tensor cores are the limit: an
estimate. A W3 or W4 fragment costs about 0.13 warp instructions a byte, the card issues about 0.5
a byte of its bandwidth, so few rows should run at the speed of DRAM; 0.6 is what mma.sync kernels
reach on larger Ampere cards.
"""
LAYER = OpKey("linear", "cuda", "float16", group=128, sm=86)
MODELS = {
    "3B, W4": (36, ((2560, 2048), (2048, 2048), (22016, 2048), (2048, 11008)), (4, 4, 4, 4), 2048),
    "7B, W4 attention and W3 MLP": (
        28,
        ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
        (4, 4, 3, 3),
        3584,
    ),
}
"""Layers, fused linears (qkv, o, gate and up, down), their bits, hidden width. Qwen2.5."""
VOCABULARY = {2048: 151936, 3584: 152064}
SEED_MS = (
    (4, 30, 5632, 2048, "tiled", 0.736),
    (4, 30, 2048, 5632, "tiled", 0.834),
    (4, 30, 3584, 18944, "tiled", 4.632),
    (3, 30, 37888, 3584, "tiled", 6.081),
    (3, 30, 3584, 18944, "tiled", 3.553),
    (3, 2, 5632, 2048, "grid.y = batch", 0.1306),
    (3, 4, 5632, 2048, "grid.y = batch", 0.2543),
    (3, 8, 5632, 2048, "grid.y = batch", 0.5099),
)


@dataclass(frozen=True)
class Floor:
    """One call at best. reading, multiplying: microseconds of DRAM and of the tensor cores."""

    bytes: int
    flops: int

    @property
    def reading(self) -> float:
        return self.bytes / BANDWIDTH * 1e6

    @property
    def multiplying(self) -> float:
        return self.flops / TENSOR_FLOPS * 1e6

    @property
    def microseconds(self) -> float:
        return max(self.reading, self.multiplying)

    @property
    def limit(self) -> str:
        return "DRAM" if self.reading >= self.multiplying else "tensor cores"

    @property
    def expected(self) -> float:
        """Each part at the share of the floor that we expect of it."""
        return max(self.reading / READING, self.multiplying / MULTIPLYING)


def floor_of(bits: int, rows: int, n: int, k: int) -> Floor:
    """Of one linear with fp16 activations; groups of 128, except 8 bits, one scale a row."""
    key = replace(LAYER, bits=bits, m=rows, n=n, k=k, group=k if bits == 8 else LAYER.group)
    assert LINEAR.bytes_of is not None
    assert LINEAR.flops_of is not None
    return Floor(LINEAR.bytes_of(key), LINEAR.flops_of(key))


def estimate_page() -> str:
    """The whole page."""
    return "\n".join([*_head(), *_shapes(), "", *_seed(), "", *_steps()]) + "\n"


def _head() -> Sequence[str]:
    return (
        "# RTX 3050 Laptop (4 GB, sm_86): a paper estimate",
        "",
        "Written by `python scripts/write_kernel_docs.py` from the bytes and FLOPs of the linear",
        "op's spec; a test says when it is stale. No such card was at hand: only the seed's times,",
        "marked so, were measured on one.",
        "",
        f"Card: {MULTIPROCESSORS} multiprocessors at {CLOCK_GHZ} GHz, {BANDWIDTH / 1e9:.0f} GB/s,",
        f"{TENSOR_FLOPS / 1e12:.1f} TFLOP/s in fp16 with fp32 sums (tensor cores),",
        f"{CUDA_FLOPS / 1e12:.1f} TFLOP/s in fp32 (CUDA cores). Floor: the longer of bytes over",
        "bandwidth and FLOPs over tensor-core rate. Expected: the floor at",
        f"{READING:.0%} (DRAM) or {MULTIPLYING:.0%} (tensor cores).",
        "",
    )


def _shapes() -> Iterator[str]:
    yield "| weights | rows | N x K | MB | GFLOP | floor us | limit | expected us |"
    yield "|---|---|---|---|---|---|---|---|"
    for bits, sizes in ((4, MODELS["3B, W4"][1]), (3, ((37888, 3584), (3584, 18944)))):
        for n, k in sizes:
            for rows in (1, 8, 32, 128, 512):
                floor = floor_of(bits, rows, n, k)
                yield (
                    f"| W{bits} | {rows} | {n}x{k} | {floor.bytes / 1e6:.2f} "
                    f"| {floor.flops / 1e9:.2f} | {floor.microseconds:.1f} | {floor.limit} "
                    f"| {floor.expected:.0f} |"
                )


def _seed() -> Iterator[str]:
    yield "The seed's own times beside that floor (its article, sections 2.7 and 3.2):"
    yield ""
    yield (
        "| weights | rows | N x K | kernel | seed us | floor us | of the floor | of bandwidth "
        "| expected us |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for bits, rows, n, k, kernel, milliseconds in SEED_MS:
        floor = floor_of(bits, rows, n, k)
        share = floor.microseconds / (milliseconds * 1e3)
        yield (
            f"| W{bits} | {rows} | {n}x{k} | {kernel} | {milliseconds * 1e3:.0f} "
            f"| {floor.microseconds:.1f} | {share:.1%} "
            f"| {floor.reading / (milliseconds * 1e3):.1%} | {floor.expected:.0f} |"
        )


def _steps() -> Iterator[str]:
    yield "One decoded token's linears, an INT8 head included (KV, norms and launches not):"
    yield ""
    yield "| model | weights MB | floor ms | floor tokens/s | expected ms | expected tokens/s |"
    yield "|---|---|---|---|---|---|"
    for name, (layers, sizes, widths, hidden) in MODELS.items():
        parts = [floor_of(b, 1, n, k) for (n, k), b in zip(sizes, widths, strict=True)] * layers
        parts.append(floor_of(8, 1, VOCABULARY[hidden], hidden))
        floor = sum(part.microseconds for part in parts) / 1e3
        expected = sum(part.expected for part in parts) / 1e3
        total = sum(part.bytes for part in parts) / 1e6
        yield (
            f"| {name} | {total:.0f} | {floor:.2f} | {1e3 / floor:.0f} "
            f"| {expected:.2f} | {1e3 / expected:.0f} |"
        )
    yield ""
    yield "The seed reports 11.2 tokens/s for the 3B model (article section 5.1)."
