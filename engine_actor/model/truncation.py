"""Which tokens a row still draws from: top_k, then top_p, then min_p, as one cutoff probability.

Order as in Hugging Face transformers (`_get_logits_processor`) and llama.cpp's default chain. top_p
(Holtzman et al., 2020) is the smallest set of the most probable tokens whose sum reaches the share;
after top_k it is measured on the k tokens left. min_p (Nguyen et al., 2024) is relative to the most
probable token. Tokens exactly as probable as the last one kept are kept too, so the outcome does
not depend on the order in which a sort leaves equals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_actor.model.inverse_cdf import WEIGHT_ONE, weights
from engine_actor.model.penalties import SampleRow
from engine_actor.model.row_scan import largest_rows

_HEAD = 1024
"""On the CPU top_p first looks at this many tokens, and sorts all only where they fall short."""


def cutoffs(probabilities: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor | None:
    """The least probability each row draws from, fp32 [R, 1] (0: all), for fp32 probabilities
    [R, V]; None where no row truncates.
    """
    vocab = probabilities.shape[1]
    top_k = [k if 0 < (k := row.sampling.top_k) < vocab else vocab for row in rows]
    top_p = [row.sampling.top_p for row in rows]
    min_p = [row.sampling.min_p for row in rows]
    limited = [k for k in top_k if k < vocab]
    by_p = any(share < 1.0 for share in top_p)
    if not (limited or by_p or any(min_p)):
        return None
    count = max(limited, default=1)
    if any(share < 1.0 and k == vocab for share, k in zip(top_p, top_k, strict=True)):
        count = max(count, min(_HEAD, vocab)) if probabilities.device.type == "cpu" else vocab
    head = largest_rows(probabilities, count)
    k_left = _column(top_k, head, torch.int64)
    cutoff = torch.where(k_left < vocab, head.gather(-1, k_left.clamp(max=count) - 1), 0.0)
    if by_p:
        cutoff = torch.maximum(cutoff, _top_p_cutoff(probabilities, head, k_left, top_p))
    if any(min_p):
        cutoff = torch.maximum(cutoff, head[:, :1] * _column(min_p, head, torch.float32))
    return cutoff


def _top_p_cutoff(
    probabilities: torch.Tensor, head: torch.Tensor, k_left: torch.Tensor, top_p: Sequence[float]
) -> torch.Tensor:
    """[R, 1]; `head` [R, n] holds the n largest, descending; `k_left` [R, 1] is what top_k left."""
    vocab, count = probabilities.shape[1], head.shape[1]
    cumulative = weights(head).cumsum(dim=-1)
    shares = _column(top_p, head, torch.float64)
    of_k = cumulative.gather(-1, k_left.clamp(max=count) - 1)
    total = torch.where(k_left < vocab, of_k, int(WEIGHT_ONE))
    needed = (total.double() * shares).ceil().to(torch.int64).clamp_(min=1)
    last = torch.searchsorted(cumulative, needed)
    if count < vocab and bool(((last >= count) & (shares < 1.0) & (k_left == vocab)).any()):
        whole = largest_rows(probabilities, vocab)
        return _top_p_cutoff(probabilities, whole, k_left, top_p)
    return torch.where(shares < 1.0, head.gather(-1, last.clamp_(max=count - 1)), 0.0)


def _column(numbers: Sequence[float], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=like.device).unsqueeze(-1)
