"""What crosses a process: the message types, and the only code that encodes and decodes them."""

from engine_actor.messages.down import decode_message, decode_messages, encode_messages
from engine_actor.messages.types import (
    PROTOCOL_VERSION,
    Attached,
    Beat,
    Cancel,
    CancelReason,
    Evict,
    Extra,
    Flag,
    Limit,
    Load,
    Message,
    StepBatch,
    Submit,
    Usage,
)
from engine_actor.messages.up import decode_batch, encode_batch

__all__ = [
    "PROTOCOL_VERSION",
    "Attached",
    "Beat",
    "Cancel",
    "CancelReason",
    "Evict",
    "Extra",
    "Flag",
    "Limit",
    "Load",
    "Message",
    "StepBatch",
    "Submit",
    "Usage",
    "decode_batch",
    "decode_message",
    "decode_messages",
    "encode_batch",
    "encode_messages",
]
