"""The torch-free study: scheduling, KV bookkeeping, stopping rules, metrics. Standard library only."""
