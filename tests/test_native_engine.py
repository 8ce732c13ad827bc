"""The native engine: against the NumPy backend, and bit for bit against itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smollm2.backends import native, numpy
from smollm2.backends.native import NativeModel
from smollm2.batch import Span
from smollm2.quantize import Quantized, kind_of, pack_weight
from smollm2.weights import EMBEDDING
from tests.backend_rules import CONFIG, IDS, WEIGHTS, BackendRules, full, in_parts, spans
from tests.tiny import random_weights, tiny_config

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "untied": {"tie_word_embeddings": False},
    "96 wide": {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 160},
    "odd": {
        "hidden_size": 100,
        "intermediate_size": 70,
        "num_attention_heads": 6,
        "head_dim": 18,
        "vocab_size": 97,
    },
    "wide heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256},
    "one layer": {"num_hidden_layers": 1},
}
QUANTS = ("f32", "bf16", "q16", "q8", "q4", "q4m")


@pytest.fixture(autouse=True)
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads as are asked for, also where there are fewer CPUs."""
    monkeypatch.setattr(native, "_cpus", lambda: 256)


def load(quant: str | None = "f32", threads: int = 1, **options: Any) -> NativeModel:
    return native.backend.load(CONFIG, WEIGHTS, quant=quant, threads=threads, **options)


def rms(x: Any) -> float:
    return float(np.sqrt((x**2).mean()))


