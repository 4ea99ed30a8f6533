"""Tuning a rounded model as a whole: what the layout leaves free, towards the source's predictions.

Rounding looks at one linear at a time. Here scales, offsets, norms and, where memory allows, the
codes themselves follow the gradient of KL(source || rounded) over the whole model, on calibration
text. Some rows of it are held out; what is not better on them is thrown away. Seeded, and going on
after a crash gives the same bytes. Knows no file but its own unfinished state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine_actor.load.progress import Progress
from engine_actor.load.refusal import refusal
from engine_actor.quant.journal import keep_tensors, read_kept
from engine_actor.quant.slopes import Capture, Slopes
from engine_actor.quant.texts import TokenRows
from engine_actor.quant.trainable import TrainableModel, divergence

HELD_SHARE = 10
"""One row in so many is held out, at least one."""
WARM_SHARE = 0.05
SAVE_SECONDS = 120.0
SAVE_SHARE = 20
"""A state of many GB is saved more rarely: so many times as long as it took lies between two."""
STATE = "tuning.safetensors"
EPSILON = 1e-12
"""Gradients of a mean KL are tiny: Adam's usual 1e-8 would drown them."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Largest change per step: of a latent weight or offset in steps of its grid, of a scale or a
    norm relative to itself.
    """

    codes: float = 8e-3
    offsets: float = 8e-3
    scales: float = 1e-3
    norms: float = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Tuning:
    """text: rows to tune on, the last of them held out; steps of `batch` rows each; codes: train
    them too, or only scales, offsets and norms; saved: keep an unfinished state now and then.
    """

    text: TokenRows
    steps: int
    codes: bool = True
    batch: int = 8
    seed: int = 0
    rates: Rates = field(default_factory=Rates)
    saved: bool = True

    def described(self) -> dict[str, Any]:
        """For a report and for telling two runs apart."""
        return {
            "text": self.text.described(),
            "steps": self.steps,
            "codes": self.codes,
            "batch": self.batch,
            "seed": self.seed,
            "rates": asdict(self.rates),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What to come close to. embedded fp32 [S, T, hidden]: the text before layer 0 by our
    embedding; wanted: the source's last normed hidden states, likewise; heads fp32 [vocab, hidden].
    All on the device that tunes.
    """

    embedded: torch.Tensor
    wanted: torch.Tensor
    head: torch.Tensor
    their_head: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tuned:
    """KL on the held-out rows before and after, nats; kept: whether after was better."""

    before: float
    after: float

    @property
    def kept(self) -> bool:
        """Whether tuning helped on text that it has not seen."""
        return self.after < self.before


def tune(
    model: TrainableModel,
    target: Target,
    tuning: Tuning,
    folder: Path,
    progress: Progress,
    capture: Capture | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Train `model` in place. folder: where an unfinished state is kept and looked for. capture:
    see Slopes. Raises CheckpointError where a loss is no number.
    """
    run = _Run(model, target, tuning, folder, capture)
    with tensor_cores():
        before = run.held_out()
        saved, pause = clock(), SAVE_SECONDS
        for step in range(run.restore(), tuning.steps):
            progress("tune", step, tuning.steps)
            run.step(step)
            if tuning.saved and clock() - saved >= pause:
                began = clock()
                run.save(step + 1)
                saved = clock()
                pause = max(SAVE_SECONDS, SAVE_SHARE * (saved - began))
        progress("tune", tuning.steps, tuning.steps)
        return Tuned(before, run.held_out())


@contextmanager
def tensor_cores() -> Iterator[None]:
    """A GPU's products of fp32 numbers by ten bits of mantissa: those of the head, mostly."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def share_of_rate(step: int, steps: int) -> float:
    """Up over the first steps, then down along half a cosine to zero."""
    warm = max(1, round(WARM_SHARE * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm + 1) / (steps - warm + 1)))


