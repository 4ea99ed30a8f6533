"""Perplexity of a checkpoint on a text, and its KL divergence from a source, a layer at a time.

A text is chopped into rows of equal length; every position but a row's last counts. KL is
sum p_source * (log p_source - log p_model) over the whole vocabulary, in nats, averaged over
positions; perplexity is exp of the mean negative log likelihood of the next token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine_actor.load.checkpoint import Checkpoint
from engine_actor.load.formats.base import Weight
from engine_actor.load.progress import Progress
from engine_actor.ops import DenseLinear, PackedLinear, dequantise, gather_rows, slice_rows
from engine_actor.quant.forward import LayerForward
from engine_actor.quant.layer_pass import LayerPass
from engine_actor.quant.recipe import Method
from engine_actor.quant.stream import LayerReader, on_device

LOGITS_AT_ONCE = 1 << 26
"""Logits that exist at once, of each of two models: 256 MiB as fp32."""
HEAD_SLICE = 1 << 14
"""Rows of the head that are dequantised at once."""


@dataclass(frozen=True, slots=True)
class Score:
    """perplexity; kl in nats and top1, the share of positions where both models' first choice is
    the same: None without a source; positions: how many were counted.
    """

    perplexity: float
    kl: float | None
    top1: float | None
    positions: int


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A model's last hidden states, normed, fp32 [S, T, hidden], and the head that reads them."""

    hidden: torch.Tensor
    head: Weight


def embed(table: Weight, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states before layer 0, fp32 [S, T, hidden]. tokens i64 [S, T]."""
    if isinstance(table, PackedLinear):
        rows = gather_rows(table, tokens.flatten())
    else:
        weight = table.weight if isinstance(table, DenseLinear) else table
        rows = weight.index_select(0, tokens.flatten()).float()
    return rows.view(*tokens.shape, -1)


@torch.inference_mode()
def run_checkpoint(
    checkpoint: Checkpoint, tokens: torch.Tensor, device: torch.device, progress: Progress
) -> Finished:
    """tokens [S, T] through a whole checkpoint, one layer in memory at a time."""
    config = checkpoint.config
    reader = LayerReader(checkpoint, device)
    forward = LayerForward(config, tokens.shape[1], device)
    layers = LayerPass(forward, Method(), device)
    table = reader.top("embed")
    hidden = embed(table, tokens)
    for index in range(config.n_layers):
        progress("layers", index, config.n_layers)
        layers.advance(hidden, reader.layer(index))
    progress("layers", config.n_layers, config.n_layers)
    return finish(hidden, reader, forward, table if config.tie_embeddings else reader.top("head"))


def finish(
    hidden: torch.Tensor, reader: LayerReader, forward: LayerForward, head: Weight
) -> Finished:
    """Apply the norm before the head."""
    norm = reader.top("norm")
    assert isinstance(norm, torch.Tensor)
    return Finished(forward.norm(hidden, norm.to(hidden.device)), head)


@torch.inference_mode()
def score(
    model: Finished,
    source: Finished | None,
    tokens: torch.Tensor,
    used: int,
    device: torch.device | None = None,
) -> Score:
    """Compare on tokens [S, T]; `used`: ids that a tokenizer can name, those above do not count.
    device: where the logits are computed, by default where the hidden states are.
    """
    where = model.hidden.device if device is None else device
    nll = kl = top1 = 0.0
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    rows = max(1, LOGITS_AT_ONCE // used)
    flat = model.hidden[:, :-1].reshape(count, -1)
    wanted = tokens[:, 1:].reshape(count).to(where)
    reference = None if source is None else source.hidden[:, :-1].reshape(count, -1)
    head = on_device(model.head, where)
    their_head = None if source is None else on_device(source.head, where)
    for first in range(0, count, rows):
        part = slice(first, first + rows)
        ours = torch.log_softmax(logits(flat[part].to(where), head, used), -1)
        nll -= float(ours.gather(-1, wanted[part].unsqueeze(-1)).double().sum())
        if reference is None or their_head is None:
            continue
        theirs = torch.log_softmax(logits(reference[part].to(where), their_head, used), -1)
        top1 += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        kl += float((theirs.exp() * (theirs - ours)).sum(-1).double().sum())
    perplexity = math.exp(min(nll / count, 700.0))
    if source is None:
        return Score(perplexity, None, None, count)
    return Score(perplexity, kl / count, top1 / count, count)


def logits(rows: torch.Tensor, head: Weight, used: int) -> torch.Tensor:
    """fp32 [R, used] of rows [R, hidden]; the head is dequantised a slice at a time."""
    parts = [rows @ part.to(rows.device).t() for part in _slices(head, used)]
    return torch.cat(parts, dim=-1)


def _slices(head: Weight, used: int) -> Iterator[torch.Tensor]:
    for first in range(0, used, HEAD_SLICE):
        last = min(first + HEAD_SLICE, used)
        if isinstance(head, PackedLinear):
            yield dequantise(slice_rows(head, first, last))
        else:
            weight = head.weight if isinstance(head, DenseLinear) else head
            yield weight[first:last].float()
