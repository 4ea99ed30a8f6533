"""The model on torch: layers, families, KV tensors, runner, sampler. Knows nothing of requests."""
