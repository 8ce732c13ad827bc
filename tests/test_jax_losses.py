"""Losses in JAX, and their gradients: against transformers on sequences that are not packed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from smollm2.backends import get_backend
from smollm2.batch import Batch, Span
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.model import head_of
from smollm2.weights import Weights
from tests.tiny import random_weights, tiny_config
from tests.training import Packed, assert_same_gradients, hf_gradients, hf_model, packed

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from smollm2.backends.jax import losses  # noqa: E402
from smollm2.backends.jax.layers import unstacked  # noqa: E402
from smollm2.backends.jax.ops import JaxOps  # noqa: E402

CONFIG = tiny_config(max_position_embeddings=512)
UNTIED = tiny_config(max_position_embeddings=512, tie_word_embeddings=False, num_hidden_layers=3)
ONE = tiny_config(num_hidden_layers=1)
WEIGHTS = random_weights(CONFIG, seed=3)


def on_device(weights: Any) -> Any:
    return jax.tree.map(jax.numpy.asarray, weights)


def gradients(config: Config, weights: Any, batch: Packed, **options: Any) -> tuple[float, Any]:
    ops = JaxOps(config)
    loss = jax.jit(jax.value_and_grad(partial(losses.loss_packed, ops=ops, **options)))
    found = loss(on_device(weights), *batch.arrays)
    return float(found[0]), found[1]


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("lengths", [[9, 40, 3, 21], [150, 300, 30]], ids=["short", "chunks"])
def test_gradients_equal_those_of_transformers_unpacked(config: Config, lengths: list[int]) -> None:
    """Feature rows 68, 118: one by one in float64 there, packed with padding in float32 here."""
    weights = random_weights(config, seed=3)
    batch = packed(lengths, vocabulary=96, padding=5)
    loss, expected = hf_gradients(hf_model(config, weights), batch)
    found, got = gradients(config, weights, batch)
    assert found == pytest.approx(loss, rel=1e-6)
    assert_same_gradients(got, expected)


def test_gradients_equal_those_of_the_torch_backend() -> None:
    """The same text, with layers stacked here and one by one there."""
    batch = packed([9, 40, 3, 21], vocabulary=96, padding=5)
    module = get_backend("torch").load(CONFIG, WEIGHTS, dtype="float32").as_module()
    theirs = module.loss_packed(*batch.arrays)
    theirs.backward()
    expected = {name: p.grad.numpy() for name, p in module.named_parameters()}
    model = get_backend("jax").load(CONFIG, WEIGHTS, dtype="float32")
    found, stacks = gradients(CONFIG, model.weights, batch)
    assert found == pytest.approx(theirs.item(), rel=1e-6)
    assert_same_gradients(unstacked(stacks), expected)


def test_values_equal_those_of_transformers_unpacked() -> None:
    """Feature rows 69, 70; in any order, and with nothing where there is no target or padding."""
    batch = packed([9, 40, 3], vocabulary=96, padding=5)
    order = np.random.default_rng(0).permutation(len(batch.tokens))
    tokens, positions, segments, targets, _ = (array[order] for array in batch.arrays)
    weights, ops = on_device(WEIGHTS), JaxOps(CONFIG)
    found = losses.log_probs_packed(weights, tokens, positions, segments, targets, ops=ops)
    states = losses.hidden_packed(weights, tokens, positions, segments, ops=ops)
    back = np.argsort(order)
    log_probs, states = np.asarray(found)[back], np.asarray(states)[back]
    reference = hf_model(CONFIG, WEIGHTS)
    expected, expected_states = np.zeros(57), np.zeros((57, 64))
    for places in batch.sequences():
        out = reference(torch.tensor(batch.tokens[places])[None].long(), output_hidden_states=True)
        expected_states[places] = out.hidden_states[-1][0].detach().numpy()
        learned = batch.targets[places] >= 0
        rows = torch.log_softmax(out.logits[0], -1).detach().numpy()[learned]
        chosen = rows[np.arange(len(rows)), batch.targets[places][learned]]
        expected[places[learned]] = chosen
    np.testing.assert_allclose(log_probs, expected, atol=2e-5)
    np.testing.assert_allclose(states, expected_states, atol=2e-5)


def test_what_is_not_learned_changes_nothing() -> None:
    """Targets of factor 0 may be anything, and what a segment holds is no one else's business."""
    batch = packed([9, 40], vocabulary=96)
    free = batch.factors == 0
    other = replace(batch, targets=np.where(free, 95, batch.targets))
    assert gradients(CONFIG, WEIGHTS, batch)[0] == gradients(CONFIG, WEIGHTS, other)[0]
    alone = Packed(*(array[:9] for array in batch.arrays))
    changed = replace(batch, tokens=np.where(batch.segments == 0, batch.tokens, 7))
    ops, weights = JaxOps(CONFIG), on_device(WEIGHTS)
    few = losses.log_probs_packed(weights, *alone.arrays[:4], ops=ops)
    many = losses.log_probs_packed(weights, *changed.arrays[:4], ops=ops)[:9]
    np.testing.assert_allclose(many, few, atol=2e-6)


