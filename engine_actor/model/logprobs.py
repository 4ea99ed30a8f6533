"""Logprobs of tokens: log-softmax of the model's own logits.

They say what the model thinks, not how we draw: taken before bias, penalties, temperature and
truncation (vLLM's default, `raw_logprobs`). So they are the same for every sampling setting, and
those of a prompt (echo) and of generated tokens can be compared and added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_actor.core.plan import TokenLogprobs

LOWEST = -9999.0
"""What minus infinity is reported as: JSON has no infinity (vLLM reports the same number)."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """Of R tokens and their `top` best alternatives, best first: chosen fp32 [R]; values fp32 and
    ids i64 [R, top]. On the logits' device, or on the host.
    """

    chosen: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    def entries(self, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """For the answer. tokens: those that were scored."""
        best = [
            tuple(zip(ids, values, strict=True))
            for ids, values in zip(self.ids.tolist(), self.values.tolist(), strict=True)
        ]
        return tuple(map(TokenLogprobs, tokens, self.chosen.tolist(), best))


def score_rows(logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
    """Logprob of targets[r], i64, and the `top` best alternatives for each row of fp32 logits
    [R, V], all beside the logits. Needs a second tensor of the logits' size.
    """
    scores = torch.log_softmax(logits, dim=-1)
    chosen = scores.gather(-1, targets.unsqueeze(-1)).clamp(min=LOWEST)[:, 0]
    values, ids = scores.topk(min(top, scores.shape[1]), dim=-1)
    return RowScores(chosen, values.clamp(min=LOWEST), ids)


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor | Sequence[int], top: int
) -> tuple[TokenLogprobs, ...]:
    """score_rows() on the host: call it in slices of at most 256 rows."""
    if logits.shape[0] == 0:
        return ()
    wanted = torch.as_tensor(targets, dtype=torch.int64, device=logits.device)
    return score_rows(logits, wanted, top).entries(wanted.tolist())
