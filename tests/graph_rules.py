"""What every export of entries keeps to: the results of the entries on the NumPy backend.

A test module subclasses ``GraphRules`` and gives a ``graphs`` fixture: of an entry's name, a
function of its inputs and its cache by name (``cache_keys.0``, ``cache_values.0`` and so on, of
each layer) to its results by name. It is made of the tiny model of ``CONFIG`` and ``WEIGHTS``, with
the sizes of ``entry_inputs.SIZES``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from smollm2 import entries
from smollm2.backends import get_backend
from smollm2.cache import Cache
from smollm2.causal_lm import NO_TARGET, CausalLM
from smollm2.entries import ENTRIES
from tests.entry_inputs import PAGE, SIZES, Arrays, page_table, random_inputs
from tests.tiny import random_weights, tiny_config

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)
WITHOUT_CACHE = [name for name, entry in ENTRIES.items() if entry.cache is None]
ROOM = SIZES["MaxSeq"]
CACHES = [
    f"cache_{part}.{n}" for n in range(CONFIG.num_hidden_layers) for part in ("keys", "values")
]

Graphs = Callable[[str], Callable[[Arrays], Arrays]]


class Both:
    """The same calls to graphs and to the NumPy backend, each with a cache of its own."""

    def __init__(self, graphs: Graphs, lm: CausalLM, cache: Cache | None) -> None:
        self.graphs, self.lm, self.cache = graphs, lm, cache
        slots = 0 if cache is None else cache.layout.slots + (not cache.layout.paged)
        shape = (slots, CONFIG.num_key_value_heads, CONFIG.head_dim)
        names = CACHES if cache is not None else []
        self.stored = {name: np.zeros(shape, np.float32) for name in names}

    @property
    def lengths(self) -> list[int]:
        """Tokens stored of each row."""
        assert self.cache is not None
        return list(self.cache.lengths)

    def graph(self, name: str, inputs: Arrays) -> Arrays:
        """The results of the graph, with what is stored now."""
        return self.graphs(name)({**inputs, **self.stored})

    def __call__(self, name: str, inputs: Arrays) -> NDArray[Any]:
        """The result of both, which must be the same, bar the order of sums."""
        found = self.graph(name, inputs)
        self.stored = {key: found[f"new_{key}"] for key in self.stored}
        result = found[ENTRIES[name].output]
        expected = self.reference(name, inputs)
        if ENTRIES[name].output == "ids":
            np.testing.assert_array_equal(result, expected)
        else:
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5)
        return result

    def reference(self, name: str, inputs: Arrays) -> NDArray[Any]:
        """What the entry gives; of loops, as many columns as the graph has."""
        call: Any = getattr(entries, name)
        of_cache = () if self.cache is None else (self.cache,)
        given = [value.item() if value.ndim == 0 else value for value in inputs.values()]
        if ENTRIES[name].output != "ids":
            return np.asarray(call(self.lm, *of_cache, *given))
        ids: NDArray[Any] = call(self.lm, *of_cache, *given, SIZES["Steps"])
        return ids


class GraphRules:
    """Tests of ``graphs``."""

    @pytest.fixture
    def lm(self) -> CausalLM:
        return get_backend("numpy").load(CONFIG, WEIGHTS)

    @pytest.fixture
    def fixed(self, graphs: Graphs, lm: CausalLM) -> Both:
        return Both(graphs, lm, lm.new_cache(SIZES["Batch"], ROOM))

    @pytest.fixture
    def paged(self, graphs: Graphs, lm: CausalLM) -> Both:
        return Both(graphs, lm, lm.new_paged_cache(SIZES["Pool"]))

    @pytest.fixture
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(0)

    @pytest.mark.parametrize("name", WITHOUT_CACHE)
    def test_entries_without_a_cache(self, name: str, graphs: Graphs, lm: CausalLM) -> None:
        both = Both(graphs, lm, None)
        for seed in range(4):
            inputs = random_inputs(name, np.random.default_rng(seed))
            if "targets" in inputs:
                inputs["targets"][::3] = NO_TARGET
            if "weights" in inputs:
                inputs["weights"][1::3] = 0
                inputs["targets"][1::3] = 10**6  # of weight 0: may be anything
            both(name, inputs)

    def test_prompts_in_two_parts_then_steps(self, fixed: Both, rng: np.random.Generator) -> None:
        for stored in (0, SIZES["S"]):
            fixed("prefill", random_inputs("prefill", rng, [stored] * 3))
        length = 2 * SIZES["S"]
        fixed("decode", random_inputs("decode", rng, [length] * 3))
        fixed("decode_rows", random_inputs("decode_rows", rng, [length + 1, 0, length + 1]))
        for part in fixed.stored.values():
            assert not part[ROOM + length + 1 : 2 * ROOM].any(), "an idle row was written"
            assert part[3 * ROOM].any(), "padding goes to scratch"

    def test_rows_of_their_own(self, fixed: Both, rng: np.random.Generator) -> None:
        inputs = random_inputs("prefill_slots", rng, [0, 7, 0])
        inputs["lengths"] = np.array([4, 0], np.int32)
        fixed("prefill_slots", inputs)
        before = {key: part.copy() for key, part in fixed.stored.items()}
        stored = fixed.lengths
        assert sorted(stored) == [0, 0, 4]
        fixed("prefill_packed", random_inputs("prefill_packed", rng, stored))
        row = slice(stored.index(4) * ROOM, (stored.index(4) + 1) * ROOM)
        for key, part in fixed.stored.items():
            np.testing.assert_array_equal(part[row], before[key][row])
        fixed("decode_rows", random_inputs("decode_rows", rng, fixed.lengths))

    def test_prompts_and_steps_in_one_pass(self, fixed: Both, rng: np.random.Generator) -> None:
        fixed("prefill_packed", random_inputs("prefill_packed", rng, [0, -1, 0]))
        for _ in range(2):
            fixed("step_packed", random_inputs("step_packed", rng, fixed.lengths))

    def test_pages_in_any_order(self, paged: Both, rng: np.random.Generator) -> None:
        table = page_table(rng)
        stored = [0, 0, 0]
        for _ in range(3):
            inputs = random_inputs("prefill_paged", rng, stored, table=table)
            paged("prefill_paged", inputs)
            for row, last in enumerate(inputs["last"].tolist()):
                stored[row] = int(inputs["positions"][last]) + 1 if last >= 0 else stored[row]
        assert min(stored) > 0
        paged("decode_paged", random_inputs("decode_paged", rng, [*stored[:2], 0], table=table))

    def test_steps_across_a_border_of_pages(self, paged: Both, rng: np.random.Generator) -> None:
        table = page_table(rng)
        for start in range(0, 60, 12):
            inputs = random_inputs("prefill_paged", rng, [0, 0, 0], table=table)
            inputs["rows"][:], inputs["positions"] = 1, np.arange(start, start + 12, dtype=np.int32)
            inputs["slots"] = table[1, 0] * 64 + inputs["positions"]
            inputs["last"] = np.array([-1, 11, -1], np.int32)
            paged("prefill_paged", inputs)
        paged("step_paged", random_inputs("step_paged", rng, [0, 60, 0], table=table))
        for position in range(61, 66):
            inputs = random_inputs("decode_paged", rng, [0, position, 0], table=table)
            paged("decode_paged", inputs)

    @pytest.mark.parametrize("name", ["prefill_packed", "step_packed", "hidden_packed"])
    def test_padding_changes_nothing(self, name: str, graphs: Graphs, fixed: Both) -> None:
        inputs = random_inputs(name, np.random.default_rng(0), [0, 3, 0])
        call = fixed.graph if ENTRIES[name].cache is not None else lambda n, i: graphs(n)(i)
        padding = inputs["segments"] < 0
        assert padding.any()
        first = call(name, inputs)
        for key in {"tokens", "positions", "rows"} & inputs.keys():
            inputs[key][padding] = 2
        for key, value in call(name, inputs).items():
            slots = slice(None, -1) if key.startswith("new_cache") else slice(None)  # bar scratch
            np.testing.assert_array_equal(value[slots], first[key][slots])

    def test_what_nothing_was_stored_in_may_be_any_number(
        self, fixed: Both, paged: Both, rng: np.random.Generator
    ) -> None:
        """Its weight is 0, so that only NaN and infinity would be seen: the notes say so."""
        for both, first, then in (
            (fixed, "prefill", "decode"),
            (paged, "prefill_paged", "decode_paged"),
        ):
            both.stored = {key: part + 9 for key, part in both.stored.items()}
            table = page_table(rng) if both is paged else None
            made = random_inputs(first, rng, [0] * 3, table=table)
            both(first, made)
            stored = [5] * 3
            if table is not None:
                counts = np.bincount(made["rows"][made["slots"] >= PAGE], minlength=3)
                stored = counts.tolist()
            both(then, random_inputs(then, rng, stored, table=table))

    def test_greedy_steps(self, fixed: Both, rng: np.random.Generator) -> None:
        fixed("prefill", random_inputs("prefill", rng, [0] * 3))
        ids = fixed("generate", random_inputs("generate", rng, [5] * 3))
        assert ids.dtype == np.int32

    @pytest.mark.parametrize(
        ("key", "temperature"), [(0, 1.0), (12345, 0.7), (2**31 - 2, 3), (7, 0)]
    )
    def test_sampled_steps(
        self, key: int, temperature: float, fixed: Both, rng: np.random.Generator
    ) -> None:
        fixed("prefill", random_inputs("prefill", rng, [0] * 3))
        inputs = random_inputs("sample", rng, [5] * 3)
        inputs["key"] = np.array(key, np.int32)
        inputs["temperature"] = np.array(temperature, np.float32)
        fixed("sample", inputs)

    def test_steps_until_a_row_has_ended(self, fixed: Both, rng: np.random.Generator) -> None:
        fixed("prefill", random_inputs("prefill", rng, [0] * 3))
        inputs = random_inputs("generate_until", rng, [5] * 3)
        inputs["eos"] = np.array(-1, np.int32)
        free = fixed.graph("generate_until", inputs)
        assert free["counts"].tolist() == [3, 3, 3]
        inputs["eos"] = np.array(free["ids"][1, 1])
        found = fixed.graph("generate_until", inputs)
        assert fixed.cache is not None
        eos = int(inputs["eos"])
        ids, counts = entries.generate_until(fixed.lm, fixed.cache, inputs["token"], 5, eos, 3)
        assert found["counts"].tolist() == counts.tolist()
        np.testing.assert_array_equal(found["ids"][:, : ids.shape[1]], ids)
        ended = ROOM + 5 + int(counts[1])
        assert not found["new_cache_keys.0"][ended : 2 * ROOM].any(), "an ended row was fed"
