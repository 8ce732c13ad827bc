"""Entries: the rules of every backend on those that are always here, and what is theirs alone."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from smollm2 import entries
from smollm2.backends import native, numpy
from smollm2.backends.native import NativeModel, _parts
from smollm2.causal_lm import CausalLM
from smollm2.entries import ENTRIES, builders
from smollm2.errors import InputError
from smollm2.evaluate import evaluate
from smollm2.generate import SmolLM2
from smollm2.sampling import log_softmax
from smollm2.template import SMOLLM2_TEMPLATE, ChatTemplate
from tests.backend_rules import CONFIG, IDS, WEIGHTS
from tests.entry_rules import PROMPTS, TOKENS, EntryRules, packed, paged, side_by_side
from tests.fakes import byte_tokenizer
from tests.plain_model import PlainModel, fakes
from tests.tiny import random_weights, tiny_config

NAMES = [*ENTRIES]


class TestNumpy(EntryRules):
    """Float32."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> CausalLM:
        return numpy.backend.load(CONFIG, WEIGHTS)


class TestNative(EntryRules):
    """Float32 on two threads, bit for bit."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> CausalLM:
        return native.backend.load(CONFIG, WEIGHTS, quant="f32", threads=2)

    def close(self, got: Any, expected: Any) -> None:
        if np.asarray(expected).dtype == np.float32:
            np.testing.assert_array_equal(got, expected)
        else:
            super().close(got, expected)


class TestPlain(EntryRules):
    """A model that is none of the package's: feature row 155."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> CausalLM:
        return PlainModel(CONFIG)

    def reference(self) -> CausalLM:
        return PlainModel(CONFIG)


@pytest.mark.parametrize("name", ["plain", "scripted"])
def test_any_causal_lm_generates_chats_and_scores(name: str, tmp_path: Any) -> None:
    """Feature row 155: the whole package on a model that only keeps to the interface."""
    lm = fakes(tiny_config(vocab_size=260))[name]
    template = ChatTemplate(SMOLLM2_TEMPLATE)
    model = SmolLM2(lm, tokenizer=byte_tokenizer(tmp_path), template=template)
    g = model.generate("Hi", max_tokens=5, ignore_eos=True)
    ids = list(g.prompt_ids)
    for token in g.token_ids:
        assert token == int(entries.next_token(lm, [ids])[0].argmax())
        ids.append(token)
    chat = model.chat()
    replies = [chat.send(text, max_tokens=3) for text in ("a", "b")]
    assert [len(reply.token_ids) for reply in replies] == [3, 3]
    assert replies[1].stats.cached_tokens > 0
    score = model.score("Hello")
    text = [*score.token_ids]
    logprobs = entries.log_probs_packed(
        lm, text, range(len(text)), [0] * len(text), [*text[1:], -100]
    )
    np.testing.assert_allclose(score.logprobs[1:], logprobs[:-1], rtol=1e-5)
    quality = evaluate(lm, [text])
    assert np.isclose(np.log(quality.perplexity), -logprobs[:-1].mean())