def same(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(got, expected)


class TestRules(BackendRules):
    """f32 on two threads, compared bit for bit; feature rows 148-151, 153, 154, 161."""

    @pytest.fixture
    def model(self) -> NativeModel:
        return load(threads=2)

    def close(self, got: Any, expected: Any) -> None:
        same(got, expected)


class TestRulesOfQ8(BackendRules):
    """The same with 8-bit weights and 16-bit keys on three threads."""

    @pytest.fixture
    def model(self) -> NativeModel:
        return load("q8", threads=3)

    def close(self, got: Any, expected: Any) -> None:
        same(got, expected)


# Against the reference


@pytest.mark.parametrize("shape", SHAPES)
def test_f32_equals_the_numpy_backend(shape: str) -> None:
    config = tiny_config(**SHAPES[shape])
    weights = random_weights(config, seed=5)
    ids = [i % config.vocab_size for i in IDS]
    expected = full(numpy.backend.load(config, weights), ids)
    for threads in (1, 3):
        model = native.backend.load(config, weights, quant="f32", threads=threads)
        np.testing.assert_allclose(full(model, ids), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("quant", "off"), [("bf16", 0.03), ("q16", 1e-3), ("q8", 0.06), ("q4", 0.6)]
)
def test_kinds_are_as_close_as_their_bits(quant: str, off: float) -> None:
    """Root mean square of the difference of logits whose own is 1."""
    expected = full(numpy.backend.load(CONFIG, WEIGHTS), IDS)
    difference = full(load(quant, kv="f32"), IDS) - expected
    assert off / 30 < rms(difference) < off


@pytest.mark.parametrize(("kv", "off"), [("int16", 0.02), ("int8", 0.05)])
def test_kinds_of_the_cache(kv: str, off: float) -> None:
    exact = full(load(kv="f32"), IDS)
    assert off / 30 < rms(full(load(kv=kv), IDS) - exact) < off


def test_the_cache_is_as_fine_as_the_weights_by_default() -> None:
    """16 bit beside 8 and 4, float32 beside finer ones; however the weights came to be so."""
    for quant, kv in (("q8", "int16"), ("q4", "int16"), ("bf16", "f32"), ("q16", "f32")):
        model = load(quant)
        assert model.kv == kv
        same(full(model, IDS), full(load(quant, kv=kv), IDS))
        packed = WEIGHTS.map(
            lambda _, weight, quant=quant: (
                pack_weight(weight, quant, threads=1) if weight.ndim == 2 else weight
            )
        )
        assert native.backend.load(CONFIG, packed, threads=1).kv == kv
    int8, int16 = (full(load("q8", kv=kv), IDS) for kv in ("int8", "int16"))
    assert rms(int8 - int16) > 1e-3


def quantized(kind: str, rows: int, cols: int, seed: int) -> Quantized:
    """Random groups of a GGUF kind with moderate scales."""
    rng = np.random.default_rng(seed)
    halves = {"Q8_0": 1, "Q4_0": 1, "Q4_1": 2}[kind]
    body = {"Q8_0": 32, "Q4_0": 16, "Q4_1": 16}[kind]
    groups = np.empty((rows, cols // 32, 2 * halves + body), dtype=np.uint8)
    step = {"Q8_0": 1e-3, "Q4_0": 0.02, "Q4_1": 0.02}[kind]
    scales = rng.normal(1, 0.3, (rows, cols // 32, halves)) * step
    if halves == 2:
        scales[..., 1] *= -7.5
    groups[..., : 2 * halves] = scales.astype("<f2").view(np.uint8).reshape(rows, cols // 32, -1)
    groups[..., 2 * halves :] = rng.integers(0, 256, (rows, cols // 32, body))
    return Quantized(kind, (rows, cols), groups.reshape(rows, -1))


@pytest.mark.parametrize("seed", range(3))
def test_files_of_mixed_kinds_are_held_without_loss(seed: int) -> None:
    """Each matrix has its own kind: so q and k may be Q4_1 where v is Q8_0; cases: Q rows."""
    kinds = ["Q8_0", "Q4_0", "Q4_1", "F32", "F16", "BF16", "Q8_0"]
    rng = np.random.default_rng(seed)

    def convert(name: str, weight: Any) -> Any:
        if weight.ndim == 1:
            return weight
        kind = kinds[rng.integers(len(kinds))] if name != EMBEDDING else "Q8_0"
        if kind.startswith("Q"):
            return quantized(kind, *weight.shape, int(rng.integers(2**31)))
        dtypes = {"F32": np.float32, "F16": np.float16, "BF16": "bfloat16"}
        return weight.astype(dtypes[kind])

    weights = WEIGHTS.map(convert)
    model = native.backend.load(CONFIG, weights, threads=2, kv="f32")
    expected = full(numpy.backend.load(CONFIG, weights), IDS)
    difference = full(model, IDS) - expected
    assert rms(difference) < 0.05 * expected.std()
    packed = {kind_of(w): w for _, w in weights.items()}
    assert model.kinds <= {"q8", "q4", "q4m", "f32", "bf16"}
    assert ("q4m" in model.kinds) == ("Q4_1" in packed)
    same(in_parts(model, model.new_cache(), IDS, [5, 1, 194]), full(model, IDS))


# Bit for bit the same, however it is computed


@pytest.mark.parametrize("quant", QUANTS)
def test_threads_do_not_change_a_bit(quant: str) -> None:
    """Prefill, decode with one chunk of pages, and a mixed batch, on 1 to 4 and on 7 threads."""
    expected = None
    for threads in (1, 2, 3, 4, 7):
        model = load(quant, threads)
        cache = model.new_cache(3, 256)
        got = [model.forward(spans(cache, Span(1, 0, IDS[:150], "all")), cache)]
        mixed = spans(cache, Span(1, 150, IDS[150:151]), Span(0, 0, IDS[:9]), Span(2, 0, IDS[9:40]))
        got.append(model.forward(mixed, cache))
        for i in range(3):
            ids = IDS[160 + i : 161 + i]
            rows = [Span(row, cache.lengths[row], ids) for row in (2, 0, 1)]
            got.append(model.forward(spans(cache, *rows), cache))
        if expected is None:
            expected = got
        for one, other in zip(got, expected, strict=True):
            same(one, other)


@pytest.mark.parametrize("quant", ["f32", "q8"])
@pytest.mark.parametrize("kv", ["f32", "int16", "int8"])
def test_chunks_of_pages_are_merged_in_order(quant: str, kv: str) -> None:
    """Over 256 places, where workers share the pages of one kv head; longer than one pass."""
    config = tiny_config(max_position_embeddings=2048, num_key_value_heads=1)
    weights = random_weights(config, seed=8)
    ids = [int(i) for i in np.random.default_rng(9).integers(0, 96, 1500)]
    expected = None
    for threads, parts in [
        (1, [1500]),
        (2, [700, 1, 799]),
        (3, [1490, *[1] * 10]),
        (5, [1024, 476]),
    ]:
        model = native.backend.load(config, weights, quant=quant, kv=kv, threads=threads)
        got = in_parts(model, model.new_cache(1), ids, parts)
        expected = got if expected is None else expected
        same(got, expected)
    reference = full(numpy.backend.load(config, weights), ids)
    off = {"f32": {"f32": 1e-4, "int16": 0.3, "int8": 0.5}, "q8": {"f32": 1, "int16": 1, "int8": 1}}
    assert np.abs(expected - reference).max() < off[quant][kv]


def test_a_reused_cache_gives_the_same_bits() -> None:
    model = load("q8", 2)
    cache = model.new_cache(2, 256)
    model.forward(spans(cache, Span(0, 0, IDS[100:200])), cache)
    cold = model.new_cache(2, 256)
    expected = in_parts(model, cold, IDS, [80, 1, 3])
    cache.truncate(0, 0)
    same(in_parts(model, cache, IDS, [80, 1, 3]), expected)


def test_rows_beside_do_not_change_a_bit() -> None:
    """32 rows decode together, each as alone; feature row 17."""
    model = load("q8", 2)
    cache, rows = model.new_cache(32, 64), range(32)
    prompts = [IDS[row : row + 3 + row] for row in rows]
    model.forward(spans(cache, *[Span(r, 0, prompts[r]) for r in rows]), cache)
    order = list(np.random.default_rng(1).permutation(32))
    together = spans(cache, *[Span(int(r), len(prompts[r]), [IDS[int(r)]]) for r in order])
    got = model.forward(together, cache)
    for i, row in enumerate(order):
        same(got[i], full(model, [*prompts[row], IDS[int(row)]])[-1])


@pytest.mark.parametrize("quant", QUANTS)
def test_instruction_sets_agree(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, through the whole model."""
    from smollm2 import _native

    best = load(quant)
    *others, name = _native.kernels.isa_names()
    assert best.engine.isa == name
    expected = full(best, IDS)
    engine = _native.Engine
    for isa in others:
        monkeypatch.setattr(_native, "Engine", lambda *given, isa=isa: engine(*given, isa))
        model = load(quant)
        assert model.engine.isa == isa
        same(full(model, IDS), expected)
