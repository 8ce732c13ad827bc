"""The JAX backend: the shared rules, dtypes against NumPy, compilations, memory in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

jax = pytest.importorskip("jax")

import smollm2  # noqa: E402
from smollm2.backends import numpy as reference  # noqa: E402
from smollm2.backends.jax import backend, model as compiled  # noqa: E402
from smollm2.backends.jax.inputs import (  # noqa: E402
    fit,
    fit_tokens,
    inputs_of,
    joined,
    parted,
    room_of,
)
from smollm2.backends.jax.layers import is_stacked, unstacked  # noqa: E402
from smollm2.backends.jax.model import JaxModel  # noqa: E402
from smollm2.backends.jax.storage import lengthened  # noqa: E402
from smollm2.batch import Batch, Span  # noqa: E402
from smollm2.errors import CacheError, InputError, NumericsError  # noqa: E402
from smollm2.model import forward  # noqa: E402
from smollm2.quantize import Quantized, as_float32  # noqa: E402
from smollm2.sampling import Choice, Sampler, SamplingParams  # noqa: E402
from tests.backend_rules import CONFIG, IDS, WEIGHTS, BackendRules, full, over_pages, spans  # noqa: E402
from tests.conftest import DATA  # noqa: E402
from tests.entry_rules import EntryRules  # noqa: E402
from tests.tiny import random_weights, tiny_config  # noqa: E402

OWN_HEAD_SIZE = tiny_config(head_dim=24, num_attention_heads=6, num_key_value_heads=3)
LOST = "the KV cache was lost with it and is empty now: start its rows again"
UNTIED = tiny_config(tie_word_embeddings=False, num_key_value_heads=4)


@pytest.fixture(scope="session")
def model() -> JaxModel:
    return backend.load(CONFIG, WEIGHTS, device="cpu")


@pytest.fixture
def compilations() -> Callable[[], int]:
    """Says how many forms of the forward have been compiled since the test began."""
    compiled.run.clear_cache()
    return compiled.run._cache_size


class TestRules(BackendRules):
    """What every backend keeps to."""


class TestEntries(EntryRules):
    """What every backend's entries keep to."""


# Against NumPy


def test_layers_one_by_one_give_the_same(model: JaxModel) -> None:
    """``compile="xla"``: with a cache, fixed and paged, and without."""
    unrolled = backend.load(CONFIG, WEIGHTS, compile="xla")
    cache, pages = unrolled.new_cache(1, 64), unrolled.new_paged_cache(3)
    for part in (Span(0, 0, IDS[:40], "all"), Span(0, 40, IDS[40:41])):
        for batch, stored in ((spans(cache, part), cache), (over_pages([[2]], part), pages)):
            got = unrolled.forward(batch, stored)
            expected = full(model, IDS[: part.start + len(part.ids)])[part.start :]
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        full(unrolled, IDS[:50]), full(model, IDS[:50]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (OWN_HEAD_SIZE, "float32"),
        (UNTIED, "float32"),
        (OWN_HEAD_SIZE, "bfloat16"),
        (UNTIED, "float16"),
    ],
    ids=["own-float32", "untied-float32", "own-bfloat16", "untied-float16"],
)
def test_every_dtype_is_near_float32(config: Any, dtype: str) -> None:
    """Prefill, decode and no cache, beside NumPy in float32 with the same rounded weights."""
    weights = random_weights(config, seed=5, dtype=jax.numpy.dtype(dtype))
    lm = backend.load(config, weights)
    assert lm.dtype == dtype
    assert lm.traffic.token == lm.dtype.itemsize * 2 * config.num_hidden_layers * (
        config.num_key_value_heads * config.head_dim
    )
    expected = full(reference.backend.load(config, weights), IDS[:70])
    cache = lm.new_cache(2, 100)
    first = lm.forward(spans(cache, Span(1, 0, IDS[:69], "all")), cache)
    second = lm.forward(spans(cache, Span(1, 69, IDS[69:70])), cache)
    limit = {"float32": 2e-5, "bfloat16": 0.1, "float16": 0.02}[dtype]
    for got in (np.concatenate([first, second]), full(lm, IDS[:70])):
        assert got.dtype == np.float32
        assert np.sqrt(((got - expected) ** 2).mean()) < limit * np.sqrt((expected**2).mean())