@pytest.mark.parametrize(("lengths", "reach"), [([150, 200, 130], 200), ([50] * 6, 50)])
def test_reach_changes_nothing_where_it_is_true(lengths: list[int], reach: int) -> None:
    """Also where the last chunk has queries that only pad it, and see nothing."""
    batch = packed(lengths, vocabulary=96)
    loss, expected = gradients(CONFIG, WEIGHTS, batch)
    near, got = gradients(CONFIG, WEIGHTS, batch, reach=reach)
    assert near == pytest.approx(loss, rel=1e-6)
    assert_same_gradients(got, {name: np.asarray(array) for name, array in expected.items()})


def test_a_number_of_tokens_is_compiled_once() -> None:
    ops, weights = JaxOps(ONE), on_device(random_weights(ONE))
    before = losses.wanted_log_probs._cache_size()
    for length in (70, 80, 96):
        losses.loss_packed(weights, *packed([length], vocabulary=96).arrays, ops=ops)
    assert losses.wanted_log_probs._cache_size() == before + 1


def test_numbers_of_targets_compile_nothing() -> None:
    """Not what cuts the padding off, either."""
    compiled: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    model = get_backend("jax").load(ONE, random_weights(ONE))
    batch = Batch.build([Span(0, 0, list(range(96)))])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for learned in (96, 95, 70):
            targets = np.where(np.arange(96) < learned, 5, -100).astype(np.int32)
            assert np.count_nonzero(model.log_probs(batch, targets)) == learned
            if learned == 96:
                assert compiled
                compiled.clear()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def test_a_reach_is_compiled_once_for_each_doubling() -> None:
    """Also the one that the NNX module gives, the length of its rows."""
    ops, weights = JaxOps(ONE), on_device(random_weights(ONE))
    arrays = packed([130] * 7, vocabulary=96).arrays[:3]
    before = losses._run._cache_size()
    states = [losses.hidden_packed(weights, *arrays, ops=ops, reach=n) for n in (130, 200, 256)]
    assert losses._run._cache_size() == before + 1
    whole = losses.hidden_packed(weights, *arrays, ops=ops)
    for each in states:
        np.testing.assert_allclose(each, whole, atol=2e-5)
    for reach in (800, 1000):  # as many as all tokens that there are with padding
        losses.hidden_packed(weights, *arrays, ops=ops, reach=reach)
    assert losses._run._cache_size() == before + 2


def test_shapes_and_ids_are_checked_where_they_are_known() -> None:
    batch, ops, weights = packed([9], vocabulary=96), JaxOps(CONFIG), on_device(WEIGHTS)
    with pytest.raises(InputError, match=r"arrays \[P\] of the same P > 0, not \(9,\), \(8,\)"):
        losses.hidden_packed(weights, batch.tokens, batch.positions[:8], batch.segments, ops=ops)
    with pytest.raises(InputError, match="token id 96 is not in a vocabulary of 96"):
        losses.loss_packed(weights, batch.tokens * 0 + 96, *batch.arrays[1:], ops=ops)
    for first, message in ((504, r"513 tokens .* context length is 512"), (-1, "position -1")):
        with pytest.raises(InputError, match=message):
            losses.hidden_packed(
                weights, batch.tokens, batch.positions + first, batch.segments, ops=ops
            )
    tokens, positions, segments, targets, factors = batch.arrays
    for loss in (losses.loss_packed, jax.jit(losses.loss_packed, static_argnames="ops")):
        with pytest.raises(InputError, match="whole numbers, not float32: factors come last"):
            loss(weights, tokens, positions, segments, factors, targets, ops=ops)


