"""What the entries of every backend keep to: each acceptance line of the feature table.

A test module subclasses ``EntryRules`` and gives a ``model`` fixture, of ``CONFIG`` and
``WEIGHTS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from smollm2 import entries
from smollm2.backends.numpy import backend
from smollm2.cache import PAGE_SIZE, Cache
from smollm2.causal_lm import CausalLM
from smollm2.errors import CacheError, InputError
from smollm2.sampling import Sampler, SamplingParams
from tests.backend_rules import CONFIG, IDS, WEIGHTS

Rows = Sequence[Sequence[int]]
Part = tuple[int, int, Sequence[int]]  # row, position of the first token, ids

PROMPTS = [IDS[:20], IDS[30:37], IDS[50:81]]
TOKENS = np.array(IDS[:120]).reshape(4, 30)

varied = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.function_scoped_fixture],
)


@cache
def reference() -> CausalLM:
    """The NumPy backend with the same weights."""
    return backend.load(CONFIG, WEIGHTS)


def alone(model: CausalLM, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits after each token of a sequence by itself, [T, V]."""
    return entries.forward(model, [list(ids)])[0]


def last(model: CausalLM, prompts: Rows) -> NDArray[np.float32]:
    """Logits after each prompt by itself, [N, V]."""
    return np.stack([alone(model, ids)[-1] for ids in prompts])


def side_by_side(prompts: Rows, length: int, *, left: bool = False) -> tuple[Any, Any]:
    """Prompts in rows of one length, and the mask of what is no padding; padding is garbage."""
    tokens, mask = np.full((len(prompts), length), 77), np.zeros((len(prompts), length), int)
    for row, ids in enumerate(prompts):
        part = slice(length - len(ids), None) if left else slice(len(ids))
        tokens[row, part], mask[row, part] = ids, 1
    return tokens, mask


def packed(parts: Sequence[Part], rows: int, padding: int = 0) -> list[NDArray[Any]]:
    """tokens, rows, positions, segments, last of ``prefill_packed``."""
    columns: list[list[int]] = [[], [], [], []]
    lasts = [-1] * rows
    for segment, (row, start, ids) in enumerate(parts):
        count = len(ids)
        of_part = (ids, [row] * count, range(start, start + count), [segment] * count)
        for column, values in zip(columns, of_part, strict=True):
            column.extend(values)
        lasts[row] = len(columns[0]) - 1
    for column, value in zip(columns, (77, -3, -7, -1), strict=True):
        column.extend([value] * padding)
    return [np.array(values) for values in (*columns, lasts)]


