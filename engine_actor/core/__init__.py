"""The torch-free study: scheduling, KV bookkeeping, stopping rules, metrics. Stdlib only."""
