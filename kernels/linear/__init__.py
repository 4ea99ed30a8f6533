"""y = x @ W.T + bias: the op, its reference and its backends, one file each."""
