"""Packers, unpackers and the one in-memory form of a quantised linear layer. Torch, bit exact."""
