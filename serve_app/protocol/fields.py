"""Parameters that completions and chat share, with their types. Strict: "2" is not 2.

Ranges that the sampler owns are checked by SamplingParams; here are types, and the ranges that
only the HTTP face knows.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_STOP_STRINGS = 4
MAX_CHOICES = 128
MAX_NAME = 512
MAX_TIMEOUT_S = 7 * 24 * 3600.0
PRIORITY_RANGE = 2**31

Number = Annotated[float, Field(allow_inf_nan=False)]


class StreamOptions(BaseModel):
    """`stream_options`: usage in a last chunk, or in every chunk as well."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedRequest(BaseModel):
    """What both endpoints take. None always means "as if it were not there"."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = Field(None, max_length=MAX_NAME)
    max_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None

    # Beyond OpenAI, under the names that other servers made usual.
    top_k: int | None = Field(None, ge=-1)
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = Field(None, ge=-PRIORITY_RANGE, lt=PRIORITY_RANGE)
    timeout: Number | None = Field(None, gt=0, le=MAX_TIMEOUT_S)
    cache_salt: str | None = Field(None, max_length=MAX_NAME)
    request_id: str | None = Field(None, max_length=MAX_NAME)

    @field_validator("stop")
    @classmethod
    def _few_real_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stops)}")
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _integer_keys(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or {}:
            digits = key.removeprefix("-")
            if not (digits.isascii() and digits.isdecimal() and len(digits) <= 10):
                raise ValueError("keys must be token ids written as decimal integers")
        return bias

    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple, none as the empty one."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias with integer keys. Two spellings of one id ("7", "07") add up to the last."""
        return tuple({int(key): value for key, value in (self.logit_bias or {}).items()}.items())
