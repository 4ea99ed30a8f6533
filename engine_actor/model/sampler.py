"""Logits to tokens.

Knows no text and no scheduling; keeps no state of a sequence. A row's token depends on that row
alone: every step is either exact (comparisons, integer sums) or works row by row. So the same seed
gives the same text alone and in any batch, wherever the logits are equal.

Order of operations: logit_bias and penalties (penalties.py), temperature, top_k, top_p, min_p, as
in Hugging Face transformers' generation and llama.cpp's default chain. top_p is measured on what
top_k leaves; min_p against the most probable token. Tokens as probable as the last one kept are
kept too, so the outcome never depends on the order of a sort.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import torch

from engine_actor import ops
from engine_actor.core.plan import SampledToken, TokenLogprobs
from engine_actor.model.device_sampling import DeviceSampling
from engine_actor.model.device_sampling import sampler_bytes as sampler_bytes
from engine_actor.model.inverse_cdf import invert
from engine_actor.model.logprobs import token_logprobs as token_logprobs
from engine_actor.model.penalties import SampleRow as SampleRow
from engine_actor.model.penalties import edit, is_edited
from engine_actor.model.penalties import needs_history as needs_history
from engine_actor.model.pending_sample import BrokenLogits as BrokenLogits
from engine_actor.model.pending_sample import PendingSample, SampledAtOnce, put_tokens
from engine_actor.model.random_draw import uniform, unseeded
from engine_actor.model.row_scan import argmax_rows, finite_at
from engine_actor.model.truncation import cutoffs

_ROWS_AT_ONCE = {"cpu": 1}
"""Rows drawn together. On the CPU one row's buffers stay in the cache, which is several times
faster than a batch; elsewhere (default below) it bounds the [rows, vocabulary] buffers."""
_ROWS_AT_ONCE_ON_DEVICE = 32


class Sampler:
    """Draws the next token of each row.

    `vocab_size`: ids at and above it are padding and are cut off (None: they are cut already).
    `base_seed`: what requests without a seed draw from; random by default, fixed in tests.
    """

    def __init__(self, vocab_size: int | None = None, base_seed: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._base_seed = secrets.randbits(64) if base_seed is None else base_seed
        self._device: DeviceSampling | None = None

    def begin(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        token_buffer: torch.Tensor | None = None,
        slots: Sequence[int] = (),
    ) -> PendingSample:
        """sample() in two halves: all work is enqueued on the current stream here, result() waits
        for the host's copy. The token of row i is also written to token_buffer[slots[i]] (i64 on
        the logits' device) in stream order; of a broken row that is the old one or any id. Raises
        torch.OutOfMemoryError where the device has no room to work in.

        On a GPU with our kernels the host waits for nothing here, and all calls come on one stream.
        """
        if not rows:
            return SampledAtOnce(())
        logits = self._cut(logits)
        device = self._device_sampling(logits)
        if device is not None:
            return device.begin(logits, rows, token_buffer, slots)
        try:
            tokens = self.sample(logits, rows)
        except BrokenLogits as error:
            # The frames hold the logits.
            return SampledAtOnce((), error.with_traceback(None))
        put_tokens(tokens, token_buffer, slots)
        return SampledAtOnce(tokens)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """One token for each row of fp32 logits [R, V], in the rows' order. The logits are left as
        they are. A batch of greedy rows that asks for nothing else is one argmax. Raises
        BrokenLogits where a row has no finite maximum; no row has a token then.
        """
        if not rows:
            return []
        logits = self._cut(logits)
        device = self._device_sampling(logits)
        if device is not None:
            return device.begin(logits, rows, None, ()).result()
        if all(_is_plain(row) for row in rows):
            tokens = _best(logits, rows)
            return [SampledToken(row.key, token) for row, token in zip(rows, tokens, strict=True)]
        edited = edit(logits, rows)
        tokens = self._choose(edited, rows)
        scores = _chosen_logprobs(logits, rows, tokens)
        return [
            SampledToken(row.key, token, scores.get(index))
            for index, (row, token) in enumerate(zip(rows, tokens, strict=True))
        ]

    def _cut(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._vocab_size is None else logits[:, : self._vocab_size]

    def _device_sampling(self, logits: torch.Tensor) -> DeviceSampling | None:
        """The kernels' way, where there is one for these logits."""
        if not logits.is_cuda or logits.dtype != torch.float32 or logits.stride(1) != 1:
            return None
        known, width = self._device, logits.shape[1]
        if known is None or known.device != logits.device or known.width != width:
            if ops.why_no_jit() is not None:
                return None
            known = self._device = DeviceSampling(logits.device, width, self._seed_of)
        return known

    def _choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        drawn = [index for index, row in enumerate(rows) if not row.sampling.greedy]
        greedy = [index for index, row in enumerate(rows) if row.sampling.greedy]
        tokens = [0] * len(rows)
        if greedy:
            _put(tokens, greedy, _best(_pick(logits, greedy), [rows[index] for index in greedy]))
        at_once = _ROWS_AT_ONCE.get(logits.device.type, _ROWS_AT_ONCE_ON_DEVICE)
        for start in range(0, len(drawn), at_once):
            part = drawn[start : start + at_once]
            _put(tokens, part, self._draw(_pick(logits, part), [rows[index] for index in part]))
        return tokens

    def _draw(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        temperatures = torch.tensor(
            [[row.sampling.temperature] for row in rows], dtype=torch.float32, device=logits.device
        )
        probabilities = torch.softmax(logits / temperatures, dim=-1)
        # One value that is not finite makes every probability of its row NaN.
        _require_finite(finite_at(probabilities, [0] * len(rows)), rows)
        points = [self._uniform(row) for row in rows]
        return invert(probabilities, cutoffs(probabilities, rows), points)

    def _uniform(self, row: SampleRow) -> float:
        return uniform(self._seed_of(row), row.position)

    def _seed_of(self, row: SampleRow) -> int:
        seed = row.sampling.seed
        return unseeded(self._base_seed, row.key) if seed is None else seed


def _best(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    tokens = argmax_rows(logits)
    _require_finite(finite_at(logits, tokens), rows)
    return tokens


def _require_finite(finite: Iterable[bool], rows: Sequence[SampleRow]) -> None:
    broken = [row.key for row, is_finite in zip(rows, finite, strict=True) if not is_finite]
    if broken:
        raise BrokenLogits(f"no finite logits for {broken}")


def _is_plain(row: SampleRow) -> bool:
    return row.sampling.greedy and row.sampling.logprobs is None and not is_edited(row)


def _chosen_logprobs(
    logits: torch.Tensor, rows: Sequence[SampleRow], tokens: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """Logprobs by row index, for the rows that want them, from the unedited logits."""
    wanted = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not wanted:
        return {}
    tops = [rows[index].sampling.logprobs or 0 for index in wanted]
    found = token_logprobs(_pick(logits, wanted), [tokens[index] for index in wanted], max(tops))
    return {
        index: TokenLogprobs(one.token, one.logprob, one.top[:top])
        for index, one, top in zip(wanted, found, tops, strict=True)
    }


def _pick(values: torch.Tensor, indices: list[int]) -> torch.Tensor:
    if len(indices) == values.shape[0]:
        return values
    if len(indices) == 1:  # a view: nothing is copied
        return values[indices[0] : indices[0] + 1]
    return values[indices]


def _put(tokens: list[int], indices: list[int], found: list[int]) -> None:
    for index, token in zip(indices, found, strict=True):
        tokens[index] = token
