"""Ids one at a time → text: held to detokenizing them all, and to the library."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from smollm2.errors import InputError
from smollm2.tokenizer import Tokenizer
from smollm2.tokenizer.stream_decoder import StreamDecoder
from tests.vocabulary import (
    added,
    golden_library,
    golden_tokenizer,
    small_declaration,
    unhurried,
)

any_ids = st.lists(st.integers(0, 49151), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(shared: Path) -> Tokenizer:
    return golden_tokenizer(shared)


def streamed(decoder: StreamDecoder, ids: Iterable[int]) -> list[str]:
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@functools.cache
def broken_ids(shared: Path) -> list[int]:
    """Ids whose bytes are not whole characters."""
    tokenizer = golden_tokenizer(shared)
    broken = []
    for token_id in range(tokenizer.vocab_size):
        try:
            tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            broken.append(token_id)
    return broken


@unhurried
@given(ids=any_ids, skip=st.booleans())
def test_pieces_together_are_the_whole_text(shared: Path, ids: list[int], skip: bool) -> None:
    # cases: S10, table 31
    tokenizer = golden_tokenizer(shared)
    whole = tokenizer.detokenize(ids, skip_special=skip)
    assert "".join(streamed(tokenizer.stream_decoder(skip_special=skip), ids)) == whole
    assert whole == golden_library(shared).decode(ids, skip_special_tokens=skip)


@unhurried
@given(data=st.data(), skip=st.booleans())
def test_also_of_tokens_that_are_not_characters(
    shared: Path, data: st.DataObject, skip: bool
) -> None:
    # cases: S8, S10, T11
    broken = broken_ids(shared)
    ids = data.draw(st.lists(st.sampled_from([*broken, 0, 2, 81]), max_size=30))
    tokenizer = golden_tokenizer(shared)
    whole = golden_library(shared).decode(ids, skip_special_tokens=skip)
    assert tokenizer.detokenize(ids, skip_special=skip) == whole
    assert "".join(streamed(tokenizer.stream_decoder(skip_special=skip), ids)) == whole


def test_313_tokens_are_not_characters(shared: Path) -> None:
    # cases: T11, T12
    broken = broken_ids(shared)
    tokenizer = golden_tokenizer(shared)
    assert len(broken) == 313
    assert sum(tokenizer.token_bytes(i).startswith(b" ") for i in broken) == 37


def test_every_token_as_the_library_writes_it(shared: Path) -> None:
    # cases: T12, T16
    tokenizer, library = golden_tokenizer(shared), golden_library(shared)
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        assert text == library.decode([token_id], skip_special_tokens=False)


def test_the_missing_bytes(tokenizer: Tokenizer) -> None:
    # cases: section 0, "missing bytes"
    single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    missing = [byte for byte in range(256) if bytes([byte]) not in single]
    assert bytes(missing).hex() == "0406131416" + "1dc0c1f1f2" + "f5f6f7f8f9fafbfcfdfeff"


def test_a_character_appears_when_it_is_whole(tokenizer: Tokenizer) -> None:
    # cases: S8
    assert streamed(tokenizer.stream_decoder(), [10813, 116, 243]) == ["", "", "🦙", ""]


def test_what_is_complete_is_not_held_back(tokenizer: Tokenizer) -> None:
    # A token that ends in the middle of a character still shows what stands before it.
    ids = tokenizer.encode("a 🦙")
    pieces = streamed(tokenizer.stream_decoder(), ids)
    assert pieces[:2] == ["a", " "]
    assert "".join(pieces) == "a 🦙"


def test_an_unfinished_character_is_flushed(tokenizer: Tokenizer) -> None:
    # cases: S6
    decoder = tokenizer.stream_decoder()
    assert streamed(decoder, [81, 10813]) == ["a", "", "�"]
    assert streamed(decoder, [81]) == ["a", ""]  # ready for another text


def test_special_tokens_are_hidden_unless_asked_for(tokenizer: Tokenizer) -> None:
    # cases: S3, table 51
    ids = [81, 2, 82]
    assert tokenizer.detokenize(ids) == "ab"
    assert tokenizer.detokenize(ids, skip_special=False) == "a<|im_end|>b"
    assert streamed(tokenizer.stream_decoder(), ids) == ["a", "", "b", ""]
    shown = tokenizer.stream_decoder(skip_special=False)
    assert streamed(shown, ids) == ["a", "<|im_end|>", "b", ""]


def test_a_hidden_token_does_not_end_a_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.detokenize([10813, 116, 2, 243]) == "🦙"
    assert streamed(tokenizer.stream_decoder(), [10813, 116, 2, 243])[-2] == "🦙"


@pytest.mark.parametrize("token_id", [-1, 49152, 2**40, 1.0, "a", None])
def test_ids_outside_the_vocabulary(tokenizer: Tokenizer, token_id: int) -> None:
    tokenizer.token_bytes(1)
    for read in (
        lambda: tokenizer.detokenize([81, token_id]),
        lambda: tokenizer.token_bytes(token_id),
        lambda: tokenizer.stream_decoder().push(token_id),
    ):
        with pytest.raises(InputError, match="not in the vocabulary"):
            read()


def test_a_refused_id_leaves_the_text_as_it_was(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.stream_decoder()
    decoder.push(10813)
    with pytest.raises(InputError):
        decoder.push(-1)
    assert decoder.push(116) + decoder.push(243) == "🦙"


def test_ids_that_no_token_has_are_empty() -> None:
    declaration = small_declaration()
    del declaration["model"]["vocab"]["z"]
    tokenizer = Tokenizer(declaration, source="made up")
    gap = small_declaration()["model"]["vocab"]["z"]
    assert tokenizer.token_bytes(gap) == b""
    assert tokenizer.detokenize([gap, gap + 1]) == "{"


def test_added_tokens_outside_the_byte_alphabet_are_written_as_they_are() -> None:
    count = len(small_declaration()["model"]["vocab"])
    tokens = [added(0, "<|end|>"), added(count, "<a b>"), added(count + 1, "日本")]
    tokenizer = Tokenizer(small_declaration(added_tokens=tokens), source="made up")
    assert tokenizer.token_bytes(count) == b"<a b>"
    assert tokenizer.token_bytes(count + 1) == "日本".encode()


def test_numpy_ids(tokenizer: Tokenizer) -> None:
    ids = np.array([10813, 116, 243], dtype=np.int64)
    assert "".join(streamed(tokenizer.stream_decoder(), ids)) == "🦙"