def test_forward_equals_transformers() -> None:
    """Feature rows 52, 68, 152: logits of a padded batch, and the loss of what is no padding."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**CONFIG.to_dict())
    theirs = transformers.LlamaForCausalLM(config).eval()
    state = {name: torch.from_numpy(array.copy()) for name, array in WEIGHTS.items()}
    theirs.load_state_dict(state, strict=False)
    model = numpy.backend.load(CONFIG, WEIGHTS)
    tokens, mask = side_by_side(PROMPTS, 35, left=True)
    with torch.no_grad():
        places = torch.from_numpy(np.maximum(mask.cumsum(1) - 1, 0))
        given_them = (torch.from_numpy(tokens), torch.from_numpy(mask), places)
        logits = theirs(*given_them).logits.numpy()
        loss = float(theirs(torch.tensor([IDS[:90]]), labels=torch.tensor([IDS[:90]])).loss)
    ours = entries.forward(model, tokens, attention_mask=mask)
    np.testing.assert_allclose(ours[mask == 1], logits[mask == 1], rtol=1e-3, atol=1e-4)
    text, places = IDS[:90], range(90)
    targets, weights = [*text[1:], -100], [1 / 89] * 90
    got = entries.loss_packed(model, text, places, [0] * 90, targets, weights)
    assert np.isclose(got, loss, rtol=1e-5)


def test_a_loss_never_holds_the_logits_of_all_tokens() -> None:
    """Feature row 71: on 4,000 tokens the peak is a fraction of [T, V]."""
    config = tiny_config(vocab_size=8000, num_hidden_layers=1, max_position_embeddings=4096)
    model = numpy.backend.load(config, random_weights(config))
    ids = np.random.default_rng(0).integers(0, 8000, 4000)
    arrays = ids, np.arange(4000) % 500, np.arange(4000) // 500, np.roll(ids, -1)
    entries.loss_packed(model, *(part[:9] for part in arrays), np.ones(9))
    tracemalloc.start()
    entries.loss_packed(model, *arrays, np.ones(4000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 4000 * 8000 / 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 130))
def test_native_feeds_a_pack_in_parts(counts: list[int], size: int) -> None:
    """Each token once and in order, full parts but the last, places that go on."""
    runs = np.array([(count, 0, row) for row, count in enumerate(counts)], dtype=np.int32)
    fed, covered = dict.fromkeys(range(len(counts)), 0), 0
    for start, end, part in _parts(runs, size):
        assert start == covered
        assert end - start == part[:, 0].sum() == min(size, sum(counts) - start)
        for count, place, row in part.tolist():
            assert place == fed[row]
            fed[row] += count
        covered = end
    assert [*fed.values()] == counts


@pytest.mark.parametrize("kv", ["f32", "int16", "int8"])
def test_native_log_probs_are_those_of_its_logits(kv: str) -> None:
    """Bit for bit, over several parts."""
    model = native.backend.load(CONFIG, WEIGHTS, quant="q8", kv=kv, threads=2)
    arrays = [*IDS[:190], *IDS[:9]], [*range(190), *range(9)], [0] * 190 + [1] * 9
    targets = np.roll(arrays[0], -1)
    got = entries.log_probs_packed(model, *arrays, targets)
    for part in (slice(190), slice(190, 199)):
        logits = entries.forward(model, [arrays[0][part]])[0]
        expected = log_softmax(logits)[np.arange(len(logits)), targets[part]]
        np.testing.assert_array_equal(got[part], expected)


def test_a_step_that_failed_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feature row 151: lengths are as they were, and the retry gives what it would have given."""
    model = PlainModel(CONFIG)
    caches = [model.new_cache(2, 32) for _ in range(2)]
    for cache in caches:
        entries.prefill(model, cache, TOKENS[:2, :9])
    with monkeypatch.context() as patch:
        patch.setattr(model, "_sum", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            entries.decode_rows(model, caches[0], [[1], [2]], [9, 9])
    assert caches[0].lengths == (9, 9)
    got, expected = [entries.decode_rows(model, one, [[1], [2]], [9, 9]) for one in caches]
    np.testing.assert_array_equal(got, expected)


# The table


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_has_a_function_and_says_its_shapes(name: str) -> None:
    entry = ENTRIES[name]
    assert callable(getattr(entries, name))
    assert name in entries.__all__
    sizes = {symbol: 2 + number for number, symbol in enumerate(entry.symbols)}
    shapes = entry.shapes(sizes)
    assert [*shapes] == [item.name for item in entry.inputs]
    arrays = [np.zeros(shapes[item.name], np.int32) for item in entry.inputs]
    made = entry.build(np, 64, *arrays[: len(arrays) - entry.extra])
    tokens = made.ids.shape
    assert {getattr(made, part).shape for part in ("positions", "rows", "slots", "segments")} == {
        tokens
    }
    assert (made.table is not None) == (entry.cache == "paged")
    assert entry.signature.startswith(f"{name}(")


def test_signatures_read_like_declarations() -> None:
    assert ENTRIES["prefill"].signature == (
        "prefill(tokens [Batch, S], pos) → logits [Batch, Vocab], fixed cache [Batch, MaxSeq]"
    )
    assert ENTRIES["loss_packed"].signature.endswith("weights [P]) → loss")
    assert ENTRIES["step_packed"].symbols == ("P", "Batch", "MaxSeq")
    assert ENTRIES["decode_paged"].symbols == ("Rows", "Pages", "Pool")


def test_symbols_must_be_bound() -> None:
    entry = ENTRIES["prefill"]
    assert entry.shapes({"Batch": 1, "S": 8, "MaxSeq": 64}) == {"tokens": (1, 8), "pos": ()}
    with pytest.raises(
        InputError, match=r"MaxSeq of entry prefill is not bound: .* Batch, S, MaxS"
    ):
        entry.shapes({"Batch": 1, "S": 8})
    with pytest.raises(InputError, match="S of entry prefill is 0"):
        entry.shapes({"Batch": 1, "S": 0, "MaxSeq": 64})


# Builders: any library of arrays gives the same numbers


def calls() -> dict[str, tuple[int, list[Any]]]:
    """Of each builder, the size of a page and inputs with padding."""
    tokens, mask = side_by_side(PROMPTS, 35, left=True)
    table = np.array([[5, 2], [4, 0], [0, 0]])
    packs = packed([(1, 0, IDS[:9]), (0, 0, IDS[9:14])], 3, padding=4)
    parts = paged(table, [(0, 3, IDS[:9]), (1, 0, IDS[9:14])], padding=4)
    steps = [np.array([[1], [2], [3]]), np.array([70, -1, 3])]
    return {
        "forward": (0, [tokens, mask, np.arange(35)]),
        "next_token": (0, [tokens, mask]),
        "prefill": (64, [TOKENS, np.array([3, 4, 5, 6])]),
        "prefill_slots": (64, [tokens, np.array([3, 0, 1]), np.array([4, 0, 35])]),
        "prefill_packed": (64, packs),
        "decode_rows": (128, steps),
        "step_packed": (128, [*packs, *steps]),
        "prefill_paged": (64, [*parts, table]),
        "decode_paged": (64, [*steps, table]),
        "step_paged": (64, [*parts, *steps, table]),
        "packed": (0, [*packs[:1], packs[2], packs[3]]),
    }


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
@pytest.mark.parametrize("name", [*calls()])
def test_builders_know_no_library(name: str, library: str) -> None:
    xp = pytest.importorskip(library)
    page_size, arrays = calls()[name]
    build = getattr(builders, name)
    expected = build(np, page_size, *arrays)
    got = build(xp, page_size, *(xp.asarray(array) for array in arrays))
    for field, ours, theirs in zip(expected._fields, expected, got, strict=True):
        np.testing.assert_array_equal(theirs, ours, err_msg=field)
    padding = expected.segments < 0
    for part in (expected.ids, expected.positions, expected.rows):
        assert not part[padding].any()
    scratch = 0 if expected.table is not None else -1
    assert (expected.slots[padding] == scratch).all()


def test_a_builder_can_be_traced() -> None:
    """Shapes do not depend on values: padding stays, and is marked."""
    jax = pytest.importorskip("jax")
    page_size, arrays = calls()["step_paged"]
    traced = jax.jit(lambda *inputs: builders.step_paged(jax.numpy, page_size, *inputs))(*arrays)
    expected = builders.step_paged(np, page_size, *arrays)
    for ours, theirs in zip(expected, traced, strict=True):
        np.testing.assert_array_equal(theirs, ours)


# Inputs


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2], r"tokens has shape \[2\], but forward takes \[B, S\]"),
        ([[]], r"tokens has shape \[1, 0\], but forward takes \[B, S\]"),
        ([[1, 2], [3]], "tokens must be integers, in rows of one length"),
        ([[1.0, 2.0]], "tokens must be integers, not float64"),
        ([[2**31]], "tokens must be integers of 32 bits, not 2147483648"),
        ([[2**70]], "tokens must be integers of 32 bits, not larger ones"),
        ([["a"]], "tokens must be integers, not <U1"),
        ([[96]], "token id 96 is not in a vocabulary of 96"),
    ],
)
def test_inputs_are_checked(tokens: Any, message: str) -> None:
    model = numpy.backend.load(CONFIG, WEIGHTS)
    with pytest.raises(InputError, match=message):
        entries.forward(model, tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": [[1, 1]]}, r"attention_mask has shape \[1, 2\], but tokens \[2, 3\]"),
        ({"attention_mask": [[1, 1, 2]] * 2}, "attention_mask must hold 1 for a token and 0 for"),
        ({"attention_mask": [1, 1, 1]}, r"attention_mask has shape \[3\]"),
        ({"attention_mask": [[1] * 4] * 2}, r"need \[2, 3\], or \[2, pos \+ 3\]"),
        ({"position_ids": [0, 1]}, r"position_ids has shape \[2\].* need \[3\] or \[2, 3\]"),
        ({"position_ids": [5, 6, 7]}, "row 0 holds 0 tokens, but the batch continues it at"),
    ],
)
def test_masks_and_positions_are_checked(options: dict[str, Any], message: str) -> None:
    model = numpy.backend.load(CONFIG, WEIGHTS)
    cache = model.new_cache(2, 16)
    with pytest.raises(Exception, match=message) as caught:
        entries.prefill(model, cache, [[1, 2, 3], [4, 5, 6]], **options)
    assert type(caught.value).__module__ == "smollm2.errors"
    assert cache.lengths == (0, 0)


def test_a_tensor_of_a_framework_is_an_array() -> None:
    torch = pytest.importorskip("torch")
    model = native.backend.load(CONFIG, WEIGHTS, quant="f32")
    got = entries.forward(model, torch.tensor(TOKENS))
    np.testing.assert_array_equal(got, entries.forward(model, TOKENS.tolist()))


def hidden(model: NativeModel) -> np.ndarray:
    return entries.hidden_packed(model, IDS[:70], range(70), [0] * 70)


def test_native_hidden_states_are_numpys_and_depend_on_nothing_else() -> None:
    expected = entries.hidden_packed(
        numpy.backend.load(CONFIG, WEIGHTS), IDS[:70], range(70), [0] * 70
    )
    first = hidden(native.backend.load(CONFIG, WEIGHTS, quant="f32", threads=1))
    np.testing.assert_allclose(first, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(
        hidden(native.backend.load(CONFIG, WEIGHTS, quant="f32", threads=2)), first
    )