def paged(table: NDArray[Any], parts: Sequence[Part], padding: int = 0) -> list[NDArray[Any]]:
    """tokens, positions, rows, slots, last of ``prefill_paged``."""
    tokens, rows, positions, segments, lasts = packed(parts, len(table), padding)
    pages = table[np.maximum(rows, 0), np.maximum(positions, 0) // PAGE_SIZE]
    slots = np.where(segments < 0, 5, pages * PAGE_SIZE + positions % PAGE_SIZE)
    return [tokens, positions, rows, slots, lasts]


def filled(model: CausalLM, prompts: Rows, capacity: int = 64) -> Cache:
    """A fixed cache that holds a prompt a row."""
    cache = model.new_cache(len(prompts), capacity)
    entries.prefill_packed(
        model, cache, *packed([(row, 0, ids) for row, ids in enumerate(prompts)], len(prompts))
    )
    return cache


class EntryRules:
    """Tests of a ``model``."""

    def close(self, got: Any, expected: Any) -> None:
        """That two ways to the same numbers agree; a backend may be stricter, or less."""
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)

    def same(self, got: Any, expected: Any) -> None:
        """That the same computation gave the same numbers, of what nothing else touched."""
        np.testing.assert_array_equal(got, expected)

    def reference(self) -> CausalLM:
        """Whose greedy and sampled ids these must be."""
        return reference()

    # Without a cache: feature rows 52, 53, 152

    def test_forward_is_each_sequence_by_itself(self, model: CausalLM) -> None:
        logits = entries.forward(model, TOKENS)
        assert (logits.shape, logits.dtype) == ((4, 30, CONFIG.vocab_size), np.float32)
        self.close(logits, np.stack([alone(model, ids) for ids in TOKENS]))
        self.close(entries.next_token(model, TOKENS), logits[:, -1])

    @pytest.mark.parametrize("left", [False, True])
    def test_padding_changes_nothing(self, model: CausalLM, left: bool) -> None:
        tokens, mask = side_by_side(PROMPTS, 35, left=left)
        logits = entries.forward(model, tokens, attention_mask=mask)
        for row, ids in enumerate(PROMPTS):
            self.close(logits[row][mask[row] == 1], alone(model, ids))
            assert not logits[row][mask[row] == 0].any()
        following = entries.next_token(model, tokens, attention_mask=mask)
        self.close(following, last(model, PROMPTS))
        other = np.where(mask == 1, tokens, 3)
        self.same(entries.forward(model, other, attention_mask=mask), logits)

    def test_masks_may_have_holes(self, model: CausalLM) -> None:
        mask = np.ones((1, 30), int)
        mask[0, [0, 7, 8, 29]] = 0
        got = entries.next_token(model, TOKENS[:1], attention_mask=mask)
        self.close(got[0], alone(model, TOKENS[0][mask[0] == 1])[-1])

    def test_position_ids_may_begin_anywhere(self, model: CausalLM) -> None:
        """As transformers makes them of a left-padded batch, and moved as a whole."""
        tokens, mask = side_by_side(PROMPTS, 35, left=True)
        places = np.where(mask == 1, mask.cumsum(1) - 1, 1)
        got = entries.next_token(model, tokens, attention_mask=mask, position_ids=places)
        self.close(got, last(model, PROMPTS))
        places = np.arange(30)
        moved = entries.forward(model, TOKENS, position_ids=places + 60)
        by_row = np.broadcast_to(places + 60, TOKENS.shape)
        self.same(entries.forward(model, TOKENS, position_ids=by_row), moved)
        with pytest.raises(InputError, match="positions of segment 0 must rise by one"):
            entries.forward(model, TOKENS, position_ids=2 * places)

    # One sequence a row: feature rows 54, 55, 56, 152, 156

    def test_prefill_then_decode_equals_forward(self, model: CausalLM) -> None:
        expected = entries.forward(model, TOKENS)
        cache = model.new_cache(4, 64)
        self.close(entries.prefill(model, cache, TOKENS[:, :17]), expected[:, 16])
        self.close(entries.prefill(model, cache, TOKENS[:, 17:28], 17), expected[:, 27])
        for place in (28, 29):
            got = entries.decode(model, cache, TOKENS[:, place : place + 1], place)
            self.close(got, expected[:, place])
        assert cache.lengths == (30,) * 4
        assert entries.cache_length(cache) == 30

    @pytest.mark.parametrize("left", [False, True])
    @pytest.mark.parametrize("whole", [False, True])
    def test_padded_rows_continue_where_they_end(
        self, model: CausalLM, left: bool, whole: bool
    ) -> None:
        """The mask may speak of what is stored as well, as that of transformers does."""
        tokens, mask = side_by_side(PROMPTS, 35, left=left)
        cache = model.new_cache(3, 64)
        got = entries.prefill(model, cache, tokens, attention_mask=mask)
        self.close(got, last(model, PROMPTS))
        assert cache.lengths == tuple(map(len, PROMPTS))
        more, new = [[5, 6], [7, 8], [9, 9]], np.array([[1, 1], [0, 1], [0, 0]])
        pos: Any = 35 if whole else cache.lengths
        masked = np.concatenate([mask, new], axis=1) if whole else new
        got = entries.prefill(model, cache, more, pos, attention_mask=masked)
        self.close(got[:2], last(model, [[*PROMPTS[0], 5, 6], [*PROMPTS[1], 8]]))
        assert not got[2].any()
        assert cache.lengths == (22, 8, 31)
        got = entries.decode(model, cache, [[1], [2], [3]], cache.lengths)
        expected = [[*PROMPTS[0], 5, 6, 1], [*PROMPTS[1], 8, 2], [*PROMPTS[2], 3]]
        self.close(got, last(model, expected))

    def test_a_row_without_a_token_may_hold_anything(self, model: CausalLM) -> None:
        cache = model.new_cache(2, 32)
        entries.prefill(model, cache, TOKENS[:2, :9], attention_mask=[[1] * 9, [0] * 9])
        assert cache.lengths == (9, 0)
        got = entries.decode(model, cache, TOKENS[:2, 9:10], 9, attention_mask=[[1], [0]])
        self.close(got[:1], last(model, TOKENS[:1, :10]))
        assert not got[1].any()

    def test_prefill_needs_what_comes_before_and_decode_something(self, model: CausalLM) -> None:
        cache = model.new_cache(2, 32)
        for rows, pos, message in [(2, 0, "row 0 is empty: prefill"), (2, 3, "row 0 is empty")]:
            with pytest.raises(CacheError, match=message):
                entries.decode(model, cache, [[1]] * rows, pos)
        with pytest.raises(CacheError, match="row 0 holds 0 tokens, but prefill at position 2"):
            entries.prefill(model, cache, TOKENS[:2, :4], 2)
        entries.prefill(model, cache, TOKENS[:2, :4])
        with pytest.raises(CacheError, match=r"row 0 holds 4 tokens.*reset\(\) the cache"):
            entries.prefill(model, cache, TOKENS[:2, :4])
        with pytest.raises(CacheError, match="row 1 holds 4 tokens, but is decoded at position 5"):
            entries.decode(model, cache, [[1], [1]], [4, 5])
        with pytest.raises(InputError, match=r"token has shape \[2, 2\], but decode takes \[Batch"):
            entries.decode(model, cache, [[1, 2], [1, 2]], 4)
        with pytest.raises(InputError, match="where Batch is 2"):
            entries.prefill(model, cache, TOKENS, 4)
        with pytest.raises(CacheError, match="32 tokens a row is too small for 34 tokens"):
            entries.prefill(model, cache, TOKENS[:2], 4)
        assert cache.lengths == (4, 4)
        self.close(entries.decode(model, cache, TOKENS[:2, 4:5], 4), last(model, TOKENS[:2, :5]))

    def test_a_reset_cache_begins_anew(self, model: CausalLM) -> None:
        """Feature row 72; weights are as they were."""
        cache = model.new_cache(4, 32)
        first = entries.prefill(model, cache, TOKENS)
        cache.reset()
        assert cache.lengths == (0,) * 4
        self.same(entries.prefill(model, cache, TOKENS), first)

    # Rows of their own: feature rows 57 to 60

    def test_prefill_slots(self, model: CausalLM) -> None:
        tokens, _ = side_by_side(PROMPTS, 40)
        cache, lengths = model.new_cache(5, 64), [len(ids) for ids in PROMPTS]
        got = entries.prefill_slots(model, cache, tokens, [3, 0, 4], lengths)
        self.close(got, last(model, PROMPTS))
        assert cache.lengths == (7, 0, 0, 20, 31)
        got = entries.decode_rows(model, cache, [[1], [2], [3], [4], [5]], [7, -1, -1, 20, 31])
        expected = [[*PROMPTS[1], 1], [*PROMPTS[0], 4], [*PROMPTS[2], 5]]
        self.close(got[[0, 3, 4]], last(model, expected))
        assert not got[[1, 2]].any()
        for slots, counts, error, message in [
            ([1, 1, 2], lengths, InputError, "name a row twice"),
            ([1, 5, 2], lengths, CacheError, "row 5 is not in a cache of 5 rows"),
            ([1, 3, 2], lengths, CacheError, "row 3 holds 21 tokens"),
            ([1, 2], lengths, InputError, r"slots has shape \[2\].*where M is 3"),
            ([0, 1, 2], [41, 1, 1], InputError, r"lengths\[0\] is 41, but the prompts have 40"),
        ]:
            with pytest.raises(error, match=message):
                entries.prefill_slots(model, cache, tokens, slots, counts)

    def test_a_prompt_of_no_tokens_leaves_its_row_alone(self, model: CausalLM) -> None:
        cache = model.new_cache(2, 64)
        got = entries.prefill_slots(model, cache, TOKENS[:2], [1, 0], [30, 0])
        self.close(got[:1], last(model, TOKENS[:1]))
        assert not got[1].any()
        assert cache.lengths == (0, 30)

    @pytest.mark.parametrize("padding", [0, 9])
    def test_packed_prompts_see_only_themselves(self, model: CausalLM, padding: int) -> None:
        parts = [(2, 0, PROMPTS[0]), (0, 0, PROMPTS[1]), (3, 0, PROMPTS[2])]
        cache = model.new_cache(4, 64)
        got = entries.prefill_packed(model, cache, *packed(parts, 4, padding))
        self.close(got[[2, 0, 3]], last(model, PROMPTS))
        assert not got[1].any()
        assert cache.lengths == (7, 0, 20, 31)

    def test_padding_may_be_a_segment_at_the_last_position(self, model: CausalLM) -> None:
        """Linnet's convention; a prompt that fills its row is none."""
        whole = IDS[:16]
        arrays = packed([(1, 0, whole), (0, 0, IDS[20:25])], 2, padding=3)
        arrays[1][-3:], arrays[2][-3:], arrays[3][-3:] = 0, 15, 2
        cache = model.new_cache(2, 16)
        got = entries.prefill_packed(model, cache, *arrays)
        self.close(got, last(model, [IDS[20:25], whole]))
        assert cache.lengths == (5, 16)

    def test_the_tokens_of_a_pack_may_lie_in_any_order(self, model: CausalLM) -> None:
        *columns, lasts = packed([(1, 0, PROMPTS[0]), (0, 0, PROMPTS[1])], 2, padding=4)
        order = np.random.default_rng(1).permutation(len(columns[0]))
        lasts = np.argsort(order)[lasts]
        cache = model.new_cache(2, 64)
        got = entries.prefill_packed(model, cache, *(values[order] for values in columns), lasts)
        self.close(got, last(model, [PROMPTS[1], PROMPTS[0]]))

    def test_decode_rows_each_at_its_own_position(self, model: CausalLM) -> None:
        cache, texts = filled(model, PROMPTS), [list(ids) for ids in PROMPTS]
        for step in range(3):
            rows = [row for row in range(3) if row != step]
            new = [[40 + step], [50 + step], [60 + step]]
            positions = [len(ids) if row in rows else -1 for row, ids in enumerate(texts)]
            got = entries.decode_rows(model, cache, new, positions)
            for row in rows:
                texts[row] += new[row]
            self.close(got[rows], last(model, [texts[row] for row in rows]))
            assert not got[step].any()
        assert cache.lengths == tuple(map(len, texts))

    def test_step_packed_is_both_in_one_pass(self, model: CausalLM) -> None:
        def start() -> Cache:
            cache = model.new_cache(4, 64)
            entries.prefill_packed(model, cache, *packed([(1, 0, IDS[:9]), (3, 0, IDS[9:14])], 4))
            return cache

        prompts = packed([(0, 0, PROMPTS[0]), (2, 0, PROMPTS[1])], 4, padding=5)
        steps = [[1], [2], [3], [4]], [-1, 9, -1, 5]
        together, apart = start(), start()
        got = entries.step_packed(model, together, *prompts, *steps)
        expected = [
            entries.prefill_packed(model, apart, *prompts),
            entries.decode_rows(model, apart, *steps),
        ]
        self.close(got, np.concatenate(expected))
        assert together.lengths == apart.lengths == (20, 10, 7, 6)

    def test_untouched_rows_stay_untouched(self, model: CausalLM) -> None:
        """What other rows do in between changes no bit of a row's later logits."""
        first, second = filled(model, PROMPTS), filled(model, PROMPTS)
        steps: list[Any] = [[8], [8], [8]]
        entries.decode_rows(model, first, steps, [-1, 7, -1])
        first.truncate(1, 0)
        entries.prefill_slots(model, first, [IDS[90:110]], [1], [20])
        first.truncate(1, 0)
        second.truncate(1, 0)
        for offset in range(2):
            places = [20 + offset, -1, 31 + offset]
            self.same(
                entries.decode_rows(model, first, steps, places),
                entries.decode_rows(model, second, steps, places),
            )

    def test_a_pass_of_padding_alone_does_nothing(self, model: CausalLM) -> None:
        cache = filled(model, PROMPTS)
        before = cache.lengths
        assert not entries.decode_rows(model, cache, [[1]] * 3, [-1] * 3).any()
        assert not entries.prefill_packed(model, cache, *packed([], 3, padding=4)).any()
        assert cache.lengths == before

    def test_prompts_that_do_not_fit_the_rows_are_refused(self, model: CausalLM) -> None:
        cache = filled(model, [IDS[:4], IDS[4:9]])
        cache.truncate(1, 0)
        for parts, error, message in [
            ([(0, 0, IDS[:3])], CacheError, r"row 0 holds 4 tokens, but a prompt .*truncate\(0, 0"),
            ([(1, 2, IDS[:3])], CacheError, "row 1 holds 0 tokens, but the batch continues it at"),
            ([(1, 0, IDS[:3]), (1, 3, IDS[:3])], InputError, "two segments have the same row"),
        ]:
            with pytest.raises(error, match=message):
                entries.prefill_packed(model, cache, *packed(parts, 2))
        tokens, rows, positions, segments, lasts = packed([(1, 0, IDS[:3])], 2)
        with pytest.raises(InputError, match="segment 0 lies in rows 1 and 0"):
            entries.prefill_packed(model, cache, tokens, [1, 1, 0], positions, segments, lasts)
        with pytest.raises(InputError, match="last has 3, but there are 3 tokens"):
            entries.prefill_packed(model, cache, tokens, rows, positions, segments, [-1, 3])
        assert cache.lengths == (4, 0)

    # Over pages: feature rows 61 to 64

    @varied
    @given(data=st.data())
    def test_any_pages_and_chunks_equal_contiguous(self, model: CausalLM, data: Any) -> None:
        """Rows of 150, 64 and 7 tokens over pages in any order, cut anywhere."""
        prompts = [IDS[:150], IDS[50:114], IDS[100:107]]
        pages = data.draw(st.permutations(range(1, 8)))
        table = np.array([pages[:3], [*pages[3:5], 0], [pages[5], 0, 0]])
        cache = model.new_paged_cache(8)
        done, logits = [0, 0, 0], np.zeros((3, CONFIG.vocab_size), np.float32)
        while any(count < len(ids) for count, ids in zip(done, prompts, strict=True)):
            parts = []
            for row, ids in enumerate(prompts):
                left = len(ids) - done[row]
                count = data.draw(st.sampled_from([left, min(left, 64), left // 3]), label="count")
                if count > 0 or (row == 0 and left > 0):
                    parts.append((row, done[row], ids[done[row] : done[row] + max(count, 1)]))
            got = self._paged_pass(model, cache, table, parts)
            for row, start, ids in parts:
                done[row], logits[row] = start + len(ids), got[row]
        self.close(logits, last(model, prompts))

    def _paged_pass(
        self, model: CausalLM, cache: Cache, table: Any, parts: Sequence[Part]
    ) -> NDArray[np.float32]:
        if not parts:
            return np.zeros((len(table), CONFIG.vocab_size), np.float32)
        return entries.prefill_paged(model, cache, *paged(table, parts, padding=2), table)

    def test_decode_paged_equals_decode_rows(self, model: CausalLM) -> None:
        """Across the end of a page; one row is idle by its position, one by its pages."""
        prompts = [IDS[:63], IDS[10:20], IDS[20:30], IDS[30:36]]
        rows = filled(model, prompts, capacity=128)
        table = np.array([[5, 2], [4, 0], [3, 0], [1, 0]])
        pool = model.new_paged_cache(6)
        entries.prefill_paged(
            model, pool, *paged(table, [(r, 0, ids) for r, ids in enumerate(prompts)]), table
        )
        table[2] = 0
        for step in range(3):
            new = [[step + 1], [step + 2], [step + 3], [step + 4]]
            got = entries.decode_paged(model, pool, new, [63 + step, -1, 10, 6 + step], table)
            expected = entries.decode_rows(model, rows, new, [63 + step, -1, -1, 6 + step])
            self.close(got, expected)
            assert not got[1:3].any()

    def test_step_paged_is_both_in_one_pass(self, model: CausalLM) -> None:
        table = np.array([[3, 1], [2, 0], [4, 0]])

        def start() -> Cache:
            pool = model.new_paged_cache(5)
            entries.prefill_paged(
                model, pool, *paged(table, [(0, 0, IDS[:70]), (1, 0, IDS[:5])]), table
            )
            return pool

        chunks = paged(table, [(1, 5, IDS[5:30]), (2, 0, IDS[40:50])], padding=3)
        steps = [[9], [9], [9]], [70, -1, -1]
        together, apart = start(), start()
        got = entries.step_paged(model, together, *chunks, *steps, table)
        expected = [
            entries.prefill_paged(model, apart, *chunks, table),
            entries.decode_paged(model, apart, *steps, table),
        ]
        self.close(got, np.concatenate(expected))
        alone_too = last(model, [IDS[:30], IDS[40:50], [*IDS[:70], 9]])
        self.close(got[[1, 2, 3]], alone_too)

    def test_other_rows_of_a_pool_stay_untouched(self, model: CausalLM) -> None:
        table = np.array([[3, 1], [2, 4]])
        pools = [model.new_paged_cache(5) for _ in range(2)]
        for pool in pools:
            entries.prefill_paged(model, pool, *paged(table, [(0, 0, IDS[:70])]), table)
        busy = pools[0]
        entries.prefill_paged(model, busy, *paged(table, [(1, 0, IDS[:100])], padding=9), table)
        entries.decode_paged(model, busy, [[1], [2]], [-1, 100], table)
        steps = [entries.decode_paged(model, pool, [[5], [5]], [70, -1], table) for pool in pools]
        self.same(steps[0], steps[1])

    def test_what_pages_do_not_hold_is_refused(self, model: CausalLM) -> None:
        table = np.array([[3, 1], [2, 0]])
        pool = model.new_paged_cache(4)
        entries.prefill_paged(model, pool, *paged(table, [(0, 0, IDS[:60])]), table)
        tokens, positions, rows, slots, lasts = paged(table, [(0, 60, IDS[60:66])])
        with pytest.raises(InputError, match=r"token 0 has slot 253, but .* 252: table\[row"):
            entries.prefill_paged(model, pool, tokens, positions, rows, slots + 1, lasts, table)
        with pytest.raises(CacheError, match="row 1 is empty: prefill"):
            entries.decode_paged(model, pool, [[1], [1]], [60, 0], table)
        with pytest.raises(CacheError, match=r"row 0 is at position 128, but .* room for 128"):
            entries.decode_paged(model, pool, [[1], [1]], [128, -1], table)
        with pytest.raises(CacheError, match="page 3 of row 0 holds 60 tokens, but"):
            entries.decode_paged(model, pool, [[1], [1]], [62, -1], table)
        with pytest.raises(CacheError, match=r"decode_rows needs a fixed cache.*new_cache\(\)"):
            entries.decode_rows(model, pool, [[1]], [3])
        fixed = model.new_cache(2, 64)
        with pytest.raises(CacheError, match="decode_paged needs a paged cache, not a fixed one"):
            entries.decode_paged(model, fixed, [[1], [1]], [1, 1], table)
        entries.prefill_paged(model, pool, tokens, positions, rows, slots, lasts, table)

    # Loops: feature rows 65 to 67

    def test_generate_is_a_loop_of_decode(self, model: CausalLM) -> None:
        cache, steps = filled(model, PROMPTS), 6
        ids: Any = [[1], [2], [3]]
        expected = []
        for step in range(steps):
            logits = entries.decode_rows(model, cache, ids, [n + step for n in (20, 7, 31)])
            ids = logits.argmax(-1)[:, None]
            expected.append(ids)
        again = filled(model, PROMPTS)
        got = entries.generate(model, again, [[1], [2], [3]], [20, 7, 31], steps)
        assert (got.shape, got.dtype) == ((3, steps), np.int32)
        np.testing.assert_array_equal(got, np.concatenate(expected, axis=1))
        assert again.lengths == cache.lengths == (26, 13, 37)

    def test_ids_are_those_of_the_reference(self, model: CausalLM) -> None:
        """The same greedy ids and, with one key, the same draws, on every backend."""
        mine, theirs = [
            (
                entries.generate(lm, self._prefilled(lm), TOKENS[:, 20:21], 20, 10),
                entries.sample(lm, self._prefilled(lm), TOKENS[:, 20:21], 20, 42, 0.8, 10),
            )
            for lm in (model, self.reference())
        ]
        for got, expected in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(got, expected)
        assert (mine[0] != mine[1]).any()

    def _prefilled(self, model: CausalLM) -> Cache:
        cache = model.new_cache(4, 64)
        entries.prefill(model, cache, TOKENS[:, :20])
        return cache

    def test_a_row_draws_what_it_draws_alone(self, model: CausalLM) -> None:
        """Row b with ``key + b``; another key gives others, temperature 0 is greedy."""
        rows = range(4)
        together = entries.sample(model, self._prefilled(model), TOKENS[:, 20:21], 20, 7, 1.5, 8)
        for row in rows:
            cache = model.new_cache(1, 64)
            entries.prefill(model, cache, TOKENS[row : row + 1, :20])
            token = TOKENS[row : row + 1, 20:21]
            got = entries.sample(model, cache, token, 20, 7 + row, 1.5, 8)
            np.testing.assert_array_equal(got[0], together[row])
        logits = entries.decode(model, self._prefilled(model), TOKENS[:, 20:21], 20)
        for row in rows:
            sampler = Sampler(SamplingParams(seed=7 + row, temperature=1.5))
            first = sampler.choose(logits[row], prompt_ids=[], output_ids=[], position=21)
            assert together[row, 0] == first
        call = (model, self._prefilled(model), TOKENS[:, 20:21], 20)
        greedy = entries.generate(*call, 8)
        call = (model, self._prefilled(model), TOKENS[:, 20:21], 20)
        np.testing.assert_array_equal(entries.sample(*call, 7, 0.0, 8), greedy)
        call = (model, self._prefilled(model), TOKENS[:, 20:21], 20)
        assert (entries.sample(*call, 8, 1.5, 8) != together).any()
        for key, temperature, message in [(-1, 1.0, "seed"), (0, -0.5, "temperature")]:
            with pytest.raises(InputError, match=message):
                entries.sample(*call, key, temperature, 8)

    def test_generate_until_stops_each_row_at_its_own_end(self, model: CausalLM) -> None:
        start = TOKENS[:, 20:21]
        whole = entries.generate(model, self._prefilled(model), start, 20, 12)
        eos = {int(whole[0, 2]), int(whole[1, 7])}
        cache = self._prefilled(model)
        ids, counts = entries.generate_until(model, cache, start, 20, eos, 12)
        for row in range(4):
            ends = np.flatnonzero(np.isin(whole[row], [*eos]))
            count = int(ends[0]) + 1 if len(ends) else 12
            assert counts[row] == count
            np.testing.assert_array_equal(ids[row, :count], whole[row, :count])
            assert not ids[row, count:].any()
        assert counts[0] <= 3
        assert ids.shape == (4, counts.max())
        assert cache.lengths == tuple(20 + counts)
        one = entries.generate_until(model, self._prefilled(model), start, 20, int(whole[3, 0]), 12)
        assert one[1][3] == 1

    def test_loops_are_refused_before_anything_is_computed(self, model: CausalLM) -> None:
        cache = model.new_cache(2, 32)
        with pytest.raises(CacheError, match="row 0 is empty"):
            entries.generate(model, cache, [[1], [1]], 20, 4)
        entries.prefill(model, cache, TOKENS[:2, :20])
        with pytest.raises(CacheError, match="32 tokens a row is too small for 33 tokens"):
            entries.generate(model, cache, [[1], [1]], 20, 13)
        with pytest.raises(InputError, match="generate cannot take -1 steps"):
            entries.generate(model, cache, [[1], [1]], 20, -1)
        assert entries.generate(model, cache, [[1], [1]], 20, 0).shape == (2, 0)
        assert cache.lengths == (20, 20)

    # Training: feature rows 68 to 71

    def _sequences(self, padding: int = 3) -> tuple[list[NDArray[Any]], NDArray[Any]]:
        """Three packed sequences with padding, and the next token of each as target."""
        parts = [(row, 0, ids) for row, ids in enumerate(PROMPTS)]
        tokens, _, positions, segments, _ = packed(parts, 3, padding)
        following = [[*ids[1:], -100] for ids in PROMPTS]
        targets = np.concatenate([*following, [-100] * padding]).astype(int)
        return [tokens, positions, segments], targets

    def _expected_log_probs(self, model: CausalLM) -> NDArray[np.float64]:
        """From logits of the unpacked sequences, in float64; 0 after their last tokens."""
        pieces = []
        for ids in PROMPTS:
            logits = alone(model, ids)[:-1].astype(np.float64)
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            pieces += [logits[np.arange(len(ids) - 1), ids[1:]], [0.0]]
        return np.concatenate([*pieces, [0.0] * 3])

    def test_log_probs_packed(self, model: CausalLM) -> None:
        arrays, targets = self._sequences()
        got = entries.log_probs_packed(model, *arrays, targets)
        assert (got.shape, got.dtype) == (targets.shape, np.float32)
        self.close(got, self._expected_log_probs(model))
        assert not got[targets == -100].any()
        order = np.random.default_rng(2).permutation(len(targets))
        moved = entries.log_probs_packed(model, *(part[order] for part in arrays), targets[order])
        self.close(moved, got[order])

    def test_loss_packed_is_the_weighed_sum(self, model: CausalLM) -> None:
        arrays, targets = self._sequences()
        weights = np.random.default_rng(3).uniform(0, 2, len(targets))
        weights[::5] = 0
        ignored = np.where(weights == 0, 10**6, targets)  # such a target may be anything
        got = entries.loss_packed(model, *arrays, ignored, weights)
        self.close(got, -(weights * self._expected_log_probs(model)).sum())
        assert entries.loss_packed(model, *arrays, targets, np.zeros(len(targets))) == 0

    def test_hidden_packed(self, model: CausalLM) -> None:
        arrays, _ = self._sequences()
        got = entries.hidden_packed(model, *arrays)
        assert (got.shape, got.dtype) == ((len(arrays[0]), CONFIG.hidden_size), np.float32)
        start = 0
        for ids in PROMPTS:
            solo = entries.hidden_packed(model, ids, range(len(ids)), [0] * len(ids))
            self.close(got[start : start + len(ids)], solo)
            start += len(ids)
        assert not got[start:].any()

    def test_targets_are_checked(self, model: CausalLM) -> None:
        for wrong in (-1, CONFIG.vocab_size):
            with pytest.raises(InputError, match=f"target {wrong} is not in a vocabulary of 96"):
                entries.log_probs_packed(model, [1, 2], [0, 1], [0, 0], [1, wrong])
        with pytest.raises(InputError, match=r"targets has shape \[3\].*where P is 2"):
            entries.log_probs_packed(model, [1, 2], [0, 1], [0, 0], [1, 2, 3])
        with pytest.raises(InputError, match=r"weights has shape \[1\], but must have \[2\]"):
            entries.loss_packed(model, [1, 2], [0, 1], [0, 0], [1, 2], [1.0])

    # Disposal: feature row 161

    def test_a_closed_cache_is_refused(self, model: CausalLM) -> None:
        cache = filled(model, PROMPTS)
        cache.close()
        with pytest.raises(CacheError, match="closed"):
            entries.decode_rows(model, cache, [[1]] * 3, [20, 7, 31])
        with pytest.raises(CacheError, match="closed"):  # and not: reset() it
            entries.prefill(model, cache, [[1]] * 3)
        with pytest.raises(CacheError, match="closed"):
            entries.generate(model, cache, [[1]] * 3, 99, steps=1)
