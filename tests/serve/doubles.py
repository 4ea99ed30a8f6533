"""Doubles for the ingress's tests: a tokenizer of given byte pieces and an engine service that
says what a script tells it to. No model, no thread, no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine_actor.core.plan import TokenLogprobs
from engine_actor.messages import (
    PROTOCOL_VERSION,
    Attached,
    Cancel,
    Extra,
    Flag,
    Message,
    StepBatch,
    Submit,
    Usage,
    decode_messages,
    encode_batch,
)


class PieceTokenizer:
    """256 byte tokens, then the given pieces, then <eos>. Encodes the longest piece first."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [bytes([value]) for value in range(256)]
        self.pieces += [p.encode() if isinstance(p, str) else p for p in pieces]
        self.eos = len(self.pieces)
        self.vocab_size = self.eos + 1

    def ids(self, *pieces: str | bytes) -> list[int]:
        """The ids of exactly these pieces."""
        return [self.pieces.index(p.encode() if isinstance(p, str) else p) for p in pieces]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data, ids = text.encode(), []
        by_length = sorted(range(self.eos), key=lambda i: -len(self.pieces[i]))
        while data:
            token = next(i for i in by_length if data.startswith(self.pieces[i]))
            ids.append(token)
            data = data[len(self.pieces[token]) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        parts = [
            (b"" if skip_special else b"<eos>") if i == self.eos else self.pieces[i] for i in ids
        ]
        return b"".join(parts).decode(errors="replace")

    def token_text(self, token: int, /) -> str:
        return self.decode([token], skip_special=False)

    def token_bytes(self, token: int, /) -> bytes:
        return b"<eos>" if token == self.eos else self.pieces[token]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        turns = [f"[{turn['role']}]{turn['content']}" for turn in messages]
        return "".join(turns) + ("[assistant]" if add_generation_prompt else "")


Script = Callable[[Submit], list[int]]


@dataclass
class Running:
    """One sequence in the double."""

    submit: Submit
    script: list[int]
    made: int = 0


@dataclass
class Outbox:
    """One client's batches; `changed` wakes the reader."""

    batches: list[StepBatch] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedService:
    """Has EngineService's async methods. Each tick gives every sequence one token of its script;
    `<eos>` ends it. With `auto` it ticks by itself as long as there is work.
    """

    def __init__(self, tokenizer: PieceTokenizer, script: Script, *, auto: bool = True) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.auto = auto
        self.name = "double"
        self.max_model_len, self.block_tokens, self.kv_blocks = 512, 16, 64
        self.epoch = 1
        self.queue_limit = 10**6
        self.running: dict[tuple[str, int], Running] = {}
        self.outboxes: dict[str, Outbox] = {}
        self.received: list[Message] = []
        self.ends: dict[int, tuple[Flag, str | None]] = {}
        """rid or -1 for all -> flag and code to end with at the next tick."""
        self.tokens_per_tick = 1
        self.post_gate: asyncio.Event | None = None
        self.attached = 0
        self.first_seqs: list[int] = []
        self.streams = 0
        self.max_items: int | None = None
        self._replies: dict[tuple[str, int], Any] = {}
        self._ticker: asyncio.Task[None] | None = None

    async def attach(self, client: str, protocol: int, first_seq: int = 0) -> dict[str, Any]:
        assert protocol == PROTOCOL_VERSION
        self.attached += 1
        self.first_seqs.append(first_seq)
        for key in [key for key in self.running if key[0] == client]:
            del self.running[key]
        self.outboxes[client] = Outbox()
        return asdict(
            Attached(
                engine=self.name,
                epoch=self.epoch,
                protocol=protocol,
                model="m",
                vocab_size=self.tokenizer.vocab_size,
                max_model_len=self.max_model_len,
                block_tokens=self.block_tokens,
                kv_blocks=self.kv_blocks,
                max_prompt_tokens=self.max_model_len - 1,
                eos_token_ids=(self.tokenizer.eos,),
            )
        )

    async def post(self, client: str, seq: int, messages: list[Any]) -> Any:
        if self.post_gate is not None:
            await self.post_gate.wait()
        if (client, seq) in self._replies:
            return self._replies[client, seq]
        rejected = []
        for message in decode_messages(messages):
            self.received.append(message)
            if isinstance(message, Submit):
                if len(self.running) >= self.queue_limit:
                    rejected.append((message.rid, "overloaded"))
                else:
                    tokens = [] if message.sampling.max_tokens == 0 else self.script(message)
                    self.running[client, message.rid] = Running(message, tokens)
            elif isinstance(message, Cancel):
                found = self.running.pop((message.owner or client, message.rid), None)
                if found is not None:
                    self._say(message.owner or client, message.rid, (), Flag.CANCELLED, found)
        if self.auto and self.running and self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())
        reply = (seq, rejected, (len(self.running), 0, self.kv_blocks, 0, 100))
        self._replies[client, seq] = reply
        return reply

    async def events(
        self, client: str, epoch: int, from_seq: int, max_items: int = 5000
    ) -> AsyncIterator[Any]:
        assert epoch == self.epoch
        self.streams += 1
        outbox, at, end = self.outboxes[client], from_seq, from_seq + (self.max_items or max_items)
        while at < end:
            while at >= len(outbox.batches):
                outbox.changed.clear()
                await outbox.changed.wait()
            yield encode_batch(outbox.batches[at])
            at += 1

    async def status(self) -> dict[str, Any]:
        return {"running": len(self.running), "prefill_decode_overlap": True}

    async def metrics_text(self) -> str:
        return "# TYPE prefill_steps_total counter\nprefill_steps_total 3\n"

    async def act(self, messages: list[Any]) -> int:
        """Cancels only."""
        cancels = [message for message in decode_messages(messages) if isinstance(message, Cancel)]
        found = 0
        for cancel in cancels:
            one = self.running.pop((cancel.owner, cancel.rid), None)
            if one is not None:
                found += 1
                self._say(cancel.owner, cancel.rid, (), Flag.CANCELLED, one)
        return found

    async def reset_prefix_cache(self) -> None: ...

    async def drain(self, seconds: float) -> None: ...

    def tick(self) -> None:
        """One engine step."""
        for (client, rid), one in list(self.running.items()):
            end = self.ends.pop(rid, None) or self.ends.get(-1)
            if end is not None:
                self._say(client, rid, (), end[0], one, end[1])
            else:
                self._advance(client, rid, one)

    def _advance(self, client: str, rid: int, one: Running) -> None:
        limit = one.submit.sampling.max_tokens
        tokens = one.script[one.made : one.made + self.tokens_per_tick][: limit - one.made]
        eos = self.tokenizer.eos
        flag = Flag.RUNNING
        if eos in tokens and not one.submit.sampling.ignore_eos:
            tokens = tokens[: tokens.index(eos) + 1]
            flag = Flag.STOP
        one.made += len(tokens)
        if flag is Flag.RUNNING and (one.made == limit or one.made == len(one.script)):
            flag = Flag.LENGTH
        self._say(client, rid, tuple(tokens), flag, one)

    def _say(
        self,
        client: str,
        rid: int,
        tokens: tuple[int, ...],
        flag: Flag,
        one: Running,
        code: str | None = None,
    ) -> None:
        sampling, n_prompt = one.submit.sampling, len(one.submit.prompt_ids)
        extra = Extra(
            usage=Usage(n_prompt, one.made, 1) if flag is not Flag.RUNNING else None,
            stop_token=tokens[-1] if flag is Flag.STOP else None,
            error_code=code,
            logprobs=self._logprobs(tokens, sampling.logprobs),
            prompt_start=1,
            prompt_logprobs=self._logprobs(one.submit.prompt_ids[1:], sampling.prompt_logprobs)
            if one.made == len(tokens)
            else (),
        )
        if flag is not Flag.RUNNING:
            self.running.pop((client, rid), None)
        outbox = self.outboxes[client]
        outbox.batches.append(
            StepBatch(
                seq=len(outbox.batches),
                time_ns=0,
                rids=(rid,),
                counts=(len(tokens),),
                tokens=tokens,
                flags=(flag,),
                extra=((rid, extra),),
            )
        )
        outbox.changed.set()

    def _logprobs(self, tokens: Sequence[int], top: int | None) -> tuple[TokenLogprobs, ...]:
        """-0.5 for the token itself, -1.5 - i for i more; minus infinity for byte 0."""
        if top is None:
            return ()
        return tuple(
            TokenLogprobs(
                token,
                -0.5 if token else float("-inf"),
                tuple(((token + i) % self.tokenizer.vocab_size, -0.5 - i) for i in range(top)),
            )
            for token in tokens
        )

    async def _tick_forever(self) -> None:
        while self.running:
            self.tick()
            await asyncio.sleep(0)
        self._ticker = None