def test_long_prompts_attend_in_chunks(model: JaxModel) -> None:
    """More queries than one chunk has, in a cache and in segments of several lengths."""
    config = tiny_config(max_position_embeddings=2048)
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 96, 1200)]
    ours, theirs = (each.load(config, WEIGHTS) for each in (backend, reference.backend))
    cache, other = ours.new_cache(2), theirs.new_cache(2)
    for part in (Span(1, 0, ids[:700], "all"), Span(1, 700, ids[700:], "all")):
        got = ours.forward(spans(cache, part), cache)
        np.testing.assert_allclose(
            got, theirs.forward(spans(other, part), other), rtol=1e-4, atol=2e-5
        )
    for lengths in ([300, 20, 1, 600], [90] * 10):
        batch = Batch.build([Span(0, 0, ids[:length], "all") for length in lengths])
        np.testing.assert_allclose(ours.forward(batch), theirs.forward(batch), rtol=1e-4, atol=2e-5)


def test_segments_in_parts_see_all_of_theirs(model: JaxModel) -> None:
    """A batch made by hand, whose segments take turns, gives what it gives in order."""
    order = np.random.default_rng(0).permutation(60)
    batch = Batch.build([Span(0, 0, IDS[:40], "all"), Span(0, 0, IDS[40:60], "all")])
    mixed = replace(
        batch,
        **{
            name: getattr(batch, name)[order]
            for name in ("ids", "positions", "rows", "slots", "segments")
        },
    )
    assert inputs_of(mixed, num_pages=None).reach == 64
    np.testing.assert_allclose(
        model.forward(mixed), model.forward(batch)[order], rtol=1e-4, atol=1e-5
    )


