"""The NumPy backend: each operation against float64, the whole against its own parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from smollm2.backends import get_backend
from smollm2.backends.numpy import NumpyModel, NumpyOps, backend
from smollm2.batch import Batch, Span
from smollm2.cache import Cache
from smollm2.errors import CacheError, ContextLengthError, InputError
from smollm2.weights import Mlp
from tests.tiny import random_weights, tiny_config

CONFIG = tiny_config()
IDS = [int(i) for i in np.random.default_rng(7).integers(0, CONFIG.vocab_size, 200)]


@pytest.fixture(scope="module")
def model() -> NumpyModel:
    return backend.load(CONFIG, random_weights(CONFIG, seed=3))


def full(model: NumpyModel, ids: list[int]) -> np.ndarray:
    return model.forward(Batch.build([Span(0, 0, ids, "all")]))


def spans(cache, *parts: Span) -> Batch:
    return Batch.build(parts, page_table=cache.page_table, page_size=cache.page_size)


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


# One text for prefill, chunks, decode and packed prompts


@pytest.mark.parametrize("parts", [[200], [1] * 200, [64, 64, 72], [3, 130, 1, 66]])
def test_any_chunking_equals_the_full_forward(model: NumpyModel, parts: list[int]) -> None:
    """Feature rows 153, 154; decode is a chunk of one."""
    cache = model.new_cache(1, 200)
    start, pieces = 0, []
    for count in parts:
        pieces.append(
            model.forward(spans(cache, Span(0, start, IDS[start : start + count], "all")), cache)
        )
        start += count
    np.testing.assert_allclose(np.concatenate(pieces), full(model, IDS), rtol=1e-4, atol=1e-5)
    assert cache.lengths == (200,)


def test_rows_of_a_mixed_batch_equal_their_solo_runs(model: NumpyModel) -> None:
    """Prefill, a chunk and decode in one pass; cases: K4, K6, K11."""
    cache = model.new_cache(3, 64)
    model.forward(spans(cache, Span(1, 0, IDS[:20]), Span(2, 0, IDS[50:70])), cache)
    mixed = model.forward(
        spans(
            cache,
            Span(2, 20, IDS[70:71]),
            Span(0, 0, IDS[:33]),
            Span(1, 20, IDS[20:29], "all"),
        ),
        cache,
    )
    assert cache.lengths == (33, 29, 21)
    expected = [
        full(model, IDS[50:71])[-1:],
        full(model, IDS[:33])[-1:],
        full(model, IDS[:29])[20:],
    ]
    np.testing.assert_allclose(mixed, np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_packed_segments_do_not_see_each_other(model: NumpyModel) -> None:
    packed = model.forward(
        Batch.build([Span(0, 0, IDS[:40], "all"), Span(0, 0, IDS[40:90], "all")])
    )
    alone = np.concatenate([full(model, IDS[:40]), full(model, IDS[40:90])])
    np.testing.assert_allclose(packed, alone, rtol=1e-4, atol=1e-5)


def test_only_wanted_logits_are_made(model: NumpyModel) -> None:
    assert model.forward(Batch.build([Span(0, 0, IDS[:9], "none")])).shape == (0, 96)
    assert model.forward(Batch.build([Span(0, 0, IDS[:9])])).shape == (1, 96)


def test_untied_head_is_used() -> None:
    config = tiny_config(tie_word_embeddings=False)
    weights = random_weights(config, seed=3)
    logits = full(backend.load(config, weights), IDS[:5])
    tied = full(backend.load(CONFIG, random_weights(CONFIG, seed=3)), IDS[:5])
    assert logits.shape == tied.shape
    assert not np.allclose(logits, tied)


# The cache's rules: feature rows 148-151


def test_overflow_is_an_error_before_anything_changes(model: NumpyModel) -> None:
    cache = model.new_cache(1, 10)
    model.forward(spans(cache, Span(0, 0, IDS[:8])), cache)
    with pytest.raises(CacheError, match="10 tokens a row is too small for 11 tokens"):
        spans(cache, Span(0, 8, IDS[8:11]))
    assert cache.lengths == (8,)
    again = model.forward(spans(cache, Span(0, 8, IDS[8:10])), cache)
    np.testing.assert_allclose(again[0], full(model, IDS[:10])[-1], rtol=1e-4, atol=1e-5)


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


def test_a_batch_must_continue_its_rows(model: NumpyModel) -> None:
    cache = model.new_cache(2, 32)
    with pytest.raises(CacheError, match="row 1 holds 0 tokens, but the batch continues it at"):
        model.forward(spans(cache, Span(1, 3, IDS[:2])), cache)
    other = model.new_cache(3, 32)
    with pytest.raises(CacheError, match="built for 3 rows"):
        model.forward(spans(other, Span(0, 0, IDS[:2])), cache)


def test_a_batch_of_other_slots_is_refused(model: NumpyModel) -> None:
    """A Batch may be made by hand; its slots must be those of its rows and positions."""
    cache = model.new_cache(2, 32)
    batch = spans(cache, Span(0, 0, IDS[:4]))
    with pytest.raises(CacheError, match="slots"):
        model.forward(replace(batch, slots=batch.slots + 1), cache)
    with pytest.raises(CacheError, match="too small for 40 tokens"):
        model.forward(replace(batch, lengths=batch.lengths + 36), cache)
    with pytest.raises(CacheError, match="another backend"):
        model.forward(batch, Cache(2, 32))
    assert cache.lengths == (0, 0)


def test_a_closed_model_says_so() -> None:
    model = backend.load(CONFIG, random_weights(CONFIG, seed=3))
    model.close()
    model.close()
    with pytest.raises(InputError, match="closed"):
        model.forward(Batch.build([Span(0, 0, [1])]))


def test_truncate_and_reset_keep_the_storage(model: NumpyModel) -> None:
    cache = model.new_cache(1, 128)
    model.forward(spans(cache, Span(0, 0, IDS[:100])), cache)
    before = cache.nbytes
    cache.truncate(0, 40)
    assert cache.lengths == (40,)
    logits = model.forward(spans(cache, Span(0, 40, IDS[40:50])), cache)
    np.testing.assert_allclose(logits[0], full(model, IDS[:50])[-1], rtol=1e-4, atol=1e-5)
    cache.reset()
    assert cache.lengths == (0,)
    assert cache.nbytes == before
    for row, length in [(1, 0), (0, 1), (0, -1)]:
        with pytest.raises(CacheError, match=f"row {row}"):
            cache.truncate(row, length)


def test_memory_follows_use_not_capacity(model: NumpyModel) -> None:
    cache = model.new_cache(2, 256)
    assert cache.nbytes == 0
    model.forward(spans(cache, Span(0, 0, IDS[:3])), cache)
    a_token = 2 * CONFIG.num_hidden_layers * 2 * CONFIG.num_key_value_heads * 16 * 4
    assert cache.nbytes == 64 * a_token
    model.forward(spans(cache, Span(0, 3, IDS[3:70])), cache)
    assert cache.nbytes == 128 * a_token


def test_a_closed_cache_is_an_error_and_closing_twice_is_not(model: NumpyModel) -> None:
    """Feature row 161."""
    cache = model.new_cache(1, 16)
    batch = spans(cache, Span(0, 0, IDS[:2]))
    cache.close()
    cache.close()
    for use in (cache.reset, lambda: cache.truncate(0, 0), lambda: model.forward(batch, cache)):
        with pytest.raises(CacheError, match="closed"):
            use()


@pytest.mark.parametrize("capacity", [0, -1, 257])
def test_capacity_has_limits(model: NumpyModel, capacity: int) -> None:
    with pytest.raises(InputError, match=r"not in 1 … 256"):
        model.new_cache(1, capacity)


def test_ids_and_positions_are_checked(model: NumpyModel) -> None:
    for wrong in (-1, 96, 2**31 - 1):
        with pytest.raises(InputError, match=f"token id {wrong} is not in a vocabulary of 96"):
            model.forward(Batch.build([Span(0, 0, [1, wrong])]))
    with pytest.raises(ContextLengthError, match=r"257 tokens .* context length is 256"):
        model.forward(Batch.build([Span(0, 0, [1] * 257)]))
    with pytest.raises(InputError, match="at least one row"):
        model.new_cache(0)


def test_unknown_backend() -> None:
    with pytest.raises(InputError, match="no backend named 'cuda': choose from numpy"):
        get_backend("cuda")
