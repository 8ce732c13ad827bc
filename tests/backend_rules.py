"""What every backend keeps to: one forward for all batches, and the rules of its cache.

A test module subclasses ``BackendRules`` and gives a ``model`` fixture, of ``CONFIG`` and
``WEIGHTS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from smollm2.backends import BACKENDS, BackendOptions, get_backend
from smollm2.batch import Batch, Span
from smollm2.cache import PAGE_SIZE, Cache, Layout
from smollm2.causal_lm import NO_TARGET, CausalLM, log_probs_of
from smollm2.errors import CacheError, ContextLengthError, InputError
from smollm2.sampling import Choice, Sampler, SamplingParams
from tests.tiny import random_weights, tiny_config

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG, seed=3)
IDS = [int(i) for i in np.random.default_rng(7).integers(0, CONFIG.vocab_size, 200)]

FRAGILE = tiny_config(tie_word_embeddings=False)
BROKEN = 0  # which is also what some backends pad with
SOUND = [i for i in IDS if i != BROKEN]


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


def over(cache: Cache, table: Any, *parts: Span) -> Batch:
    """A batch for a cache, over pages of its own choice if that is paged."""
    return over_pages(table, *parts) if cache.layout.paged else spans(cache, *parts)


def over_pages(table: Sequence[Sequence[int]], *parts: Span) -> Batch:
    """A batch over pages of its own choice."""
    pages = np.array(table, dtype=np.int32)
    return Batch.build(parts, page_table=pages, page_size=PAGE_SIZE)


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

    @pytest.mark.parametrize(
        ("numbers", "message"),
        [
            (
                {"positions": [0, 2, 0]},
                "row 1 has length 2 and 2 tokens .* 2: they must fill 0 … 1",
            ),
            ({"positions": [0, 0, 0]}, "two tokens of the batch have the same slot"),
            (
                {"positions": [0, 2, 0], "lengths": [0, 3, 1]},
                "row 1 has length 3 and 2 tokens .* 0",
            ),
            ({"lengths": [0, 1, 1]}, "row 1 has length 1 and 2 tokens .* they must fill -1 … 0"),
            ({"lengths": [3, 2, 1]}, "row 0 has length 3, but no tokens in the batch"),
            ({"lengths": [0, 2, 0]}, "row 2 has length 0 and 1 tokens"),
            ({"lengths": [2, 1]}, "2 lengths, but 3 rows of pages"),
            ({"rows": [1, 1, 3]}, "row 3 is not in a batch of 3 rows"),
            ({"rows": [1, 1, -1]}, "row -1 is not in a batch of 3 rows"),
        ],
    )
    @pytest.mark.parametrize("paged", [False, True])
    def test_a_batch_fills_its_rows(
        self, model: CausalLM, numbers: dict[str, list[int]], message: str, paged: bool
    ) -> None:
        """Made by hand: a place that is read has been written, now or before."""
        cache = model.new_paged_cache(4) if paged else model.new_cache(3, 32)
        table = np.array([[1], [2], [3]], np.int32) if paged else cache.page_table
        parts = [Span(1, 0, IDS[:2]), Span(2, 0, IDS[2:3])]
        batch = Batch.build(parts, page_table=table, page_size=cache.page_size)
        wrong = replace(batch, **{name: np.array(n, np.int32) for name, n in numbers.items()})
        if "positions" in numbers:
            places = table[wrong.rows, 0] * cache.page_size + wrong.positions
            wrong = replace(wrong, slots=places.astype(np.int32))
        with pytest.raises(CacheError, match=message):
            model.forward(wrong, cache)
        self.close(model.forward(batch, cache)[1], full(model, IDS[2:3])[0])

    @pytest.mark.parametrize("options", [{"logit_bias": {96: 1.0}}, {"allowed_ids": (96,)}])
    def test_a_choice_that_failed_can_be_repeated(
        self, model: CausalLM, options: dict[str, Any]
    ) -> None:
        """It stored nothing, and did not keep what it wrote over in pages that are used again."""
        good, bad = (Choice(Sampler(SamplingParams(**each)), 10) for each in ({}, options))
        cache = model.new_cache(2, 32)
        batch = spans(cache, Span(1, 0, IDS[:9]))
        with pytest.raises(InputError, match="96"):
            model.choose(batch, [bad], cache)
        for few in ([], [good, good]):
            with pytest.raises(InputError, match="1 wanted tokens need as many choices"):
                model.choose(batch, few, cache)
        assert cache.lengths == (0, 0)
        expected = int(full(model, IDS[:9])[-1].argmax())
        assert model.choose(batch, [good], cache) == [expected]
        assert cache.lengths == (0, 9)
        with pytest.raises(InputError, match="96"):
            model.choose(Batch.build([Span(0, 0, IDS[:9])]), [bad])

        cache, table = model.new_paged_cache(3), [[2, 1]]
        model.forward(over_pages(table, Span(0, 0, IDS[:100])), cache)
        with pytest.raises(InputError, match="96"):
            model.choose(over_pages(table, Span(0, 80, IDS[:2])), [bad], cache)
        with pytest.raises(CacheError, match="page 1 of row 0 holds 16 tokens"):
            model.forward(over_pages(table, Span(0, 100, IDS[:1])), cache)
        expected = int(full(model, IDS[:82])[-1].argmax())
        assert model.choose(over_pages(table, Span(0, 80, IDS[80:82])), [good], cache) == [expected]

    def test_a_forward_that_failed_forgot_what_it_wrote_over(
        self, model: CausalLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In pages that are used again; it can be repeated."""
        cache, table = model.new_paged_cache(3), [[2, 1]]
        model.forward(over_pages(table, Span(0, 0, IDS[:100])), cache)
        again = over_pages(table, Span(0, 80, IDS[80:82]))
        with monkeypatch.context() as patch:
            patch.setattr(cache, "advance", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model.forward(again, cache)
        with pytest.raises(CacheError, match="page 1 of row 0 holds 16 tokens"):
            model.forward(over_pages(table, Span(0, 100, IDS[:1])), cache)
        self.close(model.forward(again, cache)[0], full(model, IDS[:82])[-1])

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

    def test_models_and_caches_say_what_they_are(self, model: CausalLM) -> None:
        size = model.config.parameter_count / 1e6
        assert repr(model).endswith(f"Model({size:.1f}M parameters, context length 256)")
        cache = model.new_cache(2, 16)
        model.forward(spans(cache, Span(0, 0, IDS[:2])), cache)
        assert repr(cache).endswith("Cache(lengths (2, 0), capacity 16)")
        assert repr(model.new_paged_cache(3)).endswith("Cache(3 pages)")
        cache.close()
        assert repr(cache).endswith("Cache(closed)")

    @pytest.mark.parametrize("capacity", [0, -1, 257])
    def test_capacity_has_limits(self, model: Any, capacity: int) -> None:
        with pytest.raises(InputError, match=r"not in 1 … 256"):
            model.new_cache(1, capacity)
        with pytest.raises(InputError, match="at least one row"):
            model.new_cache(0)
        with pytest.raises(InputError, match="1000000000000 rows is too large"):
            model.new_cache(10**12)
        with pytest.raises(InputError, match="8388608 rows of 256 tokens is too large"):
            model.new_cache(2**23, 256)
        for wrong in (2.0, "2", True, np.ones(2, int)):
            with pytest.raises(InputError, match=r"^rows is .*: give a whole number$"):
                model.new_cache(wrong)
            with pytest.raises(InputError, match=r"^capacity is .*: give a whole number$"):
                model.new_cache(1, wrong)
            with pytest.raises(InputError, match=r"^pages is .*: give a whole number$"):
                model.new_paged_cache(wrong)

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

    # Paged caches: feature rows 61 to 64, 78

    @settings(
        max_examples=6,
        deadline=None,
        suppress_health_check=[
            HealthCheck.differing_executors,
            HealthCheck.function_scoped_fixture,
        ],
    )
    @given(data=st.data())
    def test_any_pages_and_any_chunks_equal_the_full_forward(
        self, model: CausalLM, data: Any
    ) -> None:
        """Two rows over pages in any order, cut anywhere, in one batch or by turns."""
        texts = [IDS[:130], IDS[60:135]]
        pages = data.draw(st.permutations(range(1, 7)))
        table = [pages[:3], [*pages[3:5], 0]]
        cache = model.new_paged_cache(7)
        done, pieces = [0, 0], [[], []]
        while done != [130, 75]:
            parts = []
            for row, ids in enumerate(texts):
                count = data.draw(st.sampled_from([0, 1, 40, 64, 130])) if row == 0 else 30
                part = ids[done[row] : done[row] + count]
                if part:
                    parts.append(Span(row, done[row], part, "all"))
            if not parts:
                parts = [Span(0, done[0], texts[0][done[0] : done[0] + 1], "all")]
            logits = model.forward(over_pages(table, *parts), cache)
            for part in parts:
                pieces[part.row].append(logits[: len(part.ids)])
                logits = logits[len(part.ids) :]
                done[part.row] += len(part.ids)
        for ids, of_row in zip(texts, pieces, strict=True):
            self.close(np.concatenate(of_row), full(model, ids))

    def test_pages_of_a_prefix_may_be_shared(self, model: CausalLM) -> None:
        """Rows that begin alike read one page, and none sees what another adds."""
        cache, prefix = model.new_paged_cache(6), IDS[:64]
        table = [[4, 1], [4, 5], [4, 2]]
        model.forward(over_pages(table, Span(0, 0, [*prefix, *IDS[64:70]])), cache)
        tails = [IDS[100:109], IDS[120:121]]
        parts = [Span(row, 64, tail, "all") for row, tail in enumerate(tails, start=1)]
        got = model.forward(over_pages(table, *parts), cache)
        expected = [full(model, [*prefix, *tail])[64:] for tail in tails]
        self.close(got, np.concatenate(expected))
        again = model.forward(over_pages(table, Span(0, 70, IDS[70:72], "all")), cache)
        self.close(again, full(model, IDS[:72])[70:])

    def test_what_pages_do_not_hold_is_refused_before_anything_changes(
        self, model: CausalLM
    ) -> None:
        cache = model.new_paged_cache(4)
        assert (cache.rows, cache.lengths, cache.capacity) == (0, (), 3 * PAGE_SIZE)
        model.forward(over_pages([[3, 1]], Span(0, 0, IDS[:70])), cache)
        for table, parts, message in [
            ([[3, 1]], [Span(0, 72, [1])], "page 1 of row 0 holds 6 tokens, but the batch reads 8"),
            ([[3, 2]], [Span(0, 65, [1])], "page 2 of row 0 holds 0 tokens, but the batch reads 1"),
            (
                [[1, 2]],
                [Span(0, 64, [1])],
                "page 1 of row 0 holds 6 tokens, but the batch reads 64",
            ),
            ([[0, 1]], [Span(0, 0, [1])], "row 0 has page 0 as its number 0, but pages are 1 … 3"),
            ([[3, 0]], [Span(0, 64, [1])], "row 0 has page 0 as its number 1"),
            ([[3, 4]], [Span(0, 64, [1])], "row 0 has page 4 as its number 1"),
            ([[3, -1]], [Span(0, 64, [1])], "row 0 has page -1 as its number 1"),
            ([[2], [2]], [Span(0, 0, [1]), Span(1, 0, [2])], "two tokens .* the same slot"),
        ]:
            with pytest.raises(CacheError, match=message):
                model.forward(over_pages(table, *parts), cache)
        with pytest.raises(CacheError, match="for pages of 32 tokens, but those of the cache have"):
            model.forward(spans(model.new_cache(4, 32), Span(0, 0, IDS[:2])), cache)
        got = model.forward(over_pages([[3, 1]], Span(0, 70, IDS[70:71])), cache)
        self.close(got[0], full(model, IDS[:71])[-1])

    def test_what_a_batch_reads_it_does_not_write_over(self, model: CausalLM) -> None:
        """One page twice in a row, or begun anew by one row while another still reads it."""
        cache = model.new_paged_cache(5)
        model.forward(over_pages([[3, 1]], Span(0, 0, IDS[:70])), cache)
        for table, parts, message in [
            ([[3, 3]], [Span(0, 64, [1])], "row 0 reads 64 tokens of page 3, but .* place 0 of it"),
            ([[3, 3, 2]], [Span(0, 66, [1])], "row 0 reads 64 tokens of page 3, but .* place 2"),
            ([[3], [3, 2]], [Span(0, 0, [5]), Span(1, 64, [1])], "row 1 reads 64 tokens of page 3"),
            ([[3, 2], [3]], [Span(0, 64, [1]), Span(1, 9, [5])], "page 3, but .* over place 9"),
        ]:
            width = max(map(len, table))
            padded = [pages + [0] * (width - len(pages)) for pages in table]
            with pytest.raises(CacheError, match=message):
                model.forward(over_pages(padded, *parts), cache)
        got = model.forward(over_pages([[3, 1]], Span(0, 70, IDS[70:71])), cache)
        self.close(got[0], full(model, IDS[:71])[-1])

    def test_a_page_may_be_used_again_from_its_start(self, model: CausalLM) -> None:
        """What it held before is gone, also where fewer tokens are written."""
        cache = model.new_paged_cache(3)
        model.forward(over_pages([[2, 1]], Span(0, 0, IDS[:100])), cache)
        got = model.forward(over_pages([[1]], Span(0, 0, IDS[50:60])), cache)
        self.close(got[0], full(model, IDS[50:60])[-1])
        with pytest.raises(CacheError, match="page 1 of row 0 holds 10 tokens"):
            model.forward(over_pages([[2, 1]], Span(0, 100, IDS[100:101])), cache)
        got = model.forward(over_pages([[1]], Span(0, 10, IDS[60:62])), cache)
        self.close(got[0], full(model, IDS[50:62])[-1])
        cache.reset()
        with pytest.raises(CacheError, match="page 1 of row 0 holds 0 tokens"):
            model.forward(over_pages([[1]], Span(0, 12, [1])), cache)
        with pytest.raises(CacheError, match="row 0 is not in a cache of 0 rows"):
            cache.truncate(0, 0)

    def test_pages_that_are_not_used_take_no_part(self, model: CausalLM) -> None:
        """Other rows' pages, written with anything, change no bit."""
        results = []
        for others in (False, True):
            cache = model.new_paged_cache(6)
            table = [[4, 2], [3, 5]]
            if others:
                model.forward(over_pages(table, Span(1, 0, IDS[90:190])), cache)
            model.forward(over_pages(table, Span(0, 0, IDS[:80])), cache)
            if others:
                model.forward(over_pages(table, Span(1, 100, IDS[:3])), cache)
            results.append(model.forward(over_pages(table, Span(0, 80, IDS[80:82])), cache))
        np.testing.assert_array_equal(results[0], results[1])

    @pytest.mark.parametrize("pages", [-1, 0, 1, 2**24 + 1])
    def test_a_pool_has_limits(self, model: CausalLM, pages: int) -> None:
        with pytest.raises(InputError, match=rf"2 … 16777216 pages, .* not {pages}"):
            model.new_paged_cache(pages)

    # NaN stays where it is

    @pytest.fixture
    def fragile(self, model: CausalLM) -> CausalLM:
        """A model of this backend in which a token, ``BROKEN``, has keys and values of NaN."""
        weights = random_weights(FRAGILE, seed=3)
        weights.token_embedding[BROKEN] = np.nan
        (name,) = (n for n, path in BACKENDS.items() if type(model).__module__.startswith(path))
        options: BackendOptions = {"quant": "f32"} if name == "native" else {}
        return get_backend(name).load(FRAGILE, weights, **options)

    def test_what_was_stored_before_is_gone(self, fragile: CausalLM) -> None:
        """Rows of three lengths step side by side, over storage that was full of NaN."""
        lengths = (30, 5, 17)
        fixed, paged = fragile.new_cache(3, 64), fragile.new_paged_cache(4)
        for cache, table in ((fixed, fixed.page_table), (paged, [[1], [2], [3]])):
            kept = [Span(row, 0, SOUND[:4]) for row in range(3)]
            spoiled = [Span(row, 4, [BROKEN] * 50, "all") for row in range(3)]
            fragile.forward(over(cache, table, *kept), cache)
            assert np.isnan(fragile.forward(over(cache, table, *spoiled), cache)).all()
            if cache is fixed:
                for row in range(3):
                    cache.truncate(row, 4)
            parts = [Span(row, 4, SOUND[4:n]) for row, n in enumerate(lengths)]
            fragile.forward(over(cache, table, *parts), cache)
            step = [Span(row, n, SOUND[n : n + 1]) for row, n in enumerate(lengths)]
            got = fragile.forward(over(cache, table, *step), cache)
            expected = [full(fragile, SOUND[: n + 1])[-1] for n in lengths]
            self.close(got, np.stack(expected))

    def test_what_other_rows_hold_is_not_seen(self, fragile: CausalLM) -> None:
        """Not where it fills up what is too short, either."""
        cache = fragile.new_cache(4, 64)
        rows = {1: 9, 3: 20}
        parts = [Span(row, 0, SOUND[:n]) for row, n in rows.items()]
        fragile.forward(spans(cache, Span(0, 0, [BROKEN] * 3), *parts), cache)
        expected = np.stack([full(fragile, SOUND[: n + 1])[-1] for n in rows.values()])
        step = [Span(row, n, SOUND[n : n + 1]) for row, n in rows.items()]
        got = fragile.forward(spans(cache, Span(0, 3, [BROKEN]), *step), cache)
        assert np.isnan(got[0]).all()
        self.close(got[1:], expected)
        for row, n in rows.items():
            cache.truncate(row, n)
        self.close(fragile.forward(spans(cache, *step), cache), expected)

    def test_what_other_segments_hold_is_not_seen(self, fragile: CausalLM) -> None:
        """Packed without a cache, between and after one of NaN, and beside what pads them."""
        ids = [[BROKEN] * 3, SOUND[:9], [BROKEN], SOUND[5:25]]
        got = fragile.forward(Batch.build([Span(0, 0, each, "all") for each in ids]))
        assert np.isnan(got[:3]).all()
        assert np.isnan(got[12]).all()
        sound = np.concatenate([full(fragile, each) for each in (SOUND[:9], SOUND[5:25])])
        self.close(np.concatenate([got[3:12], got[13:]]), sound)
        assert np.isfinite(sound).all()

    # Log-probabilities of targets: feature rows 69, 71

    def test_log_probs_are_those_of_the_logits(self, model: CausalLM) -> None:
        """Of several segments, one of them longer than what is held at a time."""
        batch = Batch.build([Span(0, 0, IDS[:150]), Span(0, 7, IDS[:20])])
        targets = np.array([*IDS[1:151], *IDS[1:21]], dtype=np.int32)
        targets[::7] = NO_TARGET
        got = model.log_probs(batch, targets)
        every = replace(batch, wanted=np.arange(170, dtype=np.int32))
        learned = targets != NO_TARGET
        expected = log_probs_of(model.forward(every)[learned], targets[learned])
        self.close(got[learned], expected)
        assert got.dtype == np.float32
        assert not got[~learned].any()
        with pytest.raises(InputError, match="170 tokens need as many targets"):
            model.log_probs(batch, targets[1:])

    def test_hidden_states_are_what_the_head_gets(self, model: CausalLM) -> None:
        """The tied head of ``WEIGHTS``, in NumPy, makes the logits of them."""
        cache = model.new_cache(1, 64)
        batch = spans(cache, Span(0, 0, IDS[:9], "all"))
        got = model.hidden(batch, cache)
        assert (got.shape, got.dtype) == ((9, CONFIG.hidden_size), np.float32)
        assert cache.lengths == (9,)
        difference = got @ WEIGHTS.token_embedding.T - full(model, IDS[:9])
        assert np.sqrt((difference**2).mean()) < 0.05


class TableRules(BackendRules):
    """Those of backends that call the operations of the table one by one."""

    def test_a_failed_forward_can_be_repeated(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Feature row 151: it fails between two layers, and nothing counts as stored."""

        def broken(*_: object) -> None:
            raise RuntimeError("out of luck")

        cache = model.new_cache(1, 32)
        model.forward(spans(cache, Span(0, 0, IDS[:8])), cache)
        batch = spans(cache, Span(0, 8, IDS[8:20]))
        with monkeypatch.context() as patch:
            patch.setattr(model.ops, "swiglu", broken)
            with pytest.raises(RuntimeError, match="out of luck"):
                model.forward(batch, cache)
        assert cache.lengths == (8,)
        self.close(model.forward(batch, cache)[0], full(model, IDS[:20])[-1])
