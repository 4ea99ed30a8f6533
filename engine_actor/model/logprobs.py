"""Logprobs of tokens: log-softmax of the model's own logits.

They say what the model thinks, not how we draw: taken before bias, penalties, temperature and
truncation (vLLM's default, `raw_logprobs`). So they are the same for every sampling setting, and
those of a prompt (echo) and of generated tokens can be compared and added up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_actor.core.plan import TokenLogprobs

LOWEST = -9999.0
"""What minus infinity is reported as: JSON has no infinity (vLLM reports the same number)."""


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor | Sequence[int], top: int
) -> tuple[TokenLogprobs, ...]:
    """Logprob of targets[r] and the `top` best alternatives (best first) for each row of fp32
    logits [R, V]. Needs a second tensor of the logits' size: call it in slices of at most 256 rows.
    """
    if logits.shape[0] == 0:
        return ()
    scores = torch.log_softmax(logits, dim=-1)
    wanted = torch.as_tensor(targets, dtype=torch.int64, device=logits.device).unsqueeze(-1)
    chosen = scores.gather(-1, wanted).clamp(min=LOWEST)[:, 0].tolist()
    tokens = wanted[:, 0].tolist()
    best: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if top:
        values, ids = scores.topk(min(top, scores.shape[1]), dim=-1)
        pairs = zip(ids.tolist(), values.clamp(min=LOWEST).tolist(), strict=True)
        best = [tuple(zip(row_ids, row, strict=True)) for row_ids, row in pairs]
    return tuple(map(TokenLogprobs, tokens, chosen, best))