@pytest.mark.parametrize("wrong", [96, -1, -101])
def test_targets_are_checked_where_they_are_known(wrong: int) -> None:
    """As entries and the torch module do; of factor 0 and of padding they may be anything."""
    batch, ops, weights = packed([9], vocabulary=96, padding=2), JaxOps(CONFIG), on_device(WEIGHTS)
    learner = int(np.flatnonzero(batch.factors)[0])
    targets = batch.targets.copy()
    targets[learner] = wrong
    message = f"target {wrong} is not in a vocabulary of 96: -100, or a factor of 0, leaves a token"
    with pytest.raises(InputError, match=message):
        losses.loss_packed(weights, *batch.arrays[:3], targets, batch.factors, ops=ops)
    with pytest.raises(InputError, match=message):
        losses.log_probs_packed(weights, *batch.arrays[:3], targets, ops=ops)
    with pytest.raises(InputError, match=message):
        jax.grad(losses.loss_packed)(weights, *batch.arrays[:3], targets, batch.factors, ops=ops)
    spared = batch.factors.copy()
    spared[learner] = 0
    left_out = np.where(batch.segments < 0, wrong, targets)
    found = losses.loss_packed(weights, *batch.arrays[:3], left_out, spared, ops=ops)
    targets[learner] = -100
    for factors in (batch.factors, spared):
        expected = losses.loss_packed(weights, *batch.arrays[:3], targets, factors, ops=ops)
        assert float(found) == float(expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_sums_in_float32(dtype: str) -> None:
    weights = jax.tree.map(lambda x: jax.numpy.asarray(x, dtype), WEIGHTS)
    batch = packed([9, 40], vocabulary=96)
    found = losses.log_probs_packed(weights, *batch.arrays[:4], ops=JaxOps(CONFIG))
    exact = losses.log_probs_packed(on_device(WEIGHTS), *batch.arrays[:4], ops=JaxOps(CONFIG))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, atol={"bfloat16": 0.15, "float16": 0.02}[dtype])


# Memory, as the compiler lays it out


def temporary_bytes(config: Config, tokens: int, loss: Any) -> int:
    """What a loss and its gradient need beside stacked weights, the inputs and the gradients."""

    def stack(name: str) -> Any:
        layers = (config.num_hidden_layers,) if ".layers." in name else ()
        return jax.ShapeDtypeStruct((*layers, *config.shapes[name]), np.float32)

    weights = Weights.build(stack, num_layers=1, tied=config.tie_word_embeddings)
    ints = [jax.ShapeDtypeStruct((tokens,), np.int32)] * 4
    factors = jax.ShapeDtypeStruct((tokens,), np.float32)
    step = jax.jit(jax.value_and_grad(partial(loss, ops=JaxOps(config))))
    analysis = step.lower(weights, *ints, factors).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)


def full_loss(weights: Any, *arrays: Any, ops: Any) -> Any:
    """The loss by logits of all tokens."""
    *places, targets, factors = arrays
    states = losses.hidden_packed(weights, *places, ops=ops)
    logits = jax.nn.log_softmax(ops.head(states, head_of(weights)), axis=-1)
    return -(factors * jax.numpy.take_along_axis(logits, targets[:, None], axis=1)[:, 0]).sum()


@pytest.mark.slow
def test_logits_are_never_held() -> None:
    """Feature row 71: 4,096 tokens of the 135M's shapes."""
    config = tiny_config(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
    )
    chunked = temporary_bytes(config, 4096, losses.loss_packed)
    full = temporary_bytes(config, 4096, full_loss)
    assert full - chunked >= 4 * 4096 * config.vocab_size


def test_activations_of_one_layer_are_held() -> None:
    """A layer more adds its input, and nothing but that."""
    tokens = 2048
    few, many = (
        temporary_bytes(tiny_config(num_hidden_layers=layers), tokens, losses.loss_packed)
        for layers in (2, 6)
    )
    assert (many - few) / 4 < 1.1 * 4 * tokens * CONFIG.hidden_size
