"""How much: bytes to blocks, prompt tokens per step, and who gets how many. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

CROWD = 4
"""Prompts that wait at once, from which on their first tokens outweigh the pace of any streams."""
ROW_TILE = 64
"""Rows at which a product of many rows takes its next tile; larger tiles are multiples of it."""


def blocks_for_bytes(budget_bytes: int, block_bytes: int) -> int:
    """KV blocks that fit into a budget. Raises ValueError where not even one does."""
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be at least 1, got {block_bytes}")
    n_blocks = budget_bytes // block_bytes
    if n_blocks < 1:
        raise ValueError(f"{budget_bytes} bytes hold no KV block of {block_bytes} bytes")
    return n_blocks


def prefill_budget(chunk_tokens: int, while_decoding: int | None, n_decoding: int) -> int:
    """Prompt tokens of one step. A smaller chunk while streams decode keeps their tokens coming at
    an even pace; without any, the large chunk gives the first token sooner.
    """
    if n_decoding == 0 or while_decoding is None:
        return chunk_tokens
    return min(chunk_tokens, while_decoding)


def tokens_beside(budget: int, n_decoding: int) -> int:
    """Prompt tokens of a mixed forward: together with the decoded rows they fill whole tiles, 504
    and 8 rather than 512 and 8. A budget below a tile stays as it is.
    """
    if budget < ROW_TILE:
        return budget
    rows = max(budget // ROW_TILE, n_decoding // ROW_TILE + 1) * ROW_TILE
    return rows - n_decoding


def is_crowd(n_waiting: int, n_decoding: int) -> bool:
    """True where the prompts that wait outnumber the streams that decode, or are CROWD."""
    return n_waiting >= min(CROWD, n_decoding + 1)


def layers_of_slice(slice_tokens: int, chunk_tokens: int, n_layers: int) -> int:
    """Layers of a chunk in a range: at most as many as take about as long as slice_tokens through
    all of them, at least 1, and no more than the same number of ranges needs: of 300 tokens not 30
    layers and then 6, but 18 twice.
    """
    most = max(1, min(n_layers, n_layers * slice_tokens // chunk_tokens))
    n_ranges = -(-n_layers // most)
    return -(-n_layers // n_ranges)


def limited_blocks(base: int, fraction: float) -> int:
    """Blocks of a pool of `base` that a limit leaves; never none."""
    return max(1, int(base * fraction))


def share_tokens(wants: Sequence[int], budget: int) -> list[int]:
    """Split a token budget evenly; what one does not want goes to the others. Where there are fewer
    tokens than takers the first come first, so the caller rotates them. The sum never passes the
    budget and is the whole budget wherever that much is wanted.
    """
    shares = [0] * len(wants)
    open_ones = [index for index, want in enumerate(wants) if want > 0]
    while budget > 0 and open_ones:
        share = max(1, budget // len(open_ones))
        for index in open_ones:
            given = min(share, wants[index] - shares[index], budget)
            shares[index] += given
            budget -= given
        open_ones = [index for index in open_ones if shares[index] < wants[index]]
    return shares
