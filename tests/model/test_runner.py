"""Building a runner: packed and padded weights, parts apart, and refusals by name."""

from __future__ import annotations

import pytest
import torch

from engine_actor import ops
from engine_actor.errors import CheckpointError
from engine_actor.model.config import ModelConfig
from engine_actor.model.kv_store import KVStore, kv_bytes_per_block
from engine_actor.model.memory import free_bytes, plan_memory
from engine_actor.model.runner import ModelRunner, Weight, build_runner
from tests.model.tiny_models import BLOCK, Part, batch, canonical, forward, hf_dict, oracle

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 80}
IDS = [5, 77, 3, 12, 60, 1, 1, 44]


def config_of(**changes: object) -> ModelConfig:
    """A llama whose linears fit the int4 kernel."""
    return ModelConfig.from_hf(hf_dict(oracle("llama", **{**SHAPE, **changes})), None)


def quantised(weight: torch.Tensor, bits: int) -> ops.PackedLinear:
    """Round to nearest in groups of 32, with offsets for 4 bits."""
    n, k = weight.shape
    groups = weight.view(n, k // 32, 32)
    if bits == 8:
        scale = groups.abs().amax(-1) / 127
        codes = (groups / scale[..., None]).round().clamp(-127, 127)
        return ops.PackedLinear(8, 32, k, ops.pack_codes(codes.view(n, k).long(), 8), scale.half())
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).half()
    offset = (low + 8 * scale.float()).half()
    codes = ((groups - offset.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7)
    packed = ops.pack_codes(codes.view(n, k).long(), 4)
    return ops.PackedLinear(4, 32, k, packed, scale, offset)


def packed_weights() -> tuple[dict[str, Weight], dict[str, Weight]]:
    """(packed, the same values dense): W4 linears, W8 embedding and head, as the demo has."""
    packed: dict[str, Weight] = {}
    for name, weight in canonical(oracle("llama", **SHAPE)).items():
        if name == "embed":
            packed[name] = quantised(weight, 8)
        elif isinstance(weight, ops.DenseLinear):
            packed[name] = quantised(weight.weight, 4)
        else:
            packed[name] = weight
    dense: dict[str, Weight] = {
        name: ops.DenseLinear(ops.dequantise(weight))
        if isinstance(weight, ops.PackedLinear)
        else weight
        for name, weight in packed.items()
    }
    return packed, dense


def run(
    weights: dict[str, Weight], config: ModelConfig | None = None, **options: object
) -> torch.Tensor:
    """Logits of all rows of one prompt, then of one decoded token: [len(IDS), vocab]."""
    runner: ModelRunner = build_runner(
        config or config_of(), weights, block_tokens=BLOCK, **options
    )
    runner.resize_kv(8)
    rows = torch.arange(len(IDS) - 1)
    prompt = forward(runner, batch([Part(IDS[:-1], 0, [4, 1])]), rows)
    last = forward(runner, batch([Part(IDS[-1:], len(IDS) - 1, [4, 1])]))
    return torch.cat((prompt, last))


def test_packed_exact_equals_dense_exact() -> None:
    """The same fp32 matrix, bit for bit, whichever form it came in."""
    packed, dense = packed_weights()
    assert torch.equal(run(packed, numerics="exact"), run(dense, numerics="exact"))


@pytest.mark.parametrize("copy", ["on", "off"])
def test_packed_fast_is_close_to_dense(copy: str) -> None:
    """Through the int4 kernel and the fp16 copy; tolerance is bf16's over three layers."""
    packed, dense = packed_weights()
    want = run(dense, numerics="exact")
    got = run(packed, dense_prefill_copy=copy)
    assert (got - want).abs().max() < 0.06 * want.abs().max()


def test_padded_vocabulary_never_leaves_the_head() -> None:
    """Ids the tokenizer cannot name are cut, in logits as in work."""
    packed, dense = packed_weights()
    for weights in (packed, dense):
        whole = run(weights, numerics="exact")
        cut = run(weights, numerics="exact", used_vocab=78)
        assert cut.shape == (len(IDS), 78)
        assert torch.equal(cut, whole[:, :78])


def test_parts_apart_equal_parts_fused() -> None:
    """q, k, v and gate, up may come as linears of their own."""
    config = config_of()
    _, dense = packed_weights()
    apart = dict(dense)
    q, kv, inter = 64, 32, config.intermediate
    for i in range(config.n_layers):
        qkv = apart.pop(f"layers.{i}.qkv").weight
        gate_up = apart.pop(f"layers.{i}.gate_up").weight
        for name, rows in (("q", qkv[:q]), ("k", qkv[q : q + kv]), ("v", qkv[q + kv :])):
            apart[f"layers.{i}.{name}"] = ops.DenseLinear(rows)
        apart[f"layers.{i}.gate"] = ops.DenseLinear(gate_up[:inter])
        apart[f"layers.{i}.up"] = ops.DenseLinear(gate_up[inter:])
    torch.testing.assert_close(run(apart), run(dense), rtol=1e-5, atol=1e-5)


def test_weights_may_come_one_by_one() -> None:
    """An iterator of pairs, in any order, each seen once."""
    packed, _ = packed_weights()
    pairs = iter(reversed(packed.items()))
    assert torch.equal(run(pairs, numerics="exact"), run(packed, numerics="exact"))


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("embed", "embed is missing"),
        ("norm", "norm is missing"),
        ("layers.1.qkv", "layers.1.q is missing"),
        ("layers.2.down", "layers.2.down is missing"),
        ("layers.0.mlp_norm", "layers.0.mlp_norm is missing"),
    ],
)
def test_a_lost_weight_is_named(lost: str, message: str) -> None:
    """One line."""
    _, dense = packed_weights()
    del dense[lost]
    with pytest.raises(CheckpointError, match=f"^{message}$"):
        run(dense)


