"""A request's body -> a job the engine can take, for both endpoints and for the Python handle.

Parses, tokenises, checks against what the engine said of itself when we attached. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel

from configs.schema import HttpConfig
from engine_actor.core.params import InvalidParam
from serve_app.chat import ChatTokenizer, chat_prompt
from serve_app.engine_links import EngineLinks
from serve_app.generation import Generation
from serve_app.long_prompt import TextTooLong, encode_at_most
from serve_app.protocol import unsupported
from serve_app.protocol.bodies import parse_model
from serve_app.protocol.chat import ChatRequest, Message
from serve_app.protocol.completions import CompletionRequest, PromptItem
from serve_app.protocol.convert import (
    chat_job,
    completion_job,
    prompt_too_long,
    require_ids,
    require_model,
)
from serve_app.protocol.errors import ApiError
from serve_app.protocol.job import EncodedPrompt, GenerationJob
from serve_app.protocol.models import ServedModel
from serve_app.protocol.shapes import ChatShape, CompletionShape, Envelope, Shape
from serve_app.text import TextTokenizer
from serve_app.turnstile import Turnstile

LONG_TEXT = 4096
"""Characters from which tokenising leaves the event loop; below, the thread costs more."""

Endpoint = Literal["completion", "chat"]
R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


class ServingTokenizer(TextTokenizer, ChatTokenizer, Protocol):
    """What the ingress needs of `engine_actor.load.tokenizer.Tokenizer`."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Facts:
    """What the ingress is told when it is built. `max_sequences`: most sequences it lets live at
    once, kept below Serve's own limits so that a client always sees JSON. `attach_wait_s`: how
    long a request waits for an engine that is just coming back.
    """

    created: int = 0
    max_sequences: int = 384
    attach_wait_s: float = 0.5
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A body that is a request, and what the client should be told of its parameters."""

    request: ChatRequest | CompletionRequest
    warning: str | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job and what the client should be told of its parameters."""

    job: GenerationJob
    endpoint: Endpoint
    warning: str | None


