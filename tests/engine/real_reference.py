"""What transformers says on the same weights along a text of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers


@torch.inference_mode()
def logits_along(
    model: transformers.PreTrainedModel, ids: Sequence[int], vocab_size: int
) -> torch.Tensor:
    """fp32 logits [len(ids), vocab_size] of one whole forward."""
    return model(torch.tensor([list(ids)])).logits[0, :, :vocab_size].float()


def greedy_choices(
    model: transformers.PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], vocab: int
) -> list[int]:
    """The model's best token after the prompt and after each of `tokens` but the last. By
    induction: where these are `tokens`, the model's own greedy text is `tokens`.
    """
    best = logits_along(model, [*prompt, *tokens], vocab).argmax(dim=-1).tolist()
    return best[len(prompt) - 1 : -1]