class _Run:
    """Batches, optimiser and saved state of one tuning."""

    def __init__(
        self,
        model: TrainableModel,
        target: Target,
        tuning: Tuning,
        folder: Path,
        capture: Capture | None,
    ) -> None:
        self._model = model
        self._target = target
        self._tuning = tuning
        self._path = folder / STATE
        rows = target.embedded.shape[0]
        self._train = max(1, rows - max(1, rows // HELD_SHARE))
        self._batch = min(tuning.batch, self._train)
        self._leaves = [leaf for _, leaf in model.parameters()]
        # A group a kind: one that holds many leaves is updated in a few launches.
        groups: dict[str, list[torch.Tensor]] = {}
        for kind, leaf in model.parameters():
            groups.setdefault(kind, []).append(leaf)
        self._kinds = list(groups)
        self._on_gpu = target.embedded.is_cuda
        self._adam = torch.optim.Adam(
            [{"params": leaves} for leaves in groups.values()],
            betas=(0.9, 0.95),
            eps=EPSILON,
            fused=self._on_gpu,
        )
        batch = target.embedded[: self._batch]
        self._slopes = Slopes(self._loss, self._leaves, batch, capture)

    def step(self, step: int) -> None:
        """One batch."""
        share = share_of_rate(step, self._tuning.steps)
        for kind, group in zip(self._kinds, self._adam.param_groups, strict=True):
            group["lr"] = share * getattr(self._tuning.rates, kind)
        rows = self._rows(step).to(self._target.embedded.device)
        loss = self._slopes(self._target.embedded[rows], self._target.wanted[rows])
        if not math.isfinite(loss):
            raise refusal("--tune-steps", f"the loss of step {step} is {loss}; 0 converts without")
        self._adam.step()
        self._model.confine()

    def _rows(self, step: int) -> torch.Tensor:
        """Indices of a step's rows: every epoch in an order of its own."""
        per_epoch = self._train // self._batch
        epoch, place = divmod(step, per_epoch)
        draw = torch.Generator().manual_seed((self._tuning.seed << 20) + epoch)
        order = torch.randperm(self._train, generator=draw)
        return order[place * self._batch : (place + 1) * self._batch]

    @torch.no_grad()
    def held_out(self) -> float:
        """Mean KL on the rows that are never trained on."""
        count = self._target.embedded.shape[0]
        rows = slice(self._train, count) if self._train < count else slice(0, count)
        embedded, wanted = self._target.embedded[rows], self._target.wanted[rows]
        pairs = zip(embedded.split(self._batch), wanted.split(self._batch), strict=True)
        return sum(float(self._loss(*pair)) * len(pair[0]) for pair in pairs) / len(embedded)

    def _loss(self, embedded: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Mean KL of a batch."""
        target = self._target
        hidden = self._model(embedded).flatten(0, 1)
        total = divergence(hidden, target.head, wanted.flatten(0, 1), target.their_head)
        return total / hidden.shape[0]

    def save(self, done: int) -> None:
        """After `done` steps, whole or not at all."""
        tensors = {"done": torch.tensor(done)}
        for i, leaf in enumerate(self._leaves):
            state = self._adam.state[leaf]
            tensors[f"{i}.value"] = leaf.detach()
            tensors[f"{i}.mean"] = state["exp_avg"]
            tensors[f"{i}.square"] = state["exp_avg_sq"]
        keep_tensors(self._path, tensors)

    @torch.no_grad()
    def restore(self) -> int:
        """Steps done by an earlier run."""
        if not self._path.is_file():
            return 0
        found = read_kept(self._path)
        done = int(found["done"])
        for i, leaf in enumerate(self._leaves):
            leaf.copy_(found[f"{i}.value"])
            self._adam.state[leaf] = {
                "step": torch.tensor(float(done), device=leaf.device if self._on_gpu else "cpu"),
                "exp_avg": found[f"{i}.mean"].to(leaf.device),
                "exp_avg_sq": found[f"{i}.square"].to(leaf.device),
            }
        return done
