"""The NumPy backend: each operation against float64, the whole against its own parts."""

from __future__ import annotations

import numpy as np
import pytest

from smollm2.backends import get_backend
from smollm2.backends.numpy import NumpyModel, NumpyOps, backend
from smollm2.batch import Batch, Span
from smollm2.errors import CacheError, InputError
from smollm2.generate import load
from smollm2.weights import Mlp
from tests.backend_rules import BackendRules, full, over_pages, spans
from tests.tiny import random_weights, tiny_config

CONFIG = tiny_config()
IDS = [int(i) for i in np.random.default_rng(7).integers(0, CONFIG.vocab_size, 200)]


@pytest.fixture(scope="module")
def model() -> NumpyModel:
    return backend.load(CONFIG, random_weights(CONFIG, seed=3))


# Operations against float64: feature row 21


def test_rms_norm() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 64)).astype(np.float32) * 300  # cases: N2, squares beyond float16
    w = rng.standard_normal(64).astype(np.float32)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + CONFIG.rms_norm_eps) * w
    np.testing.assert_allclose(NumpyOps(CONFIG).rms_norm(x, w), exact, rtol=2e-6)


def test_rope_rotates_the_two_halves_of_a_head() -> None:
    ops = NumpyOps(CONFIG)
    positions = [0, 1, 37, 250]
    batch = Batch.build([Span(0, p, [1]) for p in positions])
    x = np.random.default_rng(1).standard_normal((4, 3, 16)).astype(np.float32)
    got = ops.rope(x, ops.plan(batch, None))
    half = 8
    for t, position in enumerate(positions):
        for j in range(half):
            angle = position * CONFIG.rope_theta ** (-2 * j / 16)
            rotation = np.exp(1j * angle) * (x[t, :, j] + 1j * x[t, :, j + half])
            np.testing.assert_allclose(got[t, :, j], rotation.real, atol=2e-5)
            np.testing.assert_allclose(got[t, :, j + half], rotation.imag, atol=2e-5)


def test_swiglu_without_overflow() -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((3, 64)) * 50).astype(np.float32)
    gate, up = rng.standard_normal((2, 128, 64)).astype(np.float32) * 4
    down = rng.standard_normal((64, 128)).astype(np.float32)
    g, u = x.astype(np.float64) @ gate.T, x.astype(np.float64) @ up.T
    with np.errstate(over="ignore"):
        exact = (g / (1 + np.exp(-g)) * u) @ down.T
    with np.errstate(over="ignore"):
        got = NumpyOps(CONFIG).swiglu(x, Mlp(gate, up, down))
    np.testing.assert_allclose(got, exact, rtol=1e-4, atol=np.abs(exact).max() * 1e-6)


def test_attention_is_causal_and_shares_kv_heads() -> None:
    rng = np.random.default_rng(3)
    n, heads, kv, size = 150, 4, 2, 16  # more queries than one chunk holds
    q = rng.standard_normal((n, heads, size)).astype(np.float32)
    k, v = rng.standard_normal((2, n, kv, size)).astype(np.float32)
    ops = NumpyOps(CONFIG)
    plan = ops.plan(Batch.build([Span(0, 0, [1] * n)]), None)
    got = ops.attend(q, k, v, 0, plan).reshape(n, heads, size)
    for head in range(heads):
        shared = head // (heads // kv)
        scores = q[:, head].astype(np.float64) @ k[:, shared].T / np.sqrt(size)
        scores[np.triu_indices(n, 1)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        exact = scores / scores.sum(-1, keepdims=True) @ v[:, shared]
        np.testing.assert_allclose(got[:, head], exact, atol=2e-6)


class TestRules(BackendRules):
    """What every backend keeps to."""


def test_untied_head_is_used() -> None:
    config = tiny_config(tie_word_embeddings=False)
    weights = random_weights(config, seed=3)
    logits = full(backend.load(config, weights), IDS[:5])
    tied = full(backend.load(CONFIG, random_weights(CONFIG, seed=3)), IDS[:5])
    assert logits.shape == tied.shape
    assert not np.allclose(logits, tied)


def test_a_failed_forward_can_be_repeated(model: NumpyModel, monkeypatch) -> None:
    cache = model.new_cache(1, 32)
    model.forward(spans(cache, Span(0, 0, IDS[:8])), cache)
    batch = spans(cache, Span(0, 8, IDS[8:20]))

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(model.ops, "swiglu", broken)
        with pytest.raises(RuntimeError, match="out of luck"):
            model.forward(batch, cache)
    assert cache.lengths == (8,)
    retried = model.forward(batch, cache)
    np.testing.assert_allclose(retried[0], full(model, IDS[:20])[-1], rtol=1e-4, atol=1e-5)

    cache, table = model.new_paged_cache(3), [[2, 1]]
    model.forward(over_pages(table, Span(0, 0, IDS[:100])), cache)
    again = over_pages(table, Span(0, 80, IDS[80:82]))
    with monkeypatch.context() as patch:
        patch.setattr(model.ops, "swiglu", broken)
        with pytest.raises(RuntimeError, match="out of luck"):
            model.forward(again, cache)
    with pytest.raises(CacheError, match="page 1 of row 0 holds 16 tokens"):  # written over
        model.forward(over_pages(table, Span(0, 100, IDS[:1])), cache)
    np.testing.assert_allclose(
        model.forward(again, cache)[0], full(model, IDS[:82])[-1], rtol=1e-4, atol=1e-5
    )


def test_a_closed_model_says_so() -> None:
    model = backend.load(CONFIG, random_weights(CONFIG, seed=3))
    model.close()
    model.close()
    with pytest.raises(InputError, match="closed"):
        model.forward(Batch.build([Span(0, 0, [1])]))


def test_memory_follows_use_not_capacity(model: NumpyModel) -> None:
    cache = model.new_cache(2, 256)
    assert cache.nbytes == 0
    model.forward(spans(cache, Span(0, 0, IDS[:3])), cache)
    a_token = 2 * CONFIG.num_hidden_layers * 2 * CONFIG.num_key_value_heads * 16 * 4
    assert cache.nbytes == 64 * a_token
    model.forward(spans(cache, Span(0, 3, IDS[3:70])), cache)
    assert cache.nbytes == 128 * a_token


def test_unknown_backend() -> None:
    with pytest.raises(InputError, match="no backend named 'cuda': choose from native, numpy"):
        get_backend("cuda")
    for wrong in ("", 1, []):
        with pytest.raises(InputError, match=r"no backend named .*: choose from native, numpy"):
            load("nowhere", backend=wrong)


def test_numpy_has_no_options() -> None:
    with pytest.raises(InputError, match="the numpy backend has no option threads"):
        backend.load(CONFIG, random_weights(CONFIG), threads=2)
