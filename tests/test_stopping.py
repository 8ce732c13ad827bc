"""Stop strings against searching the whole text, and the union of stop ids."""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from smollm2.checkpoint import load_checkpoint
from smollm2.errors import ConfigError
from smollm2.stopping import StopStrings, stop_ids
from smollm2.template import SMOLLM2_TEMPLATE, ChatTemplate
from smollm2.tokenizer import Tokenizer

TEXT = st.text("ab", max_size=30) | st.text("abc", max_size=60)
STOPS = st.lists(st.text("abc", min_size=1, max_size=6), max_size=5)


@st.composite
def text_and_near_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Text, and stop strings that are in it, or nearly: pieces of it with another end."""
    text = draw(st.text("abc", min_size=1, max_size=25))
    ends = st.tuples(
        st.integers(0, len(text) - 1), st.integers(1, 9), st.sampled_from(["", "a", "b"])
    )
    stops = [
        text[start : start + size] + end for start, size, end in draw(st.lists(ends, max_size=6))
    ]
    return text, stops


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The stop string that starts first, the shortest of those that start together."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None


def held_back(text: str, stops: list[str]) -> str:
    """The longest end of ``text`` that is a proper prefix of a stop string."""
    ends = (text[start:] for start in range(len(text) + 1))
    return next(end for end in ends if any(stop.startswith(end) and stop != end for stop in stops))


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str, StopStrings]:
    finder = StopStrings(stops)
    return [finder.push(piece) for piece in pieces], finder.flush(), finder


def cut(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(place % (len(text) + 1) for place in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


@settings(max_examples=1000, deadline=None)
@given(
    case=st.tuples(TEXT, STOPS) | text_and_near_stops(),
    cuts=st.lists(st.integers(0, 1000), max_size=20),
)
def test_any_chunking_equals_searching_the_whole(case, cuts):
    # cases: S4, S6, S10; table: row 97
    text, stops = case
    shown, flushed, finder = run(stops, cut(text, cuts))
    match = first_match(text, stops)
    assert "".join(shown) + flushed == (text if match is None else text[: match[0]])
    assert finder.matched == (None if match is None else match[1])
    assert finder.push("more") == finder.flush() == "" or match is None


@settings(max_examples=500, deadline=None)
@given(text=TEXT, stops=STOPS.filter(bool))
def test_exactly_what_may_become_a_stop_is_held_back(text, stops):
    # cases: S4
    if any(stop in text for stop in stops):
        return
    finder = StopStrings(stops)
    shown = ""
    for end, character in enumerate(text, 1):
        shown += finder.push(character)
        held = held_back(text[:end], stops)
        assert shown == text[: end - len(held)]
    assert finder.flush() == held_back(text, stops)


@settings(max_examples=500, deadline=None)
@given(text=TEXT, stops=STOPS)
def test_nothing_of_a_match_is_ever_shown(text, stops):
    # cases: S4
    finder = StopStrings(stops)
    shown = ""
    for character in text:
        shown += finder.push(character)
        if finder.matched is not None:
            assert shown == text[: first_match(text, stops)[0]]
            return


@pytest.mark.parametrize(
    ("stop", "pieces", "shown"),
    [
        ("DEFGHIJ", ["ABC", "DEF", "GHI", "JKL", "MN"], ["ABC", "", "", "", ""]),
        ("\n\nUser:", ["Yes.", "\n\n", "User", ":", " hi"], ["Yes.", "", "", "", ""]),
        ("\n\nUser:", ["Yes.\n", "\nUse", "d"], ["Yes.", "", "\n\nUsed"]),
        ("aab", ["aa", "aa", "b"], ["", "aa", ""]),
        ("aabaaac", ["aabaaabaaac"], ["aaba"]),
        ("👋🏽", ["hi ", "👋", "🏽"], ["hi ", "", ""]),
        ("x", ["", "ax", ""], ["", "a", ""]),
    ],
)
def test_pieces(stop, pieces, shown):
    # cases: S4; table: row 97
    assert run([stop], pieces)[0] == shown


def test_held_text_is_given_back_at_the_end():
    # cases: S6
    finder = StopStrings(["please stop"])
    assert finder.push("Say pleas") == "Say "
    assert finder.push("") == ""
    assert finder.flush() == "pleas"
    assert finder.matched is None
    assert finder.flush() == ""


def test_text_after_a_match_is_discarded():
    # cases: S6
    finder = StopStrings(["END", "DOT"])
    assert finder.push("one END two DOT") == "one "
    assert finder.matched == "END"
    assert finder.push("three") == finder.flush() == ""


def test_of_strings_that_start_together_the_first_complete_wins():
    shown, flushed, finder = run(["abcd", "ab"], ["xabcd"])
    assert (shown, flushed, finder.matched) == (["x"], "", "ab")


def test_an_earlier_start_may_still_win_after_a_match_inside():
    # "bc" is complete first, but "abcd" starts before it and may follow.
    for rest, shown, matched in (("d", "", "abcd"), ("x", "a", "bc")):
        finder = StopStrings(["abcd", "bc"])
        assert finder.push("abc") == ""
        assert finder.matched is None
        assert finder.push(rest) == shown
        assert finder.matched == matched
    finder = StopStrings(["abcd", "bc"])
    finder.push("abc")
    assert (finder.flush(), finder.matched, finder.push("d")) == ("a", "bc", "")


def test_text_may_be_shown_while_a_match_waits():
    # "b" waits first for "aab.c", then for "ab.xd", which starts one character later.
    shown, flushed, finder = run(["aab.c", "ab.xd", "b"], [*"aab.xq"])
    assert (shown, flushed, finder.matched) == (["", "", "", "", "a", "a"], "", "b")


def test_a_longer_match_does_not_replace_one_that_waits():
    # Both start together; they wait for "xabq".
    assert run(["xabq", "a", "ab"], [*"xabz"])[2].matched == "a"


def test_without_stops_text_passes():
    finder = StopStrings([])
    assert finder.push("any") == "any"
    assert (finder.flush(), finder.matched) == ("", None)


def test_a_flush_forgets_the_text():
    finder = StopStrings(["ab"])
    assert finder.push("a") + finder.flush() == "a"
    assert finder.push("b") + finder.flush() == "b"
    assert finder.matched is None


def test_time_is_linear_in_the_text():
    # A stop of 20,000 characters that almost matches all along: quadratic search takes minutes.
    finder = StopStrings(["a" * 20_000 + "b"])
    start = time.perf_counter()
    shown = [finder.push("a" * 4) for _ in range(15_000)]
    assert time.perf_counter() - start < 5
    assert sum(map(len, shown)) == 60_000 - 20_000


# --- stop ids ---


def tokenizer_of(eos_id: int | None, **special: int) -> SimpleNamespace:
    return SimpleNamespace(eos_id=eos_id, special_tokens=special)


def template_of(*ids: int) -> SimpleNamespace:
    return SimpleNamespace(stop_ids=lambda tokenizer: frozenset(ids))


def config_of(*ids: int) -> SimpleNamespace:
    return SimpleNamespace(eos_token_ids=ids, vocab_size=100)


ALL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


@pytest.mark.parametrize("eos", [2, [2], [2, 0], [0, 2, 2]])
def test_instruct_models_stop_at_both(eos):
    # cases: S1
    tokenizer = tokenizer_of(2, **ALL)
    got = stop_ids(config_of(2), {"eos_token_id": eos}, tokenizer, template_of(2))
    assert got == frozenset({0, 2})
    assert stop_ids(config_of(), {}, tokenizer, None) == {0, 2}


def test_base_models_stop_at_the_end_of_text():
    # cases: S1
    tokenizer = tokenizer_of(0, **ALL)
    assert stop_ids(config_of(0), {"eos_token_id": 0}, tokenizer, None) == {0}


def test_the_real_tokenizer_and_template(shared):
    # cases: S1
    tokenizer = Tokenizer.from_file(shared / "golden" / "tokenizer.json")
    template = ChatTemplate(SMOLLM2_TEMPLATE)
    assert stop_ids(config_of(), {}, tokenizer, template) == {0, 2}
    assert stop_ids(config_of(), {}, tokenizer, None) == {0}


@pytest.mark.weights
def test_the_real_instruct_checkpoint(real_gguf):
    # cases: S1
    real = load_checkpoint(real_gguf)
    assert stop_ids(real.config, real.generation_config, real.tokenizer, real.template) == {0, 2}


def test_every_source_counts():
    # cases: S1
    tokenizer = tokenizer_of(5, **{"<|endoftext|>": 6})
    got = stop_ids(config_of(3, 4), {"eos_token_id": [1, 2]}, tokenizer, template_of(7, 8))
    assert got == {1, 2, 3, 4, 5, 6, 7, 8}


def test_sources_may_be_absent():
    assert stop_ids(config_of(), {}, None, None) == frozenset()
    assert stop_ids(config_of(3), {"eos_token_id": None}, None, template_of(7)) == {3}
    assert stop_ids(config_of(), {}, tokenizer_of(None), None) == frozenset()


@pytest.mark.parametrize("wrong", [100, -1, True, "2", 2.0, [2, 100], [[2]], {"id": 2}])
def test_wrong_ids_name_their_source(wrong):
    with pytest.raises(ConfigError, match=r"generation config .*ids are 0 to 99$"):
        stop_ids(config_of(2), {"eos_token_id": wrong}, None, None)


def test_ids_outside_the_vocabulary_from_any_source():
    for config, tokenizer, template in (
        (config_of(100), None, None),
        (config_of(), tokenizer_of(100), None),
        (config_of(), tokenizer_of(None, **{"<|endoftext|>": 100}), None),
        (config_of(), tokenizer_of(None), template_of(100)),
    ):
        with pytest.raises(ConfigError, match="100, which is not a token id"):
            stop_ids(config, {}, tokenizer, template)
