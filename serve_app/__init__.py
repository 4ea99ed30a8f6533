"""HTTP in, SSE out, OpenAI's words. Knows messages to and from the engine, no tensors."""

__version__ = "0.1.0"
