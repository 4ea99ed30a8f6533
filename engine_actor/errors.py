"""Errors with stable codes. The code travels to the client; the detail stays in our log."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors this engine raises on purpose."""

    code = "internal_error"


class OutOfMemory(EngineError):
    """One request did not fit; the engine lives on."""

    code = "out_of_memory"


class Overloaded(EngineError):
    """The queue is full; try again later."""

    code = "overloaded"


class Unavailable(EngineError):
    """No engine, or it is draining."""

    code = "unavailable"


class EngineRestarted(EngineError):
    """The engine died under a running request."""

    code = "engine_restarted"


class DeadlineExceeded(EngineError):
    """The request's own deadline passed."""

    code = "deadline_exceeded"


class ContextLengthExceeded(EngineError):
    """Prompt plus max_tokens is longer than the model's context or the whole KV pool."""

    code = "context_length_exceeded"


class CheckpointError(EngineError):
    """A checkpoint cannot be loaded; the message is one line and names the key or tensor."""

    code = "checkpoint_error"


class FatalDeviceError(EngineError):
    """A non-memory device error: the engine process must end and be restarted."""

    code = "engine_restarted"
