"""Text → ids, held to the golden ids and to the ``tokenizers`` library."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from smollm2.errors import InputError, TokenizerError
from smollm2.tokenizer import Tokenizer
from tests.vocabulary import (
    GOLDEN,
    added,
    gguf_metadata,
    golden_library,
    golden_tokenizer,
    small_declaration,
    small_model,
    unhurried,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>")


@pytest.fixture(scope="module", params=["tokenizer.json", "gguf"])
def tokenizer(request: pytest.FixtureRequest, shared: Path) -> Tokenizer:
    if request.param == "gguf":
        return Tokenizer.from_gguf(gguf_metadata(shared))
    return golden_tokenizer(shared)


def test_golden_ids(tokenizer: Tokenizer) -> None:
    # cases: T1 T3 T4 T5 T17, table 29
    wrong = [case["text"] for case in GOLDEN if tokenizer.encode(case["text"]) != case["ids"]]
    assert not wrong
    assert len(GOLDEN) == 197


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("2023", [34, 32, 34, 35]),
        ("a  1", [81, 256, 33]),
        ("x\n\n1", [104, 1116, 33]),
        ("  5", [256, 37]),
        ("½ ² Ⅷ ①", [16738, 216, 19133, 216, 173, 223, 117, 216, 173, 235, 250]),
        ("🦙", [10813, 116, 243]),
        ("Hello 👋🏽!", [19556, 15107, 235, 229, 10813, 233, 138, 17]),
        ("\x04", []),
        ("a\x06b", [81, 82]),
        ("\U000461b1", [224, 224, 126]),
        ("</tool_call>", [9617, 19324, 79, 4350, 46]),
        ("hello", [28120]),
        (" hello", [33662]),
        ("  hello", [216, 33662]),
    ],
)
def test_ids_that_other_engines_get_wrong(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    # cases: T1, T2
    assert tokenizer.encode(text) == ids


def test_the_real_gguf_file_gives_the_golden_ids(real_gguf: Path) -> None:
    # cases: T5
    from smollm2.formats.gguf import open_gguf

    tokenizer = Tokenizer.from_gguf(open_gguf(real_gguf).metadata)
    assert [tokenizer.encode(case["text"]) for case in GOLDEN] == [c["ids"] for c in GOLDEN]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    assert tokenizer.vocab_size == 49152


@unhurried
@given(text=st.text(max_size=60))
def test_any_text_gives_the_librarys_ids(shared: Path, text: str) -> None:
    expected = golden_library(shared).encode(text, add_special_tokens=False).ids
    assert golden_tokenizer(shared).encode(text, allow_special=True) == expected


def test_special_tokens_are_parsed_only_when_asked(tokenizer: Tokenizer) -> None:
    # cases: T13, table 30
    for text in SPECIAL:
        token_id = tokenizer.special_tokens[text]
        assert tokenizer.is_special(token_id)
        assert tokenizer.encode(text, allow_special=True) == [token_id]
        plain = tokenizer.encode(text)
        assert not any(tokenizer.is_special(i) for i in plain)
        assert tokenizer.detokenize(plain) == text
    assert len(tokenizer.special_tokens) == 17
    assert not tokenizer.is_special(17)


def test_nothing_is_added_to_a_text(tokenizer: Tokenizer) -> None:
    # cases: T15, S2
    assert tokenizer.encode("<|im_start|>system", allow_special=True) == [1, 9690]
    assert tokenizer.encode("<|im_end|>", allow_special=True) == [2]
    assert tokenizer.encode("") == []


def test_threads_may_differ_in_what_they_allow(tokenizer: Tokenizer) -> None:
    wrong: list[list[int]] = []

    def encode(allow: bool) -> None:
        expected = tokenizer.encode("a<|im_end|>b", allow_special=allow)
        for _ in range(300):
            ids = tokenizer.encode("a<|im_end|>b", allow_special=allow)
            if ids != expected or (2 in ids) != allow:
                wrong.append(ids)

    threads = [threading.Thread(target=encode, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_the_vocabulary_lacks_is_told(tokenizer: Tokenizer) -> None:
    # cases: T2, C6
    for text in ("", "héllo 🦙\n\t  x", "こんにちは", "<|im_end|>", "a" * 1000):
        assert tokenizer.can_roundtrip(text)
    for text in ("\x04", "a\x06b", "\U000461b1", "\x16"):
        assert not tokenizer.can_roundtrip(text)


@pytest.mark.parametrize("text", ["\ud800", "ab\udc00c", "\udfff\ud800"])
def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InputError, match="half a surrogate pair"):
        tokenizer.encode(text)


def test_a_text_must_be_a_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="of type bytes"):
        tokenizer.encode(b"abc")  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["a", "_", " ", "1", "é"])
def test_long_pieces_take_linear_time(shared: Path, unit: str) -> None:
    # cases: T8
    tokenizer = golden_tokenizer(shared)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        ids = tokenizer.encode(unit * count)
        taken = time.perf_counter() - start
        assert tokenizer.detokenize(ids) == unit * count
        return taken

    small = min(seconds(12_500) for _ in range(3))
    assert seconds(100_000) < 30 * small + 0.2  # eight times as long; 64 times, were it quadratic


@pytest.mark.parametrize("text", ["A" * 9400, "a" * 400_000, "_" * 50_000, "ab" * 30_000])
def test_repeated_letters_do_not_crash(tokenizer: Tokenizer, text: str) -> None:
    # cases: T8, T9
    assert tokenizer.detokenize(tokenizer.encode(text)) == text


def test_no_prompt_is_cut(tokenizer: Tokenizer) -> None:
    # cases: table 32
    assert len(tokenizer.encode("word " * 8000)) >= 8000


FLAGS = st.fixed_dictionaries({name: st.booleans() for name in ("lstrip", "rstrip", "single_word")})


@unhurried
@given(flags=st.lists(FLAGS, min_size=3, max_size=3), data=st.data())
def test_splitting_at_control_tokens_is_what_the_library_does(
    flags: list[dict[str, bool]], data: st.DataObject
) -> None:
    texts = ["<a>", "<a>b", "|x|"]
    count = len(small_declaration()["model"]["vocab"])
    tokens = [added(count + i, text, **flags[i]) for i, text in enumerate(texts)]
    # A shorter token is tried where a longer one is not a single word: only there we differ.
    tokens[1]["single_word"] = tokens[0]["single_word"] = False
    tokenizer = Tokenizer(
        small_declaration(added_tokens=[added(0, "<|end|>"), *tokens]), source="made up"
    )
    parts = st.sampled_from([*texts, "<|end|>", " ", "\n ", "a", "b", "<a", "|"])
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    ids: list[int] = []
    for piece in tokenizer.split_special(text):
        ids += [piece] if isinstance(piece, int) else tokenizer.encode(piece)
    assert ids == tokenizer.encode(text, allow_special=True)


def test_user_defined_tokens_are_always_one_id() -> None:
    count = len(small_declaration()["model"]["vocab"])
    tokens = [added(0, "<|end|>"), added(count, "<think>", special=False)]
    tokenizer = Tokenizer(small_declaration(added_tokens=tokens), source="made up")
    assert tokenizer.encode("<think>") == [count]
    assert not tokenizer.is_special(count)
    assert tokenizer.detokenize([count]) == "<think>"


def test_text_never_makes_a_control_token_by_merging() -> None:
    vocab = small_declaration()["model"]["vocab"]
    declaration = small_declaration(added_tokens=[added(vocab["ab"], "ab")])
    tokenizer = Tokenizer(declaration, source="made up")
    assert tokenizer.encode("ba") == [vocab["b"], vocab["a"]]
    with pytest.raises(TokenizerError, match="control token of plain text"):
        tokenizer.encode("ab")


def test_a_model_may_stand_for_unknown_characters_with_a_control_token() -> None:
    # cases: T2
    vocab = {"<unk>": 0, "a": 1, "b": 2, "ab": 3}
    model = small_model(vocab=vocab, unk_token="<unk>")
    declaration = small_declaration(model=model, added_tokens=[added(0, "<unk>")])
    assert Tokenizer(declaration, source="made up").encode("axb") == [1, 0, 2]


def test_importing_the_package_does_not_load_the_library() -> None:
    # cases: P5
    code = (
        "import sys, smollm2.tokenizer, smollm2.template as t; t.ChatTemplate(t.SMOLLM2_TEMPLATE)"
    )
    check = "assert not {'tokenizers', 'jinja2'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True)


def test_ids_of_other_integer_types(tokenizer: Tokenizer) -> None:
    ids = np.array(tokenizer.encode("hello 2023"), dtype=np.int32)
    assert tokenizer.detokenize(ids) == "hello 2023"