class Intake:
    """The way in: one per ingress."""

    def __init__(
        self,
        links: EngineLinks,
        tokenizer: ServingTokenizer,
        facts: Facts,
        http: HttpConfig,
    ) -> None:
        self.links = links
        self.tokenizer = tokenizer
        self.http = http
        self.facts = facts
        self.turnstile = Turnstile()

    def parse(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Wanted:
        """Check a body by itself; any thread may. Raises ApiError."""
        if endpoint == "chat":
            return Wanted(*self.parse_as(ChatRequest, unsupported.CHAT, body))
        return Wanted(*self.parse_as(CompletionRequest, unsupported.COMPLETIONS, body))

    def parse_as(
        self, kind: type[R], table: Mapping[str, tuple[Any, ...]], body: Mapping[str, Any]
    ) -> tuple[R, str | None]:
        """A body as a `kind`, and what the client should be told of its parameters; `table` has
        those that are known and not served. Any thread may. Raises ApiError."""
        used = unsupported.refuse_unsupported(body, table, self.http.unsupported == "refuse")
        unknown = unsupported.unknown_parameters(body, kind.model_fields, table)
        return parse_model(kind, body), unsupported.warning_header(used, unknown)

    async def accept(
        self, wanted: Wanted, timeout_s: float | None = None, trace_id: str = ""
    ) -> Accepted:
        """Tokenise a request's prompts and check it against the model. Raises ApiError."""
        request = wanted.request
        served = await self.served()
        require_model(request.model, served)
        if isinstance(request, ChatRequest):
            prompt = await self.encode_messages(request.messages, served)
            job = chat_job(request, prompt, served, timeout_s, trace_id)
            return Accepted(job, "chat", wanted.warning)
        prompts = await self.encode_prompts(request.prompts(), served, bool(request.echo))
        job = completion_job(request, prompts, served, self.http.max_logprobs, timeout_s, trace_id)
        return Accepted(job, "completion", wanted.warning)

    def begin(self, accepted: Accepted) -> tuple[Generation, Shape]:
        """Admit and submit. Raises ApiError(overloaded or unavailable); nothing is left behind."""
        job = accepted.job
        limit = self.facts.max_sequences
        if job.n_children > limit:
            param = "n" if len(job.prompts) <= limit else "prompt"
            raise ApiError(
                "invalid_value",
                f"{param}: the request needs {job.n_children} sequences, the limit is {limit}",
                param,
            )
        if self.links.live + job.n_children > limit:
            raise ApiError("overloaded")
        prefix = "chatcmpl" if accepted.endpoint == "chat" else "cmpl"
        generation = Generation(
            job, self.links.pick(), self.tokenizer, prefix, self.http.stream_buffer_tokens
        )
        envelope = Envelope(
            public_id=generation.public_id,
            created=generation.created,
            model=job.model,
            n_choices=len(job.prompts) * job.n,
            logprobs=job.logprobs,
            include_usage=job.include_usage,
        )
        make = ChatShape if accepted.endpoint == "chat" else CompletionShape
        return generation, make(envelope, self.tokenizer)

    async def served(self) -> ServedModel:
        """The model as the engine describes it. Raises ApiError(unavailable)."""
        link = self.links.pick()
        if not await link.wait_ready(self.facts.attach_wait_s) or link.draining:
            raise ApiError("unavailable")
        attached = link.attached
        assert attached is not None
        return ServedModel(
            name=attached.model,
            created=self.facts.created,
            max_model_len=attached.max_model_len,
            kv_tokens=attached.kv_blocks * attached.block_tokens,
            vocab_size=attached.vocab_size,
            meta=self.facts.meta,
            eos_token_ids=attached.eos_token_ids,
        )

    async def encode_prompts(
        self, prompts: tuple[PromptItem, ...], served: ServedModel, echo: bool = False
    ) -> list[EncodedPrompt]:
        """Prompts as ids and text; the text of ids only where it is echoed, since it costs a third
        of the way in. Raises ApiError naming `prompt`."""
        for prompt in prompts:
            if not isinstance(prompt, str):
                if len(prompt) > served.most_tokens:
                    raise prompt_too_long(served, "prompt")
                require_ids(prompt, served.vocab_size, "prompt")
        size = sum(len(prompt) for prompt in prompts)
        try:
            return await _off_loop(size, lambda: [self._encode(p, served, echo) for p in prompts])
        except TextTooLong:
            raise prompt_too_long(served, "prompt") from None

    async def encode_messages(self, messages: list[Message], served: ServedModel) -> EncodedPrompt:
        """Messages through the tokenizer's own template. Raises ApiError naming `messages`."""
        turns = [message.model_dump(exclude_none=True) for message in messages]

        def render() -> EncodedPrompt:
            text = chat_prompt(self.tokenizer, turns)
            # The template writes the special tokens itself.
            ids = encode_at_most(
                lambda part: self.tokenizer.encode(part, add_special_tokens=False),
                text,
                served.most_tokens,
            )
            return EncodedPrompt(tuple(ids), text)

        try:
            prompt = await _off_loop(sum(message.n_characters for message in messages), render)
        except InvalidParam as error:
            raise ApiError("invalid_value", str(error), "messages") from None
        except TextTooLong:
            raise prompt_too_long(served, "messages") from None
        if not prompt.ids:
            raise ApiError("invalid_value", "messages: the prompt is empty", "messages")
        return prompt

    async def encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        """A text as ids."""
        return await _off_loop(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    async def decode_ids(self, ids: list[int]) -> str:
        """Ids as text, special tokens written out."""
        return await _off_loop(len(ids), lambda: self.tokenizer.decode(ids, skip_special=False))

    def _encode(self, prompt: PromptItem, served: ServedModel, echo: bool) -> EncodedPrompt:
        if isinstance(prompt, str):
            ids = encode_at_most(self.tokenizer.encode, prompt, served.most_tokens)
            if not ids:
                raise ApiError("invalid_value", "prompt: has no tokens", "prompt")
            return EncodedPrompt(tuple(ids), prompt)
        text = self.tokenizer.decode(prompt, skip_special=False) if echo else ""
        return EncodedPrompt(prompt, text)


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()
