"""ModelRunner: forward passes over paged KV, as the works see them (runner_protocol.Runner).

Knows tensors and layers; knows no request, no scheduler, no checkpoint file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine_actor import ops
from engine_actor.model.batch_inputs import BatchInputs
from engine_actor.model.config import ModelConfig
from engine_actor.model.decode_buckets import Bucket, DecodeBuckets
from engine_actor.model.decode_forward import DecodeForward
from engine_actor.model.decode_graphs import DecodeGraphs
from engine_actor.model.decoder import Decoder
from engine_actor.model.graph_capture import CudaCapture
from engine_actor.model.host_blocks import HostBlocks
from engine_actor.model.kv_store import KVStore
from engine_actor.model.layer_ops import CUDA_ATTENTION, OpSet
from engine_actor.model.layers.attention import StepTensors, WantedRows
from engine_actor.model.layers.embed import Embedding
from engine_actor.model.layers.rope import Rotary
from engine_actor.model.native_layers import NativeForward
from engine_actor.model.prefill_buckets import PrefillBuckets
from engine_actor.model.prefill_graphs import PrefillGraphs
from engine_actor.model.prompt_forward import PromptForward
from engine_actor.model.runner_protocol import GraphCounts

LAST_ROWS_ONLY = True
"""False: the last layer computes every row, as all others do."""
PLANS_KEPT = 4
"""Batches whose plan is remembered: a prefill run in layer ranges alternates with decodes."""


class ModelRunner:
    """Forward passes of one model on one device. Thread-bound: one engine loop calls it."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        decoder: Decoder,
        head: ops.Linear,
        op_set: OpSet,
        kv: KVStore,
        device: torch.device,
        vocab_size: int,
        native: NativeForward | str = "not asked for",
    ) -> None:
        self.config = config
        self.n_layers = config.n_layers
        self.vocab_size = vocab_size
        self.device = device
        self.kv = kv
        self._embedding = embedding
        self._decoder = decoder
        self._head = head
        self.op_set = op_set
        self._rotary = Rotary(config, device)
        self._layout = ops.HeadLayout(config.n_heads, config.n_kv_heads, config.head_dim**-0.5)
        window = config.sliding_window
        self._parts = embedding, decoder, head, op_set, kv, self._layout, window
        self._native = native if isinstance(native, NativeForward) else None
        self.layer_kernels = f"op by op ({native})" if isinstance(native, str) else str(native)
        self._plans: list[tuple[BatchInputs, StepTensors]] = []
        self._graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None

    @torch.inference_mode()
    def embed(self, inputs: BatchInputs) -> torch.Tensor:
        """Hidden states [T, hidden] before layer 0."""
        return self._embedding(inputs.ids)

    @torch.inference_mode()
    def run_layers(
        self, hidden: torch.Tensor, inputs: BatchInputs, first: int, last: int
    ) -> torch.Tensor:
        """Apply layers first..last-1, writing their KV. Returns the new [T, hidden]; `hidden`
        itself is unchanged, so a failed call can be repeated.
        """
        native = self._native
        if native is not None and native.takes(hidden.shape[0]):
            return native.run(hidden, self.kv.layers, inputs, self._rotary, first, last)
        return self._decoder.run(hidden, self.kv.layers, self._plan(inputs), first, last)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """fp32 logits [R, vocab_size] of the given rows of hidden."""
        # All rows wanted is the rule in decode; there is nothing to select then.
        chosen = hidden if rows.shape[0] == hidden.shape[0] else hidden.index_select(0, rows)
        return self._head(self._decoder.norm(chosen)).float()[:, : self.vocab_size]

    @torch.inference_mode()
    def last_logits(
        self, hidden: torch.Tensor, inputs: BatchInputs, first: int
    ) -> torch.Tensor | None:
        """See Runner. Behind the keys and values of the last layer only the rows of the logits are
        computed: of 36 layers of a long prompt that leaves 35.
        """
        rows, last = inputs.logit_rows, self.n_layers - 1
        native = self._native
        is_native = native is not None and native.takes(hidden.shape[0])
        all_wanted = inputs.wanted is None or len(inputs.wanted) == hidden.shape[0]
        if all_wanted or is_native or not LAST_ROWS_ONLY:
            hidden = self.run_layers(hidden, inputs, first, self.n_layers)
            return self.logits(hidden, rows) if len(rows) else None
        if first < last:
            hidden = self.run_layers(hidden, inputs, first, last)
        assert inputs.wanted is not None
        read = WantedRows(rows, self._attend(inputs, inputs.wanted)) if inputs.wanted else None
        hidden = self._decoder.last_rows(hidden, self.kv.layers, self._plan(inputs), read)
        return None if read is None else self.logits(hidden, rows)

    @torch.inference_mode()
    def prefill_logits(self, inputs: BatchInputs) -> torch.Tensor | None:
        """See Runner. After prepare_prefill() the next call may overwrite the logits."""
        graphs = self._prefill_graphs
        # A graph takes the card that it was captured for, so none where that is shared out now.
        if graphs is not None and not ops.is_card_limited():
            bucket = graphs.bucket_of(inputs)
            if bucket is not None:
                return graphs.logits(bucket, inputs)
        return self.last_logits(self.embed(inputs), inputs, 0)

    @torch.inference_mode()
    def decode_logits(self, inputs: BatchInputs) -> torch.Tensor:
        """fp32 logits [B, vocab_size] of a decode batch, one row a sequence. After prepare_decode()
        the next call overwrites them.
        """
        if self._graphs is not None:
            logits = self._graphs.logits(inputs)
            if logits is not None:
                return logits
        hidden = self.run_layers(self.embed(inputs), inputs, 0, self.n_layers)
        return self.logits(hidden, inputs.logit_rows)

    @property
    def graph_counts(self) -> GraphCounts:
        """Of the decode steps since prepare_decode()."""
        if self._graphs is not None:
            return self._graphs.counts
        return GraphCounts(self._why_no_buckets() or "not asked for")

    @property
    def prefill_graph_counts(self) -> GraphCounts:
        """Of the forwards of prompts since prepare_prefill()."""
        if self._prefill_graphs is not None:
            return self._prefill_graphs.counts
        return GraphCounts(self._why_no_buckets() or "switched off (prefill_graphs)")

    @torch.inference_mode()
    def prepare_prefill(self, max_rows: int, max_context: int) -> None:
        """Run small batches of prompts in buckets of fixed shape, as CUDA graphs. Does nothing
        where the model's ops make a plan for every forward.
        """
        if self._why_no_buckets() is not None:
            return
        forward = PromptForward(*self._parts)
        self._prefill_graphs = PrefillGraphs(
            PrefillBuckets.up_to(max_rows, max_context, ops.StagedPrompts.SEQUENCES),
            forward.of,
            self._rotary,
            self.kv.addresses,
            CudaCapture(self.device),
            vocab_size=self.vocab_size,
            head_dim=self.config.head_dim,
            block_tokens=self.kv.block_tokens,
            device=self.device,
        )

    @torch.inference_mode()
    def warm_prefill(self) -> None:
        """Compile, load and capture every bucket (PrefillGraphs.warm_up)."""
        if self._prefill_graphs is not None:
            self._prefill_graphs.warm_up()

    @torch.inference_mode()
    def prepare_decode(self, max_rows: int, max_context: int, graphs: bool) -> None:
        """Run decode batches of up to so many rows and keys in buckets of fixed shape, as CUDA
        graphs where `graphs`. Does nothing where the model's ops make a plan for every step.
        """
        if self._why_no_buckets() is not None:
            return
        forward = DecodeForward(*self._parts)
        self._graphs = DecodeGraphs(
            DecodeBuckets.up_to(max_rows, max_context),
            forward.run,
            forward.plan,
            self._rotary,
            self.kv.addresses,
            CudaCapture(self.device) if graphs else None,
            vocab_size=self.vocab_size,
            head_dim=self.config.head_dim,
            block_tokens=self.kv.block_tokens,
            device=self.device,
            reason=None if graphs else "switched off (cuda_graphs: false)",
        )

    @torch.inference_mode()
    def warm_decode(self) -> None:
        """Compile, load and capture each number of rows at the shortest context."""
        if self._graphs is not None:
            buckets = self._graphs.buckets
            for rows in reversed(buckets.rows):
                self._graphs.warm_up(Bucket(rows, buckets.contexts[0]))

    @torch.inference_mode()
    def warm_thread(self, most_rows: int) -> None:
        """See Runner: the plans of a library's attention are a thread's own."""
        if self.op_set.attention is CUDA_ATTENTION and self.config.sliding_window is None:
            shape = self._layout.queries, self._layout.kv, self.config.head_dim
            dtype = self._embedding(torch.zeros(1, dtype=torch.int64, device=self.device)).dtype
            ops.prepare_lengths(*shape, dtype, self.device, most_rows)

    def _why_no_buckets(self) -> str | None:
        if self.device.type != "cuda":
            return "not on a GPU"
        if self.op_set.static_plan is None:
            return "the general ops plan every step anew"
        return None

    def reserve_kv(self, capacity: int) -> None:
        """Choose the addresses of a cache of up to `capacity` blocks, empty where it moves."""
        self._change_kv(lambda: self.kv.reserve(capacity))

    def resize_kv(self, n_blocks: int) -> None:
        """Grow or shrink the KV tensors to n_blocks, keeping the blocks that stay."""
        self._change_kv(lambda: self.kv.resize(n_blocks))

    @torch.inference_mode()
    def _change_kv(self, change: Callable[[], None]) -> None:
        try:
            change()
        finally:
            # A change that failed half way may have moved layers too.
            self._plans.clear()
            for graphs in (self._graphs, self._prefill_graphs):
                if graphs is not None:
                    graphs.cache_moved()

    def host_blocks(self, n_slots: int) -> HostBlocks:
        """Memory of the host for n_slots blocks of the KV cache."""
        return HostBlocks(self.kv, n_slots)

    def kv_checksum(self, blocks: tuple[int, ...]) -> int:
        """A checksum of the named blocks' bytes."""
        return self.kv.checksum(blocks)

    def _plan(self, inputs: BatchInputs) -> StepTensors:
        for known, plan in self._plans:
            if known is inputs:
                return plan
        plan = self._make_plan(inputs)
        self._plans = [(inputs, plan), *self._plans[: PLANS_KEPT - 1]]
        return plan

    def _make_plan(self, inputs: BatchInputs) -> StepTensors:
        self._rotary.reach(max(inputs.kv_lens))
        cos, sin = self._rotary.at(inputs.positions, torch.float32)
        attend = self._attend(inputs, range(len(inputs.q_lens)), inputs.q_lens)
        if self.op_set.prepare_store is not None:
            store = self.op_set.prepare_store(cos, sin, inputs.slots, self._layout)
            return StepTensors(None, None, attend, store)
        rotate = self.op_set.rows.rotation(cos, sin, self._layout)
        return StepTensors(rotate, ops.plan_write(inputs.slots, inputs.host_slots()), attend)

    def _attend(
        self, inputs: BatchInputs, sequences: Sequence[int], q_lens: Sequence[int] | None = None
    ) -> ops.AttentionPlan:
        """Attention of those sequences' last rows. q_lens: of more than one row each."""
        return self.op_set.plan(
            [1] * len(sequences) if q_lens is None else q_lens,
            [inputs.kv_lens[index] for index in sequences],
            [inputs.block_lists[index] for index in sequences],
            inputs.block_tokens,
            self.device,
            self.config.sliding_window,
        )
