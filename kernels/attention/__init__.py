"""Attention over a paged KV cache: the op, its reference and its backends."""
