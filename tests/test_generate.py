"""Generation on a scripted model: what is fed, chosen, shown, and when it ends."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from math import isnan
from pathlib import Path

import numpy as np
import pytest

from smollm2.backends import get_backend
from smollm2.backends.numpy import backend
from smollm2.errors import (
    ContextLengthError,
    InputError,
    ModelNotFoundError,
    NumericsError,
    TokenizerError,
)
from smollm2.generate import SmolLM2, load
from smollm2.lane import PREFILL_CHUNK
from smollm2.request import DEFAULT_MAX_TOKENS
from smollm2.results import Piece
from smollm2.sampling import SamplingParams
from smollm2.tokenizer import Tokenizer
from tests.fakes import ScriptedModel, byte_tokenizer, say
from tests.tiny import random_weights, tiny_config, write_hf

PROMPT = "Hi"  # two bytes, two tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def speak(tokenizer: Tokenizer):
    def make(text: str, *, prompt: str = PROMPT, end: int | None = 2) -> SmolLM2:
        return SmolLM2(ScriptedModel(say(text, len(prompt), end=end)), tokenizer=tokenizer)

    return make


def test_text_ids_and_finish(speak) -> None:
    g = speak(" there").generate(PROMPT)
    assert g.text == " there" == str(g)
    assert g.prompt == PROMPT
    assert g.prompt_ids == (3 + ord("H"), 3 + ord("i"))
    assert g.token_ids == (*(3 + b for b in b" there"), 2)  # the stop id is among the ids
    assert (g.finish_reason, g.stopped_by) == ("stop", 2)


def test_a_prompt_of_ids_is_the_same_prompt(speak) -> None:
    model = speak(" there")
    by_text = model.generate(PROMPT)
    by_ids = model.generate(list(by_text.prompt_ids))
    assert by_ids.text == by_text.text
    assert by_ids.prompt is None
    assert model.generate(np.array(by_text.prompt_ids)).token_ids == by_text.token_ids


def test_max_tokens(speak) -> None:
    """Feature row 34: both ends are reachable and reported."""
    g = speak(" there").generate(PROMPT, max_tokens=3)
    assert (g.text, g.finish_reason, g.stopped_by) == (" th", "length", None)
    nothing = speak("x").generate(PROMPT, max_tokens=0)
    assert (nothing.text, nothing.token_ids, nothing.finish_reason) == ("", (), "length")


def test_a_stop_string_that_is_a_control_token(speak) -> None:
    """cases: S2; it has no text to match, so its id counts."""
    g = speak("ab").generate(PROMPT, stop="<|im_end|>", ignore_eos=True)
    assert (g.text, g.finish_reason, g.stopped_by) == ("ab", "stop", 2)


def test_control_tokens_are_shown_where_asked(speak) -> None:
    """cases: S3; feature row 51."""
    stream = speak("ab").stream(PROMPT, show_special=True)
    assert "".join(str(piece) for piece in stream) == "ab<|im_end|>" == stream.result.text


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer) -> None:
    """An embedding may be padded to more rows than there are tokens."""
    config = tiny_config(vocab_size=300)
    model = SmolLM2(ScriptedModel({1: 280, 2: 2}, config=config), tokenizer=tokenizer)
    stream = model.stream([299], echo=True)
    assert "".join(piece.text for piece in stream) == ""
    assert stream.result.token_ids == (280, 2)


def test_each_token_is_fed_once(speak) -> None:
    model = speak("abc")
    model.generate(PROMPT)
    assert model.lm.fed == [2, 1, 1, 1]


def test_ignore_eos_and_own_stop_ids(speak) -> None:
    model = speak("ab", end=2)
    g = model.generate(PROMPT, ignore_eos=True, max_tokens=5)
    assert g.finish_reason == "length"
    assert g.token_ids[2:] == (2, 2, 2)
    assert g.text == "ab"  # cases: S3, control tokens are not shown
    g = model.generate(PROMPT, stop_ids=(3 + ord("b"),))
    assert (g.text, g.stopped_by) == ("a", 3 + ord("b"))


@pytest.mark.parametrize("stop", ["DEF", "D", "F"])
def test_stop_strings_across_tokens(speak, stop: str) -> None:
    """cases: S4, S11; one implementation for streamed and whole."""
    model = speak("ABCDEFGHIJ")
    g = model.generate(PROMPT, stop=[stop])
    assert g.text == "ABCDEFGHIJ".split(stop)[0]
    assert (g.finish_reason, g.stopped_by) == ("stop", stop)
    stream = model.stream(PROMPT, stop=stop)
    assert "".join(piece.text for piece in stream) == g.text == stream.result.text


def test_a_fragment_of_a_stop_is_given_out_at_the_end(speak) -> None:
    """cases: S6."""
    stream = speak("pleas").stream(PROMPT, stop="please")
    pieces = list(stream)
    assert [p.text for p in pieces[:-1]] == ["", "", "", "", "", ""]
    assert pieces[-1].text == "pleas" == stream.result.text


def test_pieces_are_whole_characters(speak) -> None:
    """cases: S8."""
    stream = speak("é🦙!").stream(PROMPT)
    assert [p.text for p in stream] == ["", "é", "", "", "", "🦙", "!", "", ""]
    assert stream.result.text == "é🦙!"


def test_an_incomplete_character_is_marked_at_the_end(speak) -> None:
    stream = speak("🦙").stream(PROMPT, max_tokens=3)
    assert [p.text for p in stream] == ["", "", "", "\ufffd"]
    assert stream.result.text == "\ufffd"


def test_origins_come_in_order(speak) -> None:
    """Feature rows 35, 36: prompt, generated, end."""
    seen: list[Piece] = []
    model = speak("ab")
    g = model.generate(PROMPT, on_piece=seen.append)
    assert [(p.origin, p.text, p.token_id) for p in seen] == [
        ("prompt", "H", 3 + ord("H")),
        ("prompt", "i", 3 + ord("i")),
        ("generated", "a", 3 + ord("a")),
        ("generated", "b", 3 + ord("b")),
        ("generated", "", 2),
        ("end", "", None),
    ]
    assert [p.is_terminal for p in seen] == [False] * 5 + [True]
    assert seen[-1].finish_reason == "stop"
    assert g.text == "ab"
    assert [p.origin for p in model.stream(PROMPT)] == ["generated"] * 3 + ["end"]


def test_echo_puts_the_prompt_before_the_completion(speak) -> None:
    stream = speak("ab").stream(PROMPT, echo=True)
    assert "".join(p.text for p in stream) == "Hiab" == stream.result.text


def test_stats_are_consistent(speak) -> None:
    """Feature rows 37, 38."""
    g = speak("abcd").generate(PROMPT, seed=5)
    s = g.stats
    assert (s.prompt_tokens, s.generated_tokens, s.total_tokens) == (2, 5, 7)
    assert (s.cached_tokens, s.seed) == (0, 5)
    assert 0 < s.prefill_seconds <= s.ttft
    assert s.decode_seconds > 0
    assert s.total_seconds == pytest.approx(s.ttft + s.decode_seconds)
    assert s.prefill_tokens_per_second == pytest.approx(2 / s.prefill_seconds)
    assert s.decode_tokens_per_second == pytest.approx(4 / s.decode_seconds)
    assert s.summary() == (
        f"2 tokens in at {s.prefill_tokens_per_second:.0f}/s · "
        f"5 out at {s.decode_tokens_per_second:.0f}/s · first after {s.ttft:.2f} s"
    )


def test_rates_are_zero_without_time(speak) -> None:
    s = speak("a").generate(PROMPT, max_tokens=1).stats
    assert s.decode_tokens_per_second == 0.0
    assert " · 1 out · first after " in s.summary()


def test_the_seed_is_reported_and_repeats_the_result(tokenizer) -> None:
    """Feature rows 27, 28."""
    model = SmolLM2(ScriptedModel({}), tokenizer=tokenizer)
    first = model.generate(PROMPT, temperature=50.0, max_tokens=20)
    assert 0 <= first.stats.seed < 2**31
    again = model.generate(PROMPT, first.params)
    assert again.token_ids == first.token_ids
    assert again.stats.seed == first.stats.seed
    other = model.generate(PROMPT, temperature=50.0, max_tokens=20, seed=first.stats.seed ^ 1)
    assert other.token_ids != first.token_ids
    drawn = [
        model.generate(PROMPT, max_tokens=1, rng=np.random.default_rng(11)).stats.seed
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]


def test_logprobs_of_each_token(speak) -> None:
    g = speak("ab").generate(PROMPT, logprobs=3)
    assert g.logprobs is not None
    assert [lp.token_id for lp in g.logprobs] == list(g.token_ids)
    exact = 10.0 - np.log(np.exp(10.0) + 259)
    for lp in g.logprobs:
        assert lp.logprob == pytest.approx(exact, abs=1e-6)
        assert len(lp.top) == 3
        assert lp.top[0] == (lp.token_id, pytest.approx(exact, abs=1e-6))
    assert speak("ab").generate(PROMPT).logprobs is None


# The prompt's limits


def test_an_empty_prompt_is_refused(speak) -> None:
    for empty in ("", []):
        with pytest.raises(InputError, match="the prompt is empty: it needs a token"):
            speak("a").generate(empty)


@pytest.mark.parametrize("wrong", [None, 5, b"abc", {1: 2}, [[1]], ["a"], [{"role": "user"}]])
def test_a_prompt_is_text_or_ids(speak, wrong: object) -> None:
    with pytest.raises(InputError, match=r"text or token ids|is not a token id"):
        speak("a").generate(wrong)


def test_ids_outside_the_vocabulary_are_refused(speak) -> None:
    with pytest.raises(InputError, match="token id 260 is not in a vocabulary of 260"):
        speak("a").generate([5, 260])


@pytest.mark.parametrize("wrong", [5.0, True, "7", None])
def test_only_integers_are_ids(speak, wrong: object) -> None:
    with pytest.raises(InputError, match="is not a token id"):
        speak("a").generate([5, wrong])


def test_prompt_and_answer_must_fit(speak) -> None:
    """Feature rows 32, 160; cases: A8, A13; refused before anything runs."""
    model = speak("a")
    with pytest.raises(ContextLengthError, match=r"has 2 tokens and 255 more .* length is 256"):
        model.generate(PROMPT, max_tokens=255)
    with pytest.raises(ContextLengthError) as caught:
        model.generate([5] * 300)
    assert (caught.value.prompt_tokens, caught.value.context_length) == (300, 256)
    assert model.lm.fed == []
    full = model.generate([5] * 250, max_tokens=6, ignore_eos=True)
    assert len(full.token_ids) == 6


def test_without_max_tokens_the_context_is_the_limit(tokenizer) -> None:
    model = SmolLM2(ScriptedModel({}, otherwise=9), tokenizer=tokenizer)
    g = model.generate([5] * 246)
    assert (len(g.token_ids), g.finish_reason) == (10, "length")
    long = ScriptedModel({}, otherwise=9, config=tiny_config(max_position_embeddings=4096))
    assert len(SmolLM2(long, tokenizer=tokenizer).generate([5]).token_ids) == DEFAULT_MAX_TOKENS


def test_a_long_prompt_is_fed_in_chunks_and_in_full(tokenizer) -> None:
    config = tiny_config(vocab_size=260, max_position_embeddings=8192)
    scripted = ScriptedModel({8000: 3 + ord("y")}, config=config)
    g = SmolLM2(scripted, tokenizer=tokenizer).generate([5] * 8000, max_tokens=2)
    assert g.text == "y"
    assert scripted.fed[:-1] == [PREFILL_CHUNK] * 15 + [8000 - 15 * PREFILL_CHUNK]


def test_special_text_in_a_prompt_is_plain_unless_asked(speak) -> None:
    """cases: T13, T15."""
    model = speak("a")
    plain = model.generate("<|im_start|>").prompt_ids
    assert plain == tuple(3 + b for b in b"<|im_start|>")
    assert model.generate("<|im_start|>", allow_special=True).prompt_ids == (1,)


def test_without_a_tokenizer_ids_still_work() -> None:
    model = SmolLM2(ScriptedModel({1: 7, 2: 8, 3: 2}))
    g = model.generate([5])
    assert (g.text, g.token_ids) == ("", (7, 8, 2))
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        model.generate("text")


# Options


def test_wrong_options_name_the_nearest(speak) -> None:
    """cases: N7."""
    with pytest.raises(InputError, match=r"temprature.*temperature"):
        speak("a").generate(PROMPT, temprature=0.5)
    with pytest.raises(InputError, match="temperature"):
        speak("a").generate(PROMPT, temperature=-1)


def test_options_override_params(speak) -> None:
    params = SamplingParams(max_tokens=1, seed=3)
    g = speak("abc").generate(PROMPT, params, max_tokens=2)
    assert (g.text, g.params.max_tokens, g.params.seed) == ("ab", 2, 3)


# Leaving early


def test_cancel_from_another_thread(tokenizer) -> None:
    """Feature row 159: takes effect within one step."""
    model = SmolLM2(ScriptedModel({}, otherwise=9), tokenizer=tokenizer)
    stream = model.stream(PROMPT, max_tokens=200)
    next(stream)
    thread = threading.Thread(target=stream.cancel)
    thread.start()
    thread.join()
    rest = list(stream)
    assert [p.origin for p in rest] == ["end"]
    assert stream.result.finish_reason == "cancelled"
    assert len(stream.result.token_ids) == 1


def test_cancel_between_chunks_of_a_prompt(tokenizer) -> None:
    config = tiny_config(vocab_size=260, max_position_embeddings=8192)
    scripted = ScriptedModel({}, config=config)
    model = SmolLM2(scripted, tokenizer=tokenizer)
    g = model.generate([5] * 4000, cancel=lambda: len(scripted.fed) == 2)
    assert (g.finish_reason, g.token_ids, scripted.fed) == ("cancelled", (), [512, 512])
    assert g.stats.generated_tokens == 0


def test_closing_a_stream_cancels_it_and_frees_the_cache(speak) -> None:
    for taken in (0, 1):
        stream = speak("abc").stream(PROMPT)
        for _ in range(taken):
            next(stream)
        with pytest.raises(InputError, match="not finished"):
            _ = stream.result
        stream.close()
        assert stream.result.finish_reason == "cancelled"
        assert stream.result.text == "abc"[:taken]
        assert list(stream) == []
        stream.close()


def test_a_forgotten_stream_frees_its_cache(speak) -> None:
    closed = []
    model = speak("abc")
    new_cache = model.lm.new_cache

    def watched(*arguments):
        cache = new_cache(*arguments)
        close = cache.close
        cache.close = lambda: (closed.append(True), close())
        return cache

    model.lm.new_cache = watched
    stream = model.stream(PROMPT)
    next(stream)
    del stream
    gc.collect()
    assert closed == [True]
    with model.stream(PROMPT) as stream:
        next(stream)
    assert closed == [True, True]
    assert stream.result.finish_reason == "cancelled"


def test_a_callback_that_raises_cancels(speak) -> None:
    stream = speak("abc").stream(PROMPT, on_piece=lambda piece: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        next(stream)
    assert stream.is_over


def test_a_stream_cannot_be_closed_under_another_thread(speak) -> None:
    model = speak("abc")
    at_work, may_go = threading.Event(), threading.Event()
    forward = model.lm.forward

    def slow(batch, cache=None):
        at_work.set()
        may_go.wait(10)
        return forward(batch, cache)

    model.lm.forward = slow
    stream = model.stream(PROMPT)
    thread = threading.Thread(target=stream.finish)
    thread.start()
    at_work.wait(10)
    with pytest.raises(InputError, match="another thread waits"):
        stream.close()
    stream.cancel()
    may_go.set()
    thread.join()
    assert stream.result.finish_reason == "cancelled"


def test_a_failure_is_not_swallowed(tokenizer) -> None:
    scripted = ScriptedModel({}, otherwise=9)
    scripted.fail_at = 2
    stream = SmolLM2(scripted, tokenizer=tokenizer).stream(PROMPT)
    next(stream)
    next(stream)
    with pytest.raises(RuntimeError, match="scripted failure"):
        next(stream)
    assert stream.is_over


def test_nan_logits_are_a_named_error(tokenizer) -> None:
    """cases: N1."""
    scripted = ScriptedModel({})
    forward = scripted.forward
    scripted.forward = lambda batch, cache=None: forward(batch, cache) * np.nan
    for temperature in (0.0, 0.7):
        with pytest.raises(NumericsError, match=r"(?i)nan"):
            SmolLM2(scripted, tokenizer=tokenizer).generate(PROMPT, temperature=temperature)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_many_threads_share_a_model(name: str, tokenizer) -> None:
    """cases: K11."""
    if name != "numpy":
        pytest.importorskip(name)
    config = tiny_config(vocab_size=260)
    weights = random_weights(config, seed=4)
    model = SmolLM2(get_backend(name).load(config, weights), tokenizer=tokenizer)
    prompts = [f"prompt number {i}" for i in range(12)]
    alone = [model.generate(p, max_tokens=12, temperature=0.9, seed=7).token_ids for p in prompts]
    with ThreadPoolExecutor(6) as pool:
        together = pool.map(
            lambda p: model.generate(p, max_tokens=12, temperature=0.9, seed=7).token_ids, prompts
        )
    assert list(together) == alone


def test_memory_stays_flat(tokenizer) -> None:
    """cases: P9; what Python holds after 200 generations is what it held after the first few."""
    config = tiny_config(vocab_size=260)
    model = SmolLM2(backend.load(config, random_weights(config)), tokenizer=tokenizer)
    tracemalloc.start()
    for _ in range(20):
        model.generate(PROMPT, max_tokens=8)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(200):
        model.generate(PROMPT, max_tokens=8)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 200 * 1000  # a cache that stayed would be 64 kB


def test_the_same_request_twice_is_the_same_text(speak) -> None:
    """cases: K1."""
    model = speak("same")
    assert model.generate(PROMPT).token_ids == model.generate(PROMPT).token_ids


def test_a_closed_model_says_so(speak) -> None:
    with speak("a") as model:
        assert model.generate(PROMPT).text == "a"
    model.close()
    with pytest.raises(InputError, match="closed"):
        model.generate(PROMPT)


# Scores


def test_score_is_the_logprob_of_each_next_token(tokenizer) -> None:
    text = "abcab" * 40  # more than one chunk
    scripted = ScriptedModel(say(text, 0, end=None))
    score = SmolLM2(scripted, tokenizer=tokenizer).score(text)
    likely = 10.0 - np.log(np.exp(10.0) + 259)
    assert score.token_ids == tuple(3 + b for b in text.encode())
    assert score.logprobs[0] is None
    np.testing.assert_allclose(score.logprobs[1:], likely, atol=1e-6)
    assert score.total == pytest.approx(199 * likely, abs=1e-4)
    assert score.mean == pytest.approx(likely, abs=1e-6)
    assert score.perplexity == pytest.approx(np.exp(-likely), abs=1e-6)


def test_score_of_one_token_and_of_too_many(tokenizer) -> None:
    model = SmolLM2(ScriptedModel({}), tokenizer=tokenizer)
    one = model.score("a")
    assert (one.logprobs, one.total) == ((None,), 0.0)
    assert isnan(one.mean)
    assert isnan(one.perplexity)
    with pytest.raises(ContextLengthError):
        model.score("a" * 257)
    assert len(model.score("a" * 256).logprobs) == 256


def test_a_path_is_never_a_name(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "smollm2-135m-instruct"
    write_hf(folder, tiny_config(), random_weights(tiny_config()))
    monkeypatch.chdir(tmp_path)
    model = load(Path("smollm2-135m-instruct"))
    assert model.config.vocab_size == 96
    assert repr(model) == "SmolLM2('smollm2-135m-instruct', 0.1M parameters, context length 256)"
    model.close()
    assert repr(model) == "SmolLM2('smollm2-135m-instruct', closed)"


def test_load_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="no backend named"):
        load("smollm2-135m-instruct", backend="cuda")