@pytest.mark.parametrize("name", ["layers.9.qkv", "layers.0.bogus", "rotary", "layers.x.o"])
def test_a_foreign_weight_is_named(name: str) -> None:
    """Better refused than ignored."""
    _, dense = packed_weights()
    with pytest.raises(CheckpointError, match=f"weight {name} belongs to no part"):
        run({**dense, name: dense["norm"]})


def test_bf16_checkpoint() -> None:
    """Published in bf16: rounded once to what the backend holds, close to fp32."""
    _, dense = packed_weights()
    half = {
        name: ops.DenseLinear(w.weight.bfloat16()) if isinstance(w, ops.DenseLinear) else w
        for name, w in dense.items()
    }
    wide = {
        name: ops.DenseLinear(w.weight.float()) if isinstance(w, ops.DenseLinear) else w
        for name, w in half.items()
    }
    want = run(wide, numerics="exact")
    assert (run(half) - want).abs().max() < 0.01 * want.abs().max()
    assert torch.equal(run(half, numerics="exact"), want)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_a_cache(name: str, dtype: torch.dtype) -> None:
    """Keys and values rounded to the cache's dtype."""
    _, dense = packed_weights()
    want = run(dense)
    assert (run(dense, kv_dtype=name) - want).abs().max() < 0.06 * want.abs().max()


def test_kv_store_resize_and_checksum() -> None:
    """Content stays, new blocks are zero, the checksum sees a single changed value."""
    store = KVStore(config_of(), torch.float32, BLOCK, torch.device("cpu"))
    store.resize(4)
    assert store.n_blocks == 4
    assert store.keys(0).shape == store.values(2).shape == (4, BLOCK, 2, 16)
    store.keys(1)[3, 2, 1, 5] = 7.0
    before = store.checksum((3, 0))
    assert before != store.checksum((0, 3))
    store.resize(6)
    assert store.checksum((3, 0)) == before
    assert not store.layers[1][4:].any()
    store.values(2)[0, 0, 0, 0] = 1.0
    assert store.checksum((3, 0)) != before
    store.resize(2)
    assert store.n_blocks == 2
    with pytest.raises(ValueError, match="must not be negative"):
        store.resize(-1)


def test_kv_bytes_per_block() -> None:
    """3 layers, keys and values, 2 heads of 16, 4 tokens."""
    assert kv_bytes_per_block(config_of(), torch.float32, 4) == 3 * 2 * 2 * 16 * 4 * 4
    assert kv_bytes_per_block(config_of(), torch.bfloat16, 4) == 3 * 2 * 2 * 16 * 4 * 2


def test_failed_resize_leaves_layers_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory at the second layer: all layers as before, content kept."""
    store = KVStore(config_of(), torch.float32, BLOCK, torch.device("cpu"))
    store.resize(3)
    store.layers[0].fill_(2.0)
    calls = []
    real = KVStore._resize_layer

    def failing(self: KVStore, index: int, n_blocks: int) -> None:
        calls.append(index)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("full")
        real(self, index, n_blocks)

    monkeypatch.setattr(KVStore, "_resize_layer", failing)
    with pytest.raises(torch.OutOfMemoryError):
        store.resize(9)
    assert [layer.shape[0] for layer in store.layers] == [3, 3, 3]
    assert (store.layers[0] == 2.0).all()


def test_memory_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is left on a CPU, capped by the budget, never negative."""
    monkeypatch.setattr("engine_actor.model.memory.free_bytes", lambda device: 1000)
    cpu = torch.device("cpu")
    assert plan_memory(cpu, reserve=100, activations=100).kv == 400
    assert plan_memory(cpu, reserve=100, activations=100, budget=300).kv == 300
    assert plan_memory(cpu, reserve=2000, activations=0).kv == 0


def test_free_bytes_of_this_machine() -> None:
    """Something, and not more than an address space."""
    assert 0 < free_bytes(torch.device("cpu")) < 1 << 50


def test_all_layers_and_the_norm_in_one_call() -> None:
    """What decode graphs run: the same bits as layers, then norm."""
    _, dense = packed_weights()
    runner = build_runner(config_of(), dense, block_tokens=BLOCK, native_kernels="off")
    runner.resize_kv(8)
    inputs = batch([Part(IDS, 0, [4, 1])])
    hidden = runner.run_layers(runner.embed(inputs), inputs, 0, runner.n_layers)
    decoder, step = runner._decoder, runner._plan(inputs)
    with torch.inference_mode():
        together = decoder.normed(runner.embed(inputs), runner.kv.layers, step)
        assert torch.equal(together, decoder.norm(hidden))
