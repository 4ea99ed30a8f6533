"""Validated request + encoded prompts -> GenerationJob. Every refusal names its parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from engine_actor.core.params import MAX_TOP_LOGPROBS, InvalidParam, SamplingParams
from serve_app.protocol.chat import ChatRequest
from serve_app.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from serve_app.protocol.errors import ApiError, from_invalid_param
from serve_app.protocol.fields import SharedRequest
from serve_app.protocol.job import EncodedPrompt, GenerationJob
from serve_app.protocol.models import ServedModel


def completion_job(
    request: CompletionRequest,
    prompts: Sequence[EncodedPrompt],
    served: ServedModel,
    max_logprobs: int,
    timeout_s: float | None = None,
    trace_id: str = "",
) -> GenerationJob:
    """A completion request as a job. Raises ApiError(400 or 404)."""
    require_model(request.model, served)
    stream = _stream_flags(request)
    n, best_of = _choices(request)
    _require_at_most("logprobs", request.logprobs, max_logprobs)
    echo = bool(request.echo)
    max_tokens = _fit(
        prompts, request.max_tokens, DEFAULT_MAX_TOKENS, served, "prompt", "max_tokens"
    )
    ranked = best_of > n
    sampling = _sampling(
        request,
        max_tokens,
        served,
        logprobs=0 if ranked and request.logprobs is None else request.logprobs,
        prompt_logprobs=request.logprobs if echo else None,
    )
    shared = _shared(request, prompts, served, sampling, stream, timeout_s, trace_id)
    return replace(shared, n=n, best_of=best_of, echo=echo, logprobs=request.logprobs)


def chat_job(
    request: ChatRequest,
    prompt: EncodedPrompt,
    served: ServedModel,
    timeout_s: float | None = None,
    trace_id: str = "",
) -> GenerationJob:
    """A chat request as a job. Raises ApiError(400 or 404)."""
    require_model(request.model, served)
    stream = _stream_flags(request)
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked = request.max_tokens if name == "max_tokens" else request.max_completion_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("invalid_value", "top_logprobs: needs logprobs to be true", "top_logprobs")
    _require_at_most("top_logprobs", request.top_logprobs, MAX_TOP_LOGPROBS)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = _fit([prompt], asked, None, served, "messages", name)
    n = request.n or 1
    sampling = _sampling(request, max_tokens, served, logprobs, None)
    shared = _shared(request, (prompt,), served, sampling, stream, timeout_s, trace_id)
    return replace(shared, n=n, best_of=n, logprobs=logprobs, keep_stop_token=False)


def require_model(name: str | None, served: ServedModel) -> None:
    """None means the served model; another name is a 404."""
    if name is not None and name != served.name:
        raise ApiError("model_not_found", f"The model {name[:128]!r} does not exist", "model")


def require_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside the vocabulary before they index anything."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        shown = str(bad) if abs(bad) < 10**18 else "a huge number"
        raise ApiError(
            "invalid_value", f"{param}: token id {shown} is not in 0..{vocab_size - 1}", param
        )


def _shared(
    request: SharedRequest,
    prompts: Sequence[EncodedPrompt],
    served: ServedModel,
    sampling: SamplingParams,
    stream: tuple[bool, bool, bool],
    timeout_s: float | None,
    trace_id: str,
) -> GenerationJob:
    """The job as far as both endpoints ask for the same."""
    return GenerationJob(
        model=served.name,
        prompts=tuple(prompts),
        sampling=sampling,
        stops=request.stops(),
        include_stop=bool(request.include_stop_str_in_output),
        stream=stream[0],
        include_usage=stream[1],
        continuous_usage=stream[2],
        priority=request.priority or 0,
        deadline_ms=_deadline_ms(request, timeout_s),
        salt=request.cache_salt or "",
        trace_id=request.request_id or trace_id,
    )


def _stream_flags(request: SharedRequest) -> tuple[bool, bool, bool]:
    """(stream, usage in a last chunk, usage in every chunk)."""
    stream = bool(request.stream)
    options = request.stream_options
    if options is None:
        return stream, False, False
    if not stream:
        raise ApiError(
            "invalid_value", "stream_options: only allowed with stream: true", "stream_options"
        )
    usage = bool(options.include_usage)
    return stream, usage, usage and bool(options.continuous_usage_stats)


def _choices(request: CompletionRequest) -> tuple[int, int]:
    n = request.n or 1
    best_of = n if request.best_of is None else request.best_of
    if best_of < n:
        raise ApiError(
            "invalid_value", f"best_of: must be at least n, {n}, got {best_of}", "best_of"
        )
    if request.stream and best_of > n:
        raise ApiError("invalid_value", "best_of: cannot be streamed when above n", "best_of")
    return n, best_of


def _require_at_most(name: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        raise ApiError("invalid_value", f"{name}: must be at most {most}", name)


def _fit(
    prompts: Sequence[EncodedPrompt],
    asked: int | None,
    default: int | None,
    served: ServedModel,
    prompt_param: str,
    tokens_param: str,
) -> int:
    """max_tokens that fits the context and the whole KV pool beside the longest prompt."""
    longest = max(len(prompt.ids) for prompt in prompts)
    room = served.most_tokens - longest
    if asked is not None:
        wanted = asked
    elif default is None:
        wanted = max(room, 1)
    else:
        wanted = min(default, max(room, 1))
    if wanted > room:
        param = tokens_param if room > 0 else prompt_param
        raise ApiError("context_length_exceeded", _too_long(longest, wanted, served), param)
    return wanted


def prompt_too_long(served: ServedModel, param: str) -> ApiError:
    """The refusal of a prompt that is so long that nobody has counted its tokens."""
    message = f"The prompt has more than {served.most_tokens} tokens, but {_limit(served)}"
    return ApiError("context_length_exceeded", message, param)


def _limit(served: ServedModel) -> str:
    if served.kv_tokens < served.max_model_len:
        return f"the KV pool holds {served.kv_tokens}"
    return f"the model's context is {served.max_model_len}"


def _too_long(prompt: int, wanted: int, served: ServedModel) -> str:
    asked = str(wanted) if wanted < 10**18 else "too many"
    needs = str(prompt + wanted) if wanted < 10**18 else "too many"
    return (
        f"The request needs {needs} tokens ({prompt} in the prompt, {asked} for the completion), "
        f"but {_limit(served)}"
    )


def _sampling(
    request: SharedRequest,
    max_tokens: int,
    served: ServedModel,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    top_k = request.top_k or 0
    try:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=request.min_tokens or 0,
            temperature=_or(request.temperature, 1.0),
            top_p=_or(request.top_p, 1.0),
            # -1 is how some servers say "off"; more than the vocabulary cuts nothing.
            top_k=0 if top_k < 0 or top_k >= served.vocab_size else top_k,
            min_p=_or(request.min_p, 0.0),
            presence_penalty=_or(request.presence_penalty, 0.0),
            frequency_penalty=_or(request.frequency_penalty, 0.0),
            repetition_penalty=_or(request.repetition_penalty, 1.0),
            logit_bias=request.biases(),
            seed=request.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
            ignore_eos=bool(request.ignore_eos),
        )
        require_ids(sampling.stop_token_ids, served.vocab_size, "stop_token_ids")
        sampling.require_vocabulary(served.vocab_size, served.eos_token_ids)
    except InvalidParam as error:
        raise from_invalid_param(error) from None
    return sampling


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _deadline_ms(request: SharedRequest, header_s: float | None) -> int | None:
    """The sooner of the body's and the header's timeout, in whole milliseconds."""
    seconds = [value for value in (request.timeout, header_s) if value is not None]
    return max(1, math.ceil(min(seconds) * 1000)) if seconds else None
