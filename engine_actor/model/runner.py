"""From weights by canonical name to a ModelRunner: precisions chosen, every layer prepared.

Takes the weights one after the other, so that a checkpoint larger than the memory left for a second
copy can be streamed through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from engine_actor import ops
from engine_actor.errors import CheckpointError
from engine_actor.model.config import ModelConfig
from engine_actor.model.decoder import Decoder, DecoderLayer, build_layer
from engine_actor.model.forward import ModelRunner
from engine_actor.model.kv_store import KVStore
from engine_actor.model.layer_ops import LayerShape, OpSet, choose_ops, explain_layer
from engine_actor.model.layers.embed import Embedding
from engine_actor.model.memory import pool_maker, settle_allocator
from engine_actor.model.native_layers import NativeForward, build_native_forward
from engine_actor.model.precision import Precision, choose_precision

__all__ = ["ModelRunner", "Weight", "build_runner"]

Weight = torch.Tensor | ops.DenseLinear | ops.PackedLinear
LINEARS = frozenset({"qkv", "q", "k", "v", "o", "gate_up", "gate", "up", "down"})
NORMS = frozenset({"attn_norm", "mlp_norm", "q_norm", "k_norm"})


class _Parts:
    """Prepared weights as they come in."""

    def __init__(self, config: ModelConfig, precision: Precision, vocab_size: int) -> None:
        self.config = config
        self.precision = precision
        self.vocab_size = vocab_size
        self.linears: list[dict[str, ops.Linear]] = [{} for _ in range(config.n_layers)]
        self.norms: list[dict[str, torch.Tensor]] = [{} for _ in range(config.n_layers)]
        self.norm: torch.Tensor | None = None
        self.embedding: Embedding | None = None
        self.head: ops.Linear | None = None

    def take(self, name: str, weight: Weight) -> None:
        """Prepare one weight. Raises CheckpointError on a name that no model has."""
        weight = to_device(weight, self.precision.device)
        if name == "norm":
            self.norm = _norm(name, weight)
        elif name == "embed":
            self._take_embedding(weight)
        elif name == "head":
            self.head = self._prepare_head(weight)
        else:
            self._take_layer_weight(name, weight)

    def _take_layer_weight(self, name: str, weight: Weight) -> None:
        parts = name.split(".")
        known = len(parts) == 3 and parts[0] == "layers" and parts[1].isdigit()
        if not known or int(parts[1]) >= self.config.n_layers or parts[2] not in LINEARS | NORMS:
            raise CheckpointError(f"weight {name} belongs to no part of the model")
        index, leaf = int(parts[1]), parts[2]
        if leaf in NORMS:
            self.norms[index][leaf] = _norm(name, weight)
        else:
            prepare = ops.prepare_gate_up if leaf == "gate_up" else ops.prepare_linear
            self.linears[index][leaf] = prepare(_linear(name, weight), self.precision.linears)

    def _take_embedding(self, weight: Weight) -> None:
        self.embedding = Embedding(weight, self.precision.hidden_dtype)
        if self.config.tie_embeddings:
            self.head = self._prepare_head(weight)

    def _prepare_head(self, weight: Weight) -> ops.Linear:
        """Rows above the vocabulary are padding; they are cut before any work is done on them."""
        linear = _linear("head", weight)
        if isinstance(linear, ops.PackedLinear):
            cut: ops.DenseLinear | ops.PackedLinear = ops.slice_rows(linear, 0, self.vocab_size)
        else:
            bias = None if linear.bias is None else linear.bias[: self.vocab_size]
            cut = ops.DenseLinear(linear.weight[: self.vocab_size], bias)
        return ops.prepare_linear(cut, self.precision.head)

    def whole(self, op_set: OpSet) -> tuple[Embedding, Decoder, ops.Linear]:
        """Embedding, decoder and head. Raises CheckpointError naming a weight that never came."""
        layers = self._layers(op_set)
        if self.embedding is None:
            raise CheckpointError("embed is missing")
        if self.norm is None:
            raise CheckpointError("norm is missing")
        if self.head is None:
            raise CheckpointError("head is missing")
        norm = op_set.rows.norm(self.norm, self.config.rms_eps)
        add_norm = op_set.rows.add_norm(self.norm, self.config.rms_eps)
        decoder = Decoder(layers, norm, add_norm, self.precision.residual_dtype)
        return self.embedding, decoder, self.head

    def _layers(self, op_set: OpSet) -> list[DecoderLayer]:
        """All layers. Raises CheckpointError naming the first weight that never came."""
        built = []
        for index, (linears, norms) in enumerate(zip(self.linears, self.norms, strict=True)):
            try:
                built.append(build_layer(self.config, op_set, linears, norms))
            except KeyError as missing:
                raise CheckpointError(f"layers.{index}.{missing.args[0]} is missing") from None
        return built


@torch.inference_mode()
def build_runner(
    config: ModelConfig,
    weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]],
    *,
    device: torch.device | str = "cpu",
    numerics: str = "fast",
    kv_dtype: str = "auto",
    block_tokens: int = 16,
    dense_prefill_copy: str = "auto",
    native_kernels: str = "auto",
    used_vocab: int | None = None,
    packed: bool = False,
) -> ModelRunner:
    """A runner with an empty KV cache; call resize_kv before the first forward.

    weights: canonical names, as a mapping or as pairs one after the other. numerics: "fast" or
    "exact". kv_dtype: "auto", "fp32", "fp16", "bf16" or "int8" (per token and head, CUDA
    only). dense_prefill_copy: "auto", "on" or "off".
    native_kernels: "auto" (on a CPU, our compiled kernels where they can be built) or "off".
    used_vocab: ids the tokenizer can name; those above are padding and never leave the head.
    packed: no linear of a layer is dense, known before the weights come.
    Raises CheckpointError naming a weight that is missing or belongs nowhere, ValueError for
    options that contradict each other.
    """
    vocab_size = min(config.vocab_size, used_vocab or config.vocab_size)
    precision = choose_precision(
        config, torch.device(device), numerics, kv_dtype, dense_prefill_copy, native_kernels, packed
    )
    parts = _Parts(config, precision, vocab_size)
    with ops.loading_apart(precision.device):
        for name, weight in weights.items() if isinstance(weights, Mapping) else weights:
            parts.take(name, weight)
    op_set = _op_set(config, precision, block_tokens)
    embedding, decoder, head = parts.whole(op_set)
    _set_crossover(parts.linears)
    native = _native_forward(parts, block_tokens)
    device = precision.device
    settle_allocator(device)
    kv = KVStore(config, precision.kv_dtype, block_tokens, device, pool_maker(device))
    return ModelRunner(config, embedding, decoder, head, op_set, kv, device, vocab_size, native)


def _native_forward(parts: _Parts, block_tokens: int) -> NativeForward | str:
    """Where the policy allows it and every part fits it; else why not."""
    precision = parts.precision
    if precision.device.type != "cpu":
        return "on a GPU"
    if precision.linears.exact:
        return "numerics: exact"
    if not precision.linears.native:
        return "native_kernels: off"
    return build_native_forward(
        parts.config, parts.linears, parts.norms, precision.kv_dtype, block_tokens
    )


def _op_set(config: ModelConfig, precision: Precision, block_tokens: int) -> OpSet:
    """A model whose cache is in another half or full dtype than its activations takes the general
    ops. Raises ValueError for an INT8 cache that the kernels refuse.
    """
    is_int8 = precision.kv_dtype == torch.int8
    if not is_int8 and precision.kv_dtype != precision.hidden_dtype:
        return choose_ops(precision.linears.exact)
    shape = LayerShape(
        precision.device,
        precision.hidden_dtype,
        config.head_dim,
        block_tokens,
        bits=8 if is_int8 else 0,
        wide=precision.residual_dtype != precision.hidden_dtype,
    )
    refusals = [verdict.refusal for verdict in explain_layer(shape) if verdict.refusal]
    if is_int8 and refusals:
        raise ValueError(f"kv.dtype int8: {refusals[0]}")
    return choose_ops(precision.linears.exact, shape)


PROBED_WEIGHTS = 256_000_000
"""Weights the crossover is timed on at most: as fp16 more than any cache holds."""


def _set_crossover(linears: list[dict[str, ops.Linear]]) -> None:
    """Let every layer that has both forms use the one that is faster here for few rows."""
    both = [linear for layer in linears for linear in layer.values() if linear.has_both]
    probed, weights = [], 0
    for linear in both:
        if weights < PROBED_WEIGHTS and linear.packed is not None and linear.dense is not None:
            probed.append((linear.packed, linear.dense, linear.in_features))
            weights += linear.in_features * linear.out_features
    if probed:
        few = ops.crossover(probed)
        for linear in both:
            linear.few_rows = few


def to_device(weight: Weight, device: torch.device) -> Weight:
    """The same weight with all its tensors on `device`."""
    if isinstance(weight, torch.Tensor):
        return weight.to(device)
    return ops.moved(weight, device)


def _norm(name: str, weight: Weight) -> torch.Tensor:
    if not isinstance(weight, torch.Tensor):
        raise CheckpointError(f"{name} must be a vector")
    return weight.float()


def _linear(name: str, weight: Weight) -> ops.DenseLinear | ops.PackedLinear:
    return ops.DenseLinear(weight) if isinstance(weight, torch.Tensor) else weight