def test_quantized_weights_are_float32_and_others_their_own() -> None:
    def quantized(name: str, weight: NDArray[Any]) -> Any:
        if weight.ndim == 1:
            return weight
        groups = np.zeros((weight.size // 32, 34), np.uint8)
        groups[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        groups[:, 2:] = np.random.default_rng(len(name)).integers(0, 256, (len(groups), 32))
        return Quantized("Q8_0", weight.shape, groups.reshape(weight.shape[0], -1))

    weights = WEIGHTS.map(quantized)
    lm = backend.load(CONFIG, weights)
    assert lm.dtype == "float32"
    dense = reference.backend.load(CONFIG, weights.map(lambda _, weight: as_float32(weight)))
    np.testing.assert_allclose(full(lm, IDS[:30]), full(dense, IDS[:30]), rtol=1e-4, atol=1e-4)
    assert backend.load(CONFIG, weights, dtype="bfloat16").dtype == "bfloat16"


def test_stacked_layers_are_those_layers(model: JaxModel) -> None:
    assert is_stacked(model.weights.blocks)
    named = dict(unstacked(model.weights).items())
    assert list(named) == list(CONFIG.shapes)
    for name, array in WEIGHTS.items():
        np.testing.assert_array_equal(named[name], array)
    unrolled = backend.load(CONFIG, WEIGHTS, compile="xla").weights
    assert unstacked(unrolled) is unrolled
    assert not is_stacked(unrolled.blocks)


# Sampling


def test_choices_are_those_of_numpy(model: JaxModel) -> None:
    """cases: N14; of several rows, drawn, greedy and penalized, and the cache goes on."""
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 4},
        {"temperature": 1.1, "top_k": 20, "top_p": 0.8, "seed": 5},
        {"repetition_penalty": 1.5},
    ]
    samplers = [Sampler(SamplingParams(**each), (2,)) for each in options]
    outputs = []
    for lm in (model, reference.backend.load(CONFIG, WEIGHTS)):
        cache = lm.new_cache(4, 64)
        feed = [IDS[10 * row : 10 * row + 7 + row] for row in range(4)]
        texts: list[list[int]] = [[] for _ in feed]
        for _ in range(12):
            parts = [Span(row, cache.lengths[row], ids) for row, ids in enumerate(feed)]
            choices = [
                Choice(sampler, part.start + len(part.ids), [1], text)
                for sampler, part, text in zip(samplers, parts, texts, strict=True)
            ]
            ids = lm.choose(spans(cache, *parts), choices, cache)
            feed = [[i] for i in ids]
            for text, i in zip(texts, ids, strict=True):
                text.append(i)
        outputs.append(texts)
    assert outputs[0] == outputs[1]
    with pytest.raises(InputError, match="4 wanted tokens need as many choices"):
        model.choose(spans(cache, *parts), choices[:1])


def test_logits_that_are_no_numbers_are_named() -> None:
    """cases: N1"""
    broken = WEIGHTS.map(lambda name, w: w * np.nan if name == "model.norm.weight" else w)
    lm = backend.load(CONFIG, broken)
    choice = Choice(Sampler(SamplingParams()), 3)
    with pytest.raises(NumericsError, match="logits at position 3 hold NaN"):
        lm.choose(Batch.build([Span(0, 0, IDS[:3])]), [choice])


# What is compiled


def test_a_decode_is_compiled_once_for_each_doubling(
    model: JaxModel, compilations: Callable[[], int]
) -> None:
    """200 positions: rooms of 64, 128 and 256 tokens; positions are numbers that go in."""
    cache = model.new_cache(1, 200)
    for position, token in enumerate(IDS):
        model.forward(spans(cache, Span(0, position, [token])), cache)
    assert cache.storage[0].room == 256
    assert compilations() == 3


def test_capacities_are_no_forms(model: JaxModel, compilations: Callable[[], int]) -> None:
    """20 requests with caches as long as they are: what is compiled for one does for the others."""
    lengthened.clear_cache()
    logits = {}
    for capacity in (*range(65, 125, 6), *range(135, 195, 6)):
        cache = model.new_cache(1, capacity)
        last = capacity - 1
        for start, stop in ((0, 60), (60, last), (last, capacity)):
            got = model.forward(spans(cache, Span(0, start, IDS[start:stop])), cache)
        logits[capacity] = got[0]
    # The first 60 tokens; up to 4, 16, 32, 64, 96 and 128 more; a step in rooms of 128 and 256.
    assert compilations() == 1 + 6 + 2
    assert lengthened._cache_size() == 2
    for capacity in (65, 119, 189):
        expected = full(model, IDS[:capacity])[-1]
        np.testing.assert_allclose(logits[capacity], expected, rtol=1e-4, atol=1e-5)


def test_a_row_of_a_fixed_cache_is_one_page(model: JaxModel) -> None:
    """Also where its padded length is more than its capacity, and with rows that are left out."""
    cache = model.new_cache(3, 150)
    batch = spans(cache, Span(0, 0, IDS[:140]), Span(2, 0, IDS[:9]))
    (rows,) = inputs_of(batch, num_pages=3).rows
    assert (rows.table.shape, rows.span) == ((2, 1), 256)
    batch = spans(model.new_cache(1, 150), Span(0, 0, IDS[:140]))
    (rows,) = inputs_of(batch, num_pages=1).rows
    assert (rows.table, rows.span) == (None, 256)


def test_prompts_of_any_length_are_compiled_a_few_times(
    model: JaxModel, compilations: Callable[[], int]
) -> None:
    for length in range(1, 101):
        model.forward(Batch.build([Span(0, 0, IDS[:length])]))
    assert {fit_tokens(length) for length in range(1, 101)} == {1, 2, 4, 8, 16, 32, 64, 96, 128}
    assert compilations() == 9


def test_pages_are_numbers_that_go_in(model: JaxModel, compilations: Callable[[], int]) -> None:
    cache = model.new_paged_cache(9)
    for pages in ([1, 2], [5, 3], [8, 7]):
        model.forward(over_pages([pages], Span(0, 0, IDS[:70])), cache)
        for position in range(70, 75):
            model.forward(over_pages([pages], Span(0, position, IDS[:1])), cache)
    assert compilations() == 2


def test_equal_models_share_what_is_compiled(
    model: JaxModel, compilations: Callable[[], int]
) -> None:
    other = backend.load(CONFIG, random_weights(CONFIG, seed=9), device="cpu")
    assert not np.allclose(full(model, IDS[:9]), full(other, IDS[:9]))
    assert compilations() == 1


@pytest.mark.parametrize("compiler", [None, "xla"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("count", [1, 5])
def test_a_step_updates_the_cache_in_place(compiler: str | None, paged: bool, count: int) -> None:
    """The memory stays, and the compiled step holds no copy of the storage."""
    lm = backend.load(CONFIG, WEIGHTS, compile=compiler)
    cache = lm.new_paged_cache(40) if paged else lm.new_cache(1, 256)

    def batch(start: int, ids: list[int]) -> Batch:
        span = Span(0, start, ids)
        return over_pages([range(1, 5)], span) if paged else spans(cache, span)

    lm.forward(batch(0, IDS[:200]), cache)
    arrays = [array for stored in cache.storage for array in stored]
    places = [array.unsafe_buffer_pointer() for array in arrays]
    for step in range(3):
        lm.forward(batch(200 + count * step, IDS[:count]), cache)
    assert all(array.is_deleted() for array in arrays)
    assert [a.unsafe_buffer_pointer() for stored in cache.storage for a in stored] == places
    ints, form = joined(inputs_of(batch(215, IDS[:count]), num_pages=cache.layout.pages))
    lowered = compiled.run.lower(
        lm.weights, ints, cache.storage, ops=lm.ops, form=form, output="logits"
    )
    program = lowered.compile().as_text()
    for stored in cache.storage:
        for array in stored:
            shape = f"f32[{','.join(map(str, array.shape))}]"
            copies = [
                line for line in program.splitlines() if f"= {shape}" in line and " copy(" in line
            ]
            assert not copies


def test_a_forward_that_fails_before_it_computes_can_be_repeated(
    model: JaxModel, monkeypatch: pytest.MonkeyPatch, compilations: Callable[[], int]
) -> None:
    """Feature row 151; what fails is the text, while it is traced."""
    cache = model.new_cache(1, 32)
    model.forward(spans(cache, Span(0, 0, IDS[:8])), cache)
    batch = spans(cache, Span(0, 8, IDS[8:20]))
    with monkeypatch.context() as patch:
        patch.setitem(compiled._TEXTS, "logits", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as failure:
            model.forward(batch, cache)
    assert LOST not in getattr(failure.value, "__notes__", [])
    assert cache.lengths == (8,)
    got = model.forward(batch, cache)
    np.testing.assert_allclose(got[0], full(model, IDS[:20])[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("paged", [False, True])
def test_a_forward_that_fails_while_it_computes_empties_the_cache(
    model: JaxModel,
    monkeypatch: pytest.MonkeyPatch,
    compilations: Callable[[], int],
    paged: bool,
) -> None:
    """Feature row 151, as far as it goes where the cache was given away; then all is as new."""

    def fail(_: Any) -> Any:
        raise MemoryError("no more")

    def failing(weights: Any, ops: Any, plan: Any) -> Any:
        logits = forward(weights, ops, plan)
        return jax.pure_callback(fail, jax.typeof(logits), logits)

    cache = model.new_paged_cache(3) if paged else model.new_cache(1, 32)

    def batch(start: int, stop: int) -> Batch:
        span = Span(0, start, IDS[start:stop])
        return over_pages([[2]], span) if paged else spans(cache, span)

    model.forward(batch(0, 8), cache)
    given = cache.storage[0]
    with monkeypatch.context() as patch:
        patch.setitem(compiled._TEXTS, "logits", failing)
        with pytest.raises(Exception, match="no more") as failure:
            model.forward(batch(8, 20), cache)
    compiled.run.clear_cache()  # the text that fails was compiled under the name of the other
    assert given.keys.is_deleted()
    assert LOST in failure.value.__notes__
    assert (cache.nbytes, cache.lengths) == (0, () if paged else (0,))
    with pytest.raises(CacheError, match="holds 0 tokens, but the batch"):
        model.forward(batch(8, 20), cache)
    got = model.forward(batch(0, 20), cache)
    np.testing.assert_allclose(got[0], full(model, IDS[:20])[-1], rtol=1e-4, atol=1e-5)


def test_an_interrupt_before_the_cache_is_back_empties_it(
    model: JaxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = model.new_cache(2, 32)
    model.forward(spans(cache, Span(1, 0, IDS[:8])), cache)
    original = compiled.run

    def interrupted(*args: Any, **options: Any) -> Any:
        original(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.forward(spans(cache, Span(1, 8, IDS[8:9])), cache)
    assert cache.lengths == (0, 0)
    got = model.forward(spans(cache, Span(1, 0, IDS[:9])), cache)
    np.testing.assert_allclose(got[0], full(model, IDS[:9])[-1], rtol=1e-4, atol=1e-5)


def test_a_forward_that_is_interrupted_forgets_what_it_wrote_over(
    model: JaxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a page that is used again: it holds what comes before, and the forward can be repeated."""

    class Unread:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    def interrupted(*args: Any, **options: Any) -> Any:
        return Unread(), original(*args, **options)[1]

    original = compiled.run
    cache, table = model.new_paged_cache(3), [[2, 1]]
    model.forward(over_pages(table, Span(0, 0, IDS[:100])), cache)
    again = over_pages(table, Span(0, 80, IDS[80:82]))
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.forward(again, cache)
    with pytest.raises(CacheError, match="page 1 of row 0 holds 16 tokens"):
        model.forward(over_pages(table, Span(0, 100, IDS[:1])), cache)
    got = model.forward(again, cache)
    np.testing.assert_allclose(got[0], full(model, IDS[:82])[-1], rtol=1e-4, atol=1e-5)


def test_threads_share_a_model_and_have_caches_of_their_own(
    model: JaxModel, compilations: Callable[[], int]
) -> None:
    """cases: K11; the first calls too, which compile side by side."""

    def ids_of(number: int) -> list[int]:
        cache = model.new_paged_cache(4) if number % 2 else model.new_cache(1, 100)
        chosen, feed, start = [], IDS[number : number + 55 + number], 0
        for _ in range(12):
            span = Span(0, start, feed)
            batch = over_pages([[3, 1]], span) if number % 2 else spans(cache, span)
            start += len(feed)
            sampler = Sampler(SamplingParams(temperature=0.9, seed=number))
            feed = model.choose(batch, [Choice(sampler, start)], cache)
            chosen += feed
        return chosen

    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ids_of, range(12)))
    assert together == [ids_of(number) for number in range(12)]
    assert len({tuple(ids) for ids in together}) == 12


def test_attention_without_a_cache_has_a_derivative(model: JaxModel) -> None:
    """Of stacked and of single layers, in several chunks: the same, and that of differences."""
    config = tiny_config(max_position_embeddings=1024)
    ids = [int(i) for i in np.random.default_rng(2).integers(0, 96, 300)]
    inputs = inputs_of(Batch.build([Span(0, 0, ids, "all")]), num_pages=None)
    ops = type(model.ops)(config)

    def loss(weights: Any) -> Any:
        logits = forward(weights, ops, ops.plan(inputs))
        return jax.nn.log_softmax(logits)[:, 7].mean()

    stacked = backend.load(config, WEIGHTS).weights
    gradient = jax.jit(jax.grad(loss))(stacked)
    single = jax.jit(jax.grad(loss))(unstacked(stacked))
    for (name, ours), theirs in zip(
        unstacked(gradient).items(), dict(single.items()).values(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6, err_msg=name)
    value, step = jax.jit(loss), 1e-3
    up, down = (
        jax.tree.map(lambda w, g, step=step: w + step * g, stacked, gradient)
        for step in (step, -step)
    )
    squares = sum(float((g**2).sum()) for g in jax.tree.leaves(gradient))
    assert (value(up) - value(down)) / (2 * step) == pytest.approx(squares, rel=0.02)


# Batches as arrays


def test_rungs() -> None:
    assert [fit(n) for n in (0, 1, 2, 3, 5, 64, 65)] == [1, 1, 2, 4, 8, 64, 128]
    assert [fit_tokens(n) for n in (1, 3, 33, 48, 64, 65, 96, 97, 200, 400)] == [
        *(1, 4, 64, 64, 64, 96, 96, 128, 256, 512)
    ]
    assert sorted({room_of(n) for n in range(1, 2049)}) == [
        *(64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    ]
    assert all(n <= room_of(n) for n in range(1, 2049))


def test_what_is_joined_comes_apart_again(model: JaxModel) -> None:
    cache = model.new_cache(3, 64)
    inputs = inputs_of(spans(cache, Span(0, 0, IDS[:5]), Span(2, 0, IDS[:1])), num_pages=3)
    array, form = joined(inputs)
    assert array.dtype == np.int32
    again = parted(jax.numpy.asarray(array), form)
    assert jax.tree.structure(again) == jax.tree.structure(inputs)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert hash(form) == hash(joined(inputs)[1])


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant": "q8"}, "jax backend has no option quant, which is of native: leave it out"),
        ({"threads": 2}, "no option threads"),
        ({"kv": "int8"}, "no option kv"),
        ({"mmap": True}, "no option mmap"),
        ({"compile": "inductor"}, "compile='inductor' is not of jax: give 'xla' or None"),
        ({"numerics": "wild"}, "numerics='wild' is not known: give 'exact' or 'fast'"),
        ({"dtype": "int8"}, "dtype='int8' is not of jax: choose from float32, bfloat16, float16"),
        ({"device": "cuda"}, "device='cuda' is not of jax: give cpu, gpu, tpu"),
        ({"device": "cpu:x"}, "device='cpu:x' is not of jax"),
        ({"device": "cpu:99"}, r"device='cpu:99': JAX finds \d+ of cpu: cpu:0 is the first"),
        ({"device": "tpu"}, "device='tpu': JAX finds no tpu here: use 'cpu'"),
    ],
)
def test_options_that_it_does_not_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        backend.load(CONFIG, WEIGHTS, **options)


def test_numerics_and_devices(model: JaxModel) -> None:
    options: Any = dict.fromkeys(("device", "dtype", "compile", "numerics", "tensor_parallel"))
    assert backend.load(CONFIG, WEIGHTS, **options).ops == model.ops  # None is the default
    fast = backend.load(CONFIG, WEIGHTS, device="cpu:0", numerics="fast")
    np.testing.assert_allclose(full(fast, IDS[:9]), full(model, IDS[:9]), rtol=1e-2, atol=1e-2)
    assert fast.weights.final_norm.devices() == {jax.devices("cpu")[0]}


def test_a_closed_model_says_so() -> None:
    lm = backend.load(CONFIG, WEIGHTS)
    lm.close()
    lm.close()
    for use in (lm.forward, lm.hidden):
        with pytest.raises(InputError, match="closed"):
            use(Batch.build([Span(0, 0, [1])]))


# The real weights


@pytest.mark.weights
@pytest.mark.slow
def test_greedy_ids_of_the_golden_file(real_gguf: Path) -> None:
    """The continuations that transformers gave in float32, up to a near-tie."""
    cases = json.loads((DATA / "model.json").read_text())["cases"]
    model = smollm2.load(real_gguf, backend="jax")
    for case in cases:
        margins = case["greedy_margins"]
        certain = next((i for i, margin in enumerate(margins) if margin < 0.02), len(margins))
        g = model.generate(case["prompt_ids"], max_tokens=len(margins))
        assert list(g.token_ids[:certain]) == case["greedy_ids"][:certain], case["name"]
