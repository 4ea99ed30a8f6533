"""The typed configuration: every knob, its default and its meaning. Unknown keys are refused.

Pure pydantic; reads no file and no environment (see load.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSource(_Strict):
    """Which weights to serve."""

    path: str = Field(
        "demo", min_length=1, description="demo, a checkpoint folder, or a Hugging Face Hub id"
    )
    revision: str | None = Field(None, description="Hub revision; ignored for a folder")
    served_name: str | None = Field(None, description="name in /v1/models; default: made from path")
    max_model_len: int | None = Field(
        None, ge=1, description="context limit; default: the checkpoint's"
    )


class KVConfig(_Strict):
    """Paged KV cache."""

    block_tokens: int = Field(16, ge=1, le=256, description="tokens per block")
    dtype: Literal["auto", "fp32", "fp16", "bf16", "int8"] = Field(
        "auto", description="auto: the compute dtype; int8: a scale per token and head, GPU only"
    )
    budget_mb: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="most memory the KV pool may take, MiB"
    )
    prefix_cache: bool = Field(True, description="share full blocks of equal prefixes")
    host_budget_mb: int = Field(
        0,
        ge=0,
        description="host memory that keeps evicted prefix blocks, page-locked for a GPU, MiB; "
        "0: none",
    )


class FaultRule(_Strict):
    """One injected out-of-memory fault, for drills and tests (see docs/usage/faults.md)."""

    stage: Literal["prepare", "launch", "sample", "finish"]
    request: str | None = Field(None, description="trace id of the request that is hit")
    min_rows: int | None = Field(
        None, ge=1, description="hit any work with at least this many rows"
    )
    times: Annotated[int, Field(ge=1)] | Literal["always"] = 1


MOST_SECONDS = 1e9
"""Thirty years. No wait of Python's takes infinity."""
MOST_THREADS = 4096
"""More than any machine has; torch fails on a number that no C int holds."""
CHUNK_TOKENS = 256
"""Of a CPU, and the least that is chosen for a GPU."""


class EngineConfig(_Strict):
    """One engine actor."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where a GPU is usable"
    )
    num_engines: int = Field(1, ge=1, description="engine actors, one GPU each")
    numerics: Literal["fast", "exact"] = Field(
        "fast", description="exact: fp32, batch-invariant; the same tokens in any batch"
    )
    cpu_threads: int | None = Field(
        None,
        ge=1,
        le=MOST_THREADS,
        description="torch threads; default: physical cores less one",
    )
    dense_prefill_copy: Literal["auto", "on", "off"] = Field(
        "auto",
        description="CPU: keep dense weights for prompts (2 to 4 bytes per parameter)",
    )
    native_kernels: Literal["auto", "off"] = Field(
        "auto",
        description="CPU: our own kernels, compiled on this machine at first use; off: torch's",
    )
    max_num_seqs: int = Field(128, ge=1, description="most sequences running at once")
    max_queue: int = Field(256, ge=1, description="most sequences waiting; beyond it 429")
    max_partial_prefills: int = Field(
        4, ge=1, description="prompts in prefill at once (1: the seed's)"
    )
    prefill_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="most prompt tokens a step; default: 256, on a GPU up to 8192 by its memory",
    )
    prefill_chunk_tokens_while_decoding: int | None = Field(
        None, ge=1, description="smaller budget while a stream decodes; default: the same"
    )
    prefill_slice_tokens: int | None = Field(
        None,
        ge=1,
        description="a longer chunk runs by ranges of layers while a stream decodes; default: 256 "
        "where a GPU chose a longer chunk, else off",
    )
    prefill_burst_tokens: int | None = Field(
        None,
        ge=1,
        description="prompts that wait in a crowd: as many as end within so many tokens go in one "
        "step beside streams; default: 2048 where the slice was chosen, else off",
    )
    async_steps: bool = Field(
        True,
        description="GPU: launch a step before the tokens of the last one are on the host",
    )
    pipeline_depth: Literal[0, 1] = Field(
        1, description="steps planned ahead where async_steps has an effect"
    )
    priority_ageing_s: float = Field(
        5.0, gt=0, le=MOST_SECONDS, description="waiting this long raises a request by one"
    )
    reserve_memory_mb: int = Field(384, ge=0, description="device memory left alone, MiB")
    memory_limit_mb: int | None = Field(
        None,
        ge=1,
        description="GPU: torch, the KV pool and the reserve together, MiB; default: the card's",
    )
    enable_prefill_decode_overlap: bool = Field(
        True, description="decode and prefill of a step on two streams where the device has them"
    )
    cuda_graphs: bool = Field(
        True, description="GPU: decode steps as captured graphs, one a bucket of shapes"
    )
    prefill_graphs: bool | None = Field(
        None,
        description="GPU: small prompt chunks as captured graphs, too, and those of a burst where "
        "the engine has 64 GiB; default: where cuda_graphs is on and it has 20",
    )
    overlap_mode: Literal["serial", "two_streams", "two_streams_capped", "green", "mixed"] = Field(
        "two_streams",
        description="how they share a GPU; what it cannot do falls back, status says why",
    )
    overlap_max_ctas: int | None = Field(
        None,
        ge=1,
        description="multiprocessors of a prefill beside a decode (capped, green); default: 3/4",
    )
    drain_s: float = Field(
        60.0, ge=0, le=MOST_SECONDS, description="how long a stop waits for open streams"
    )
    lease_s: float = Field(
        10.0, gt=0, le=MOST_SECONDS, description="an ingress silent this long is dead"
    )
    watchdog_s: float = Field(
        120.0, gt=0, le=MOST_SECONDS, description="a step longer than this ends the process"
    )
    kv: KVConfig = KVConfig()
    faults: tuple[FaultRule, ...] = Field((), description="injected faults; empty in production")

    @property
    def chunk_tokens(self) -> int:
        """prefill_chunk_tokens, and what stands for it where it is left open."""
        return self.prefill_chunk_tokens or CHUNK_TOKENS


class HttpConfig(_Strict):
    """The HTTP face."""

    keep_alive_s: float = Field(
        15.0, gt=0, le=MOST_SECONDS, description="SSE comment while a stream is silent"
    )
    max_logprobs: int = Field(5, ge=0, le=20)
    max_body_mb: int = Field(16, ge=1)
    stream_buffer_tokens: int = Field(
        4096,
        ge=1,
        description="tokens held for a client that does not read; beyond it, cancelled",
    )
    slow_client_s: float = Field(
        30.0, gt=0, le=MOST_SECONDS, description="longest wait for one write to a client"
    )
    unsupported: Literal["refuse", "warn"] = Field(
        "refuse", description="known but unsupported parameters"
    )


class AppArgs(_Strict):
    """`args:` of serve_config.yaml."""

    model: ModelSource = ModelSource()
    engine: EngineConfig = EngineConfig()
    http: HttpConfig = HttpConfig()
