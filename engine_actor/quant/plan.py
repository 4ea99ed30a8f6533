"""How many bytes a recipe makes of a model, before anything is converted; what fits a budget.

From the config alone: exact for what this package writes. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine_actor.errors import CheckpointError
from engine_actor.load.names import LinearSlot, slots
from engine_actor.model.card_plan import Settings
from engine_actor.model.config import ModelConfig
from engine_actor.model.step_bytes import StepShape, step_parts
from engine_actor.quant.grid import Grid
from engine_actor.quant.recipe import EMBEDDING, Recipe, fixed_recipe

KV_FLOOR_TOKENS = 4096
"""Tokens of fp16 KV cache that must still fit beside the weights."""
MIB = 1 << 20
RESERVE_BYTES = 384 * MIB
"""engine.reserve_memory_mb by default: a card's own share, with the CUDA context in it."""
SEQUENCES, CHUNK_TOKENS = 4, 128
"""What an engine on a card that the weights nearly fill is set to at least."""
FOUR_BITS = Grid(4, 64)
"""Of an embedding for which 8 bits are too many."""
ALTERNATIVES = (("w4", 64), ("w4", 128), ("mixed", 64), ("mixed", 128), ("w3", 64), ("w3", 128))
EMBEDDING_NOTE, HEAD_NOTE = " --embedding-bits 4", " --head-bits 4"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class PlanError(CheckpointError):
    """A budget that cannot be read, or that nothing fits; the message says what would."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of each part. vectors: norms, biases; kv_floor: KV_FLOOR_TOKENS (or the whole context
    of the model, if shorter) at two bytes a number; beside: what an engine leaves alone or takes
    for its steps.
    """

    recipe: str
    layers: int
    tables: int
    vectors: int
    kv_floor: int
    beside: int
    bits_per_weight: float

    @property
    def weights(self) -> int:
        """What the tensors of the written folder take."""
        return self.layers + self.tables + self.vectors

    @property
    def total(self) -> int:
        """A card that can serve it."""
        return self.weights + self.kv_floor + self.beside

    def lines(self, budget: int | None) -> list[str]:
        """The plan for a reader."""
        rows = [
            (f"layers ({self.recipe}, {self.bits_per_weight:.3f} bits a weight)", self.layers),
            ("embedding and head", self.tables),
            ("norms and biases", self.vectors),
            (f"KV cache, at least ({KV_FLOOR_TOKENS} tokens)", self.kv_floor),
            ("reserve, and the engine's steps at least", self.beside),
            ("together", self.total),
        ]
        if budget is not None:
            rows.append(("budget", budget))
        return [f"  {name:<46}{size / MIB:>12,.1f} MiB" for name, size in rows]


def make_plan(config: ModelConfig, recipe: Recipe, vector_bytes: int = 4) -> Plan:
    """The plan of a recipe. vector_bytes: of one number of a norm or bias as the source has it."""
    layers = tables = vectors = 0
    for slot in slots(config):
        if not isinstance(slot, LinearSlot):
            vectors += slot.size * vector_bytes
        elif slot.name in ("embed", "head"):
            tables += recipe.table(slot.name).nbytes(slot.rows, slot.in_features)
        else:
            _, index, short = slot.name.split(".")
            layers += recipe.grid(int(index), short).nbytes(slot.rows, slot.in_features)
            vectors += slot.rows * vector_bytes if slot.bias else 0
    bits = 8 * layers / layer_weights(config)
    floor, beside = kv_floor(config), engine_bytes(config)
    return Plan(recipe.name, layers, tables, vectors, floor, beside, bits)


def layer_weights(config: ModelConfig) -> int:
    """Numbers in the layers' linears."""
    linears = (slot for slot in slots(config) if isinstance(slot, LinearSlot))
    return sum(s.rows * s.in_features for s in linears if s.name not in ("embed", "head"))


def kv_floor(config: ModelConfig) -> int:
    """Bytes of the least KV cache."""
    token = 2 * config.n_layers * config.n_kv_heads * config.head_dim * 2
    return token * min(KV_FLOOR_TOKENS, config.max_model_len)


def engine_bytes(config: ModelConfig) -> int:
    """What lies beside weights and cache on a small card: the reserve, and a step's memory."""
    shape = StepShape(
        model=config,
        vocab_size=config.vocab_size,
        item_bytes=2,
        head_bits=8,
        head_rows=SEQUENCES,
        sm=86,
        streams=3,
        partial_prefills=1,
        block_tokens=16,
        graphs=True,
        small_workspaces=True,
        in_strips=True,
        gated=True,
    )
    context = min(KV_FLOOR_TOKENS, config.max_model_len)
    steps = step_parts(shape, Settings(context, SEQUENCES, CHUNK_TOKENS, int8_kv=False))
    return RESERVE_BYTES + sum(part.nbytes for part in steps)


def read_size(text: str) -> int:
    """`4GiB`, `4G`, `3500MiB`, `4000000000` -> bytes; GB is 10^9. Raises PlanError."""
    number = text.strip().rstrip("BbIiKkMmGgTt ")
    unit = text.strip()[len(number) :].strip().upper()
    prefix = unit.rstrip("BI")
    try:
        size = float(number)
    except ValueError:
        size = -1.0
    if (
        prefix not in _UNITS
        or not 0 < size < 1e18
        or unit not in (prefix, f"{prefix}B", f"{prefix}IB")
    ):
        raise PlanError(f"--fit {text}: not a size; write it like 4GiB or 3500MiB")
    decimal = unit == f"{prefix}B" and prefix
    return int(size * (1000 ** " KMGT".index(prefix) if decimal else _UNITS[prefix]))


def require_fit(config: ModelConfig, plan: Plan, budget: int | None) -> None:
    """Raise PlanError where the plan is over the budget, naming what would fit."""
    if budget is None or plan.total <= budget:
        return
    plans = [make_plan(config, recipe) for recipe in _alternatives(config.tie_embeddings)]
    fitting = [other for other in plans if other.total <= budget]
    # A head at 4 bits costs more than all layers at 3 do: the last resort.
    fitting = [other for other in fitting if not _has_small_head(other, config)] or fitting
    need = f"{plan.recipe} needs {plan.total / MIB:,.0f} MiB, the budget is {budget / MIB:,.0f} MiB"
    if fitting:
        best = max(fitting, key=lambda other: other.bits_per_weight)
        raise PlanError(f"{need}; this fits: {best.recipe} ({best.total / MIB:,.0f} MiB)")
    least = min(plans, key=lambda other: other.total)
    raise PlanError(
        f"{need}; the smallest recipe, {least.recipe}, needs {least.total / MIB:,.0f} MiB"
    )


def _has_small_head(plan: Plan, config: ModelConfig) -> bool:
    return (EMBEDDING_NOTE if config.tie_embeddings else HEAD_NOTE) in plan.recipe


def _alternatives(is_tied: bool) -> Iterable[Recipe]:
    tables = [(EMBEDDING, EMBEDDING, ""), (FOUR_BITS, EMBEDDING, EMBEDDING_NOTE)]
    if not is_tied:
        tables.append((FOUR_BITS, FOUR_BITS, EMBEDDING_NOTE + HEAD_NOTE))
    for name, group in ALTERNATIVES:
        recipe = fixed_recipe(name, group)
        for embedding, head, note in tables:
            named = f"--recipe {name} --group {group}{note}"
            yield Recipe(named, recipe.grids, embedding=embedding, head=head)
