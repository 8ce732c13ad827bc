"""What every backend keeps to: one forward for all batches, and the rules of its cache.

A test module subclasses ``BackendRules`` and gives a ``model`` fixture, of ``CONFIG`` and
``WEIGHTS``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from smollm2.batch import Batch, Span
from smollm2.cache import Cache, Layout
from smollm2.causal_lm import CausalLM
from smollm2.errors import CacheError, ContextLengthError, InputError
from tests.tiny import random_weights, tiny_config

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG, seed=3)
IDS = [int(i) for i in np.random.default_rng(7).integers(0, CONFIG.vocab_size, 200)]


def full(model: CausalLM, ids: list[int]) -> NDArray[np.float32]:
    """Logits of all tokens of one sequence, without a cache."""
    return model.forward(Batch.build([Span(0, 0, ids, "all")]))


def spans(cache: Cache, *parts: Span) -> Batch:
    return Batch.build(parts, page_table=cache.page_table, page_size=cache.page_size)


def in_parts(model: CausalLM, cache: Cache, ids: list[int], parts: list[int]) -> Any:
    """Logits of all tokens, fed to row 0 in parts."""
    start, pieces = 0, []
    for count in parts:
        span = Span(0, start, ids[start : start + count], "all")
        pieces.append(model.forward(spans(cache, span), cache))
        start += count
    return np.concatenate(pieces)


class BackendRules:
    """Tests of a ``model``."""

    def close(self, got: Any, expected: Any) -> None:
        """That two ways to the same logits agree; a backend may be stricter."""
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("parts", [[200], [1] * 200, [64, 64, 72], [3, 130, 1, 66]])
    def test_any_chunking_equals_the_full_forward(self, model: CausalLM, parts: list[int]) -> None:
        """Feature rows 153, 154; decode is a chunk of one."""
        cache = model.new_cache(1, 200)
        self.close(in_parts(model, cache, IDS, parts), full(model, IDS))
        assert cache.lengths == (200,)

    def test_rows_of_a_mixed_batch_equal_their_solo_runs(self, model: CausalLM) -> None:
        """Prefill, a chunk and decode in one pass; cases: K4, K6, K11."""
        cache = model.new_cache(3, 64)
        model.forward(spans(cache, Span(1, 0, IDS[:20]), Span(2, 0, IDS[50:70])), cache)
        mixed = spans(
            cache, Span(2, 20, IDS[70:71]), Span(0, 0, IDS[:33]), Span(1, 20, IDS[20:29], "all")
        )
        got = model.forward(mixed, cache)
        assert cache.lengths == (33, 29, 21)
        expected = [
            full(model, IDS[50:71])[-1:],
            full(model, IDS[:33])[-1:],
            full(model, IDS[:29])[20:],
        ]
        self.close(got, np.concatenate(expected))

    def test_packed_segments_do_not_see_each_other(self, model: CausalLM) -> None:
        parts = [Span(0, 0, IDS[:40], "all"), Span(0, 0, IDS[40:190], "all")]
        alone = np.concatenate([full(model, IDS[:40]), full(model, IDS[40:190])])
        self.close(model.forward(Batch.build(parts)), alone)

    def test_a_segment_may_start_anywhere(self, model: CausalLM) -> None:
        """Only the distance of two tokens counts, but for the rounding of turned keys."""
        moved = model.forward(Batch.build([Span(0, 100, IDS[:9], "all")]))
        difference = moved - full(model, IDS[:9])
        assert np.sqrt((difference**2).mean()) < 0.05

    def test_only_wanted_logits_are_made_in_their_order(self, model: CausalLM) -> None:
        assert model.forward(Batch.build([Span(0, 0, IDS[:9], "none")])).shape == (0, 96)
        batch = Batch.build([Span(0, 0, IDS[:9])])
        assert model.forward(batch).shape == (1, 96)
        wanted = np.array([7, 0, 7], dtype=np.int32)
        got = model.forward(replace(batch, wanted=wanted))
        self.close(got, full(model, IDS[:9])[wanted])

    def test_overflow_is_an_error_before_anything_changes(self, model: CausalLM) -> None:
        """Feature rows 148-151."""
        cache = model.new_cache(1, 10)
        model.forward(spans(cache, Span(0, 0, IDS[:8])), cache)
        with pytest.raises(CacheError, match="10 tokens a row is too small for 11 tokens"):
            spans(cache, Span(0, 8, IDS[8:11]))
        assert cache.lengths == (8,)
        again = model.forward(spans(cache, Span(0, 8, IDS[8:10])), cache)
        self.close(again[0], full(model, IDS[:10])[-1])

    def test_a_batch_must_continue_its_rows(self, model: CausalLM) -> None:
        cache = model.new_cache(2, 32)
        with pytest.raises(CacheError, match="row 1 holds 0 tokens, but the batch continues it at"):
            model.forward(spans(cache, Span(1, 3, IDS[:2])), cache)
        other = model.new_cache(3, 32)
        with pytest.raises(CacheError, match="built for 3 rows"):
            model.forward(spans(other, Span(0, 0, IDS[:2])), cache)

    def test_a_batch_of_other_slots_is_refused(self, model: CausalLM) -> None:
        """A Batch may be made by hand; its slots must be those of its rows and positions."""
        cache = model.new_cache(2, 32)
        batch = spans(cache, Span(0, 0, IDS[:4]))
        with pytest.raises(CacheError, match="slots"):
            model.forward(replace(batch, slots=batch.slots + 1), cache)
        with pytest.raises(CacheError, match="too small for 40 tokens"):
            model.forward(replace(batch, lengths=batch.lengths + 36), cache)
        with pytest.raises(CacheError, match="another backend"):
            model.forward(batch, Cache(Layout(2, 32)))
        assert cache.lengths == (0, 0)

    def test_truncate_and_reset_keep_the_storage(self, model: Any) -> None:
        cache = model.new_cache(1, 128)
        model.forward(spans(cache, Span(0, 0, IDS[:100])), cache)
        before = cache.nbytes
        cache.truncate(0, 40)
        assert cache.lengths == (40,)
        logits = model.forward(spans(cache, Span(0, 40, IDS[40:50])), cache)
        self.close(logits[0], full(model, IDS[:50])[-1])
        cache.reset()
        assert cache.lengths == (0,)
        assert cache.nbytes == before
        for row, length in [(1, 0), (0, 1), (0, -1)]:
            with pytest.raises(CacheError, match=f"row {row}"):
                cache.truncate(row, length)

    def test_memory_follows_use_not_capacity(self, model: Any) -> None:
        cache = model.new_cache(2, 256)
        assert cache.nbytes == 0
        model.forward(spans(cache, Span(0, 0, IDS[:3])), cache)
        few = cache.nbytes
        model.forward(spans(cache, Span(0, 3, IDS[3:70])), cache)
        assert cache.nbytes == 2 * few

    def test_a_closed_cache_is_an_error_and_closing_twice_is_not(self, model: CausalLM) -> None:
        """Feature row 161."""
        cache = model.new_cache(1, 16)
        batch = spans(cache, Span(0, 0, IDS[:2]))
        cache.close()
        cache.close()
        for use in (cache.reset, lambda: cache.truncate(0, 0), lambda: model.forward(batch, cache)):
            with pytest.raises(CacheError, match="closed"):
                use()

    @pytest.mark.parametrize("capacity", [0, -1, 257])
    def test_capacity_has_limits(self, model: CausalLM, capacity: int) -> None:
        with pytest.raises(InputError, match=r"not in 1 … 256"):
            model.new_cache(1, capacity)
        with pytest.raises(InputError, match="at least one row"):
            model.new_cache(0)
        with pytest.raises(InputError, match="1000000000000 rows is too large"):
            model.new_cache(10**12)

    def test_ids_and_positions_are_checked(self, model: CausalLM) -> None:
        for wrong in (-1, 96, 2**31 - 1):
            with pytest.raises(InputError, match=f"token id {wrong} is not in a vocabulary of 96"):
                model.forward(Batch.build([Span(0, 0, [1, wrong])]))
        for wrong in (-1, 2):
            batch = replace(Batch.build([Span(0, 0, [1, 2])]), wanted=np.array([0, wrong]))
            with pytest.raises(InputError, match=f"token {wrong} is wanted of a batch of 2"):
                model.forward(batch)
        with pytest.raises(ContextLengthError, match=r"257 tokens .* context length is 256"):
            model.forward(Batch.build([Span(0, 0, [1] * 257)]))
