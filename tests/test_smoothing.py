"""Smoothing: the model stays the same, and rounds better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from smollm2.backends import get_backend
from smollm2.backends.numpy import NumpyOps
from smollm2.batch import Batch, Span
from smollm2.checkpoint import Checkpoint, load_checkpoint
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.kinds import COARSE
from smollm2.model import hidden
from smollm2.packing import pack
from smollm2.quantize import (
    Quantized,
    Scaled,
    Weight,
    as_float32,
    kind_of,
    kind_without_loss,
    pack_weight,
)
from smollm2.smoothing import (
    _SEGMENT,
    TOKENS,
    _ids_without_text,
    _segments,
    calibration_text,
    easier_to_round,
    smoothed,
)
from smollm2.state import LoadReport
from smollm2.weights import Weights
from tests.tiny import random_weights, tiny_config

IDS = [int(i) for i in np.random.default_rng(1).integers(0, 96, 100)]


def logits(config: Config, weights: Weights[Any], **options: Any) -> NDArray[np.float32]:
    backend = get_backend("native" if options else "numpy")
    batch = Batch.build([Span(0, 0, IDS[:40], "all")])
    return backend.load(config, weights, **options).forward(batch)


def with_outliers(config: Config, seed: int, factor: float = 60.0) -> Weights[Any]:
    """A model in which a few channels of each product's input are far greater than the others."""
    weights = random_weights(config, seed)
    rng = np.random.default_rng(seed)

    def grow(name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        channels = rng.choice(len(weight), 2, replace=False)
        if name.endswith(("layernorm.weight", "up_proj.weight", "v_proj.weight")):
            weight = weight.copy()
            weight[channels] *= factor
        return weight

    return weights.map(grow)


# ---- the same model


@given(
    heads=st.sampled_from([(4, 2), (4, 4), (6, 2), (3, 1)]),
    tied=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_the_model_computes_the_same(heads: tuple[int, int], tied: bool, seed: int) -> None:
    config = tiny_config(
        num_attention_heads=heads[0], num_key_value_heads=heads[1], tie_word_embeddings=tied
    )
    weights = with_outliers(config, seed)
    expected = logits(config, weights)
    got = logits(config, smoothed(config, weights, IDS))
    assert np.abs(got - expected).max() < 2e-3 * np.abs(expected).max()


def test_only_products_and_their_norms_change() -> None:
    config = tiny_config()
    weights = random_weights(config)
    after = dict(smoothed(config, weights, IDS).items())
    for name, weight in weights.items():
        same = name in ("model.embed_tokens.weight", "model.norm.weight")
        assert (after[name] is weight) == same, name


@pytest.mark.parametrize("source", ["float16", "Q8_0"])
def test_weights_of_any_kind_are_smoothed_without_being_held_dense(source: str) -> None:
    config = tiny_config()
    dense = random_weights(config)

    def convert(_: str, weight: NDArray[np.float32]) -> Weight:
        if source == "float16":
            return weight.astype(np.float16)
        if weight.ndim == 1:
            return weight
        blocks = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
        return Quantized("Q8_0", weight.shape, blocks)

    weights = dense.map(convert)
    after = smoothed(config, weights, IDS)
    for name, weight in after.items():
        if isinstance(weight, Scaled):
            assert weight.base is dict(weights.items())[name]
    expected, got = logits(config, weights.map(lambda _, w: as_float32(w))), logits(config, after)
    assert np.abs(got - expected).max() < 2e-3 * np.abs(expected).max()


# ---- what factors are made of


def test_factors_are_those_of_the_formula() -> None:
    """In float64, for the first product of all, of every token and none left out."""
    config = tiny_config()
    weights = with_outliers(config, 5)
    attention, gain = weights.blocks[0].attention, weights.blocks[0].input_norm
    ids = [i for segment in _segments(IDS, config.max_position_embeddings) for i in segment]
    x = weights.token_embedding[ids].astype(np.float64)
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + config.rms_norm_eps) * gain
    matrices = np.concatenate([attention.query, attention.key, attention.value]).astype(np.float64)
    factors = np.sqrt(np.sqrt((x**2).mean(axis=0) / (matrices**2).mean(axis=0)))
    factors /= np.exp(np.log(factors).mean())
    importance = (x**2).mean(axis=0) / factors**2
    importance = np.maximum(importance / importance.mean(), 1e-3)
    after = smoothed(config, weights, IDS).blocks[0]
    for matrix in (after.attention.query, after.attention.key, after.attention.value):
        np.testing.assert_allclose(matrix.columns, factors, rtol=1e-4)
        np.testing.assert_allclose(matrix.importance, importance, rtol=1e-3)
    np.testing.assert_allclose(after.input_norm, gain / factors, rtol=1e-4)


class Listener(NumpyOps):
    """Keeps what each product reads."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.inputs: dict[int, NDArray[np.float32]] = {}

    def linear(self, x: NDArray[np.float32], weight: Any) -> NDArray[np.float32]:
        self.inputs[id(weight)] = x
        return super().linear(x, weight)


def test_errors_count_as_much_as_what_the_smoothed_model_reads() -> None:
    """For each product, of all layers: the mean square of its input, which is smooth by then."""
    config = tiny_config()
    after = smoothed(config, with_outliers(config, 4), IDS)
    dense = after.map(lambda _, weight: as_float32(weight))
    listener = Listener(config)
    spans = [Span(0, 0, part, "none") for part in _segments(IDS, config.max_position_embeddings)]
    hidden(dense, listener, listener.plan(Batch.build(spans), None))
    products = {name: weight for name, weight in after.items() if isinstance(weight, Scaled)}
    assert len(products) == 7 * config.num_hidden_layers
    for name, weight in dense.items():
        if name not in products:
            continue
        squares = np.square(listener.inputs[id(weight)], dtype=np.float64).mean(axis=0)
        expected = np.maximum(squares / squares.mean(), 1e-3)
        np.testing.assert_allclose(products[name].importance, expected, rtol=2e-3, err_msg=name)


@given(length=st.integers(1, 5000), context=st.integers(1, 200))
def test_segments_are_from_all_over_the_text(length: int, context: int) -> None:
    segments = _segments(range(length), context)
    sizes = {len(segment) for segment in segments}
    assert sizes == {min(_SEGMENT, context, length)}
    assert sum(map(len, segments)) <= TOKENS
    starts = [segment[0] for segment in segments]
    assert starts[0] == 0
    if len(segments) > 1:
        assert segments[-1][-1] == length - 1
        assert np.ptp(np.diff(starts)) <= 1
    if length <= TOKENS - _SEGMENT and context >= _SEGMENT:
        assert {i for segment in segments for i in segment} == set(range(length))


# ---- rounding


@pytest.mark.parametrize("quant", ["q8", "q4"])
def test_outliers_cost_less(quant: str) -> None:
    """cases: Q6. The mean error over several models, against float32."""
    config = tiny_config()
    plain, better = [], []
    for seed in range(6):
        weights = with_outliers(config, seed)
        expected = logits(config, weights)
        plain.append(np.abs(logits(config, weights, quant=quant) - expected).mean())
        after = smoothed(config, weights, IDS)
        better.append(np.abs(logits(config, after, quant=quant) - expected).mean())
    assert np.mean(better) < 0.85 * np.mean(plain)


def test_it_is_the_same_each_time() -> None:
    config = tiny_config()
    weights = with_outliers(config, 3)
    first, second = (dict(smoothed(config, weights, IDS).items()) for _ in range(2))
    for name, weight in first.items():
        np.testing.assert_array_equal(as_float32(weight), as_float32(second[name]))


# ---- what cannot be smoothed


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_what_has_no_range_stays_as_it_is(value: float) -> None:
    """A layer of zeros, and one whose activations are no numbers."""
    config = tiny_config()
    weights = random_weights(config).map(
        lambda name, weight: (
            np.full_like(weight, value) if name.endswith("0.mlp.gate_proj.weight") else weight
        )
    )
    after = dict(smoothed(config, weights, IDS).items())
    down = after["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(down, Scaled)
    np.testing.assert_array_equal(down.columns, np.ones(config.intermediate_size))
    assert all(
        np.isfinite(factors).all()
        for weight in after.values()
        if isinstance(weight, Scaled)
        for factors in (weight.rows, weight.columns)
        if factors is not None
    )


def test_a_channel_that_is_silent_gets_no_endless_factor() -> None:
    config = tiny_config()
    weights = random_weights(config)
    norm = weights.blocks[0].input_norm
    norm[5] = 0.0
    after = smoothed(config, weights, IDS)
    factors = after.blocks[0].attention.query.columns
    assert np.isfinite(factors).all()
    assert 0 < factors[5] < 1


# ---- checkpoints


def checkpoint_of(real: Checkpoint, **changes: Any) -> Checkpoint:
    return replace(real, **changes)


@pytest.fixture(scope="module")
def real(real_gguf: Path) -> Checkpoint:
    return load_checkpoint(real_gguf)


@pytest.mark.weights
def test_other_kinds_stay_as_they_are(real: Checkpoint) -> None:
    for quant in (None, "f32", "bf16", "q16"):
        assert easier_to_round(real, quant) is real.weights


def bare(config: Config, weights: Weights[Any]) -> Checkpoint:
    """A checkpoint without a tokenizer."""
    return Checkpoint(
        path=Path("bare"),
        config=config,
        weights=weights,
        tokenizer=None,
        template=None,
        generation_config={},
        report=LoadReport(),
    )


def test_without_a_tokenizer_ids_from_the_whole_vocabulary_do() -> None:
    """The mean error over several models; none is left as it is."""
    config = tiny_config()
    plain, better = [], []
    for seed in range(6):
        weights = with_outliers(config, seed)
        expected = logits(config, weights)
        after = easier_to_round(bare(config, weights), "q8")
        plain.append(np.abs(logits(config, weights, quant="q8") - expected).mean())
        better.append(np.abs(logits(config, after, quant="q8") - expected).mean())
    assert np.mean(better) < 0.85 * np.mean(plain)


@given(vocab_size=st.integers(1, 100_000))
def test_ids_without_a_text_are_spread_over_the_vocabulary(vocab_size: int) -> None:
    ids = _ids_without_text(vocab_size)
    assert len(ids) == TOKENS
    assert all(0 <= i < vocab_size for i in ids)
    if vocab_size >= 1000:
        tenths = np.histogram(ids, bins=10, range=(0, vocab_size))[0]
        assert min(tenths) > 0.9 * TOKENS / 10


def test_a_text_needs_a_tokenizer_and_a_token() -> None:
    config = tiny_config()
    weights = random_weights(config)
    with pytest.raises(InputError, match="bare has no tokenizer to read a calibration text with"):
        easier_to_round(bare(config, weights), "q8", "Some text")
    with pytest.raises(InputError, match="at least one token"):
        smoothed(config, weights, [])


@pytest.mark.weights
def test_packed_weights_stay_as_they_are(real: Checkpoint) -> None:
    weights = real.weights.map(
        lambda name, weight: (
            pack_weight(weight, "q4m") if name.endswith("0.mlp.gate_proj.weight") else weight
        )
    )
    assert easier_to_round(checkpoint_of(real, weights=weights), "q8") is weights


@pytest.mark.weights
@pytest.mark.parametrize(("source", "quant"), [("Q8_0", "q8"), ("Q4_0", "q4"), ("Q4_1", "q4m")])
def test_what_is_held_without_loss_stays_as_it_is(
    real: Checkpoint, source: str, quant: str
) -> None:
    """One such matrix in a block is enough; the file's embedding, in Q8_0, is none of a block."""
    blocks = gguf.quants.quantize(
        np.ones((1536, 576), dtype=np.float32), gguf.GGMLQuantizationType[source]
    )
    held = Quantized(source, (1536, 576), blocks)
    weights = real.weights.map(
        lambda name, weight: held if name.endswith("3.mlp.up_proj.weight") else weight
    )
    assert easier_to_round(checkpoint_of(real, weights=weights), quant) is weights


@pytest.mark.weights
def test_a_text_can_be_given(real: Checkpoint) -> None:
    """Another text gives other factors; the package's own is the default."""
    config = real.config
    one_layer = replace(config, num_hidden_layers=1)
    weights = replace(real.weights, blocks=real.weights.blocks[:1])
    small = checkpoint_of(real, config=one_layer, weights=weights)
    factors = [
        easier_to_round(small, "q8", text).blocks[0].mlp.down.columns
        for text in (None, calibration_text(), "Paris " * 200)
    ]
    np.testing.assert_array_equal(factors[0], factors[1])
    assert not np.allclose(factors[0], factors[2])


@pytest.mark.weights
def test_the_text_of_the_package_is_long_enough(real: Checkpoint) -> None:
    assert real.tokenizer is not None
    assert len(real.tokenizer.encode(calibration_text(), allow_special=True)) >= TOKENS


# ---- scaled weights


@pytest.mark.parametrize("both", [True, False])
def test_scaled_weights_are_their_base_times_factors(both: bool) -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(32, 64)).astype(np.float16)
    rows, columns = (rng.uniform(0.5, 2, size).astype(np.float32) for size in base.shape)
    scaled = Scaled(base, rows=rows if both else None, columns=columns)
    expected = base.astype(np.float64) * columns * (rows[:, None] if both else 1)
    np.testing.assert_allclose(scaled.dequantize(), expected, rtol=1e-6)
    np.testing.assert_array_equal(as_float32(scaled), scaled.dequantize())
    assert scaled.shape == base.shape
    assert scaled.nbytes == base.nbytes
    assert kind_of(scaled) == "F32"
    assert kind_without_loss(scaled) is None


@pytest.mark.parametrize("kind", COARSE)
def test_scaled_weights_are_packed_with_their_factors(kind: str) -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(32, 64)).astype(np.float32)
    scaled = Scaled(base, columns=rng.uniform(0.5, 2, 64).astype(np.float32))
    values = scaled.dequantize()
    expected = pack(values.view(np.uint8).reshape(32, -1), "F32", 64, kind)
    np.testing.assert_array_equal(pack_weight(scaled, kind).data.reshape(-1), expected.reshape(-1))
