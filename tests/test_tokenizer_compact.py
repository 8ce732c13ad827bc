"""The compact form of a tokenizer.json: the same ids, or an error, and never another tokenizer."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from smollm2.checkpoint import load_checkpoint
from smollm2.errors import FormatError
from smollm2.export import export_smol
from smollm2.formats.smol import SECTIONS, open_smol
from smollm2.tokenizer import COMPACT, Tokenizer, compact_form
from smollm2.tokenizer.compact import expand_form
from tests.cli_session import write_model
from tests.vocabulary import GOLDEN, added, golden_tokenizer, small_declaration

FILE = "tokenizer.json"


def raw_of(declaration: dict[str, Any]) -> bytes:
    return json.dumps(declaration).encode()


def form_of(declaration: dict[str, Any], **changes: Any) -> bytes:
    """A form that fits ``raw_of(declaration)`` and has these keys in its model."""
    form = json.loads(compact_form(raw_of(declaration)) or b"")
    form["declaration"]["model"].update(changes)
    return json.dumps(form).encode()


def test_the_golden_tokenizer_comes_back_whole(shared: Path) -> None:
    """cases: T1, T4"""
    raw = golden_tokenizer(shared).to_json().encode()
    form = compact_form(raw)
    assert form is not None
    declared, expanded = json.loads(raw), expand_form(form, raw, "x")
    declared["model"]["merges"] = tuple(map(tuple, declared["model"]["merges"]))
    assert expanded == declared
    assert list(expanded["model"]["vocab"]) == sorted(
        declared["model"]["vocab"], key=declared["model"]["vocab"].get
    )
    tokenizer = Tokenizer.from_files({FILE: raw, COMPACT: form}, "x")
    assert all(tokenizer.encode(case["text"]) == case["ids"] for case in GOLDEN)
    assert tokenizer.files()[FILE] == raw
    assert COMPACT not in tokenizer.files()


@given(
    letters=st.lists(
        st.text(st.characters(exclude_characters="\n ", exclude_categories=["Cs"]), min_size=1),
        min_size=2,
        max_size=8,
        unique=True,
    ),
    as_text=st.booleans(),
    data=st.data(),
)
def test_any_vocabulary_comes_back(letters: list[str], as_text: bool, data: st.DataObject) -> None:
    """cases: T6; whatever the style of the merges and the order of the file"""
    pair = data.draw(st.tuples(st.sampled_from(letters), st.sampled_from(letters)))
    tokens = [*letters, *({pair[0] + pair[1]} - {*letters})]
    order = data.draw(st.permutations(tokens))
    vocab = {token: tokens.index(token) for token in order}
    merges = [" ".join(pair) if as_text else list(pair)]
    declaration = {"model": {"type": "BPE", "vocab": vocab, "merges": merges, "x": None}, "y": [1]}
    raw = raw_of(declaration)
    form = compact_form(raw)
    assert form is not None
    model = {**declaration["model"], "merges": (pair,)}
    assert expand_form(form, raw, "x") == {**declaration, "model": model}


@pytest.mark.parametrize(
    "declaration",
    [
        {},
        {"model": None},
        {"model": {"vocab": {"a": 0}}},
        {"model": {"vocab": ["a"], "merges": []}},
        {"model": {"vocab": {"a": 0, "b": 2}, "merges": []}},
        {"model": {"vocab": {"a": 0, "b": 0}, "merges": []}},
        {"model": {"vocab": {"a": "0"}, "merges": []}},
        {"model": {"vocab": {"a": 0, "b": None}, "merges": []}},
        {"model": {"vocab": {"a\nb": 0}, "merges": []}},
        {"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b c"]}},
        {"model": {"vocab": {"a": 0, "b": 1}, "merges": [["a"]]}},
        {"model": {"vocab": {"a": 0, "b": 1}, "merges": [["a", "c"]]}},
        {"model": {"vocab": {"a": 0, "b": 1}, "merges": [["a", ["b"]]]}},
        {"model": {"vocab": {"a": 0, "b": 1}, "merges": [7]}},
        {"model": {"vocab": {"a": 0, "b": 1}, "merges": None}},
    ],
    ids=str,
)
def test_what_the_form_cannot_say_has_none(declaration: dict[str, Any]) -> None:
    assert compact_form(raw_of(declaration)) is None


def test_the_form_of_another_file_is_refused(tmp_path: Path) -> None:
    raw = raw_of(small_declaration())
    form = compact_form(raw)
    assert form is not None
    assert json.loads(form)["of"] == f"{zlib.crc32(raw):08x}"
    for other in (
        raw + b"\n",
        raw_of(small_declaration(added_tokens=[added(0, "<|end|>")])) + b" ",
    ):
        with pytest.raises(FormatError, match=rf"{COMPACT}: made of another tokenizer\.json"):
            Tokenizer.from_files({FILE: other, COMPACT: form}, tmp_path)
    with pytest.raises(FormatError, match="not JSON"):
        Tokenizer.from_files({FILE: raw, COMPACT: form[:-1]}, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab": None},
        {"vocab": {"a": 0}},
        {"vocab": "a\na"},
        {"vocab": "a"},
        {"merges": None},
        {"merges": [0]},
        {"merges": [0, -1]},
        {"merges": [0, 10**6]},
        {"merges": [0, "1"]},
        {"merges": [[0, 1]]},
        {"merges": "01"},
    ],
    ids=str,
)
def test_a_broken_form_is_one_line(change: dict[str, Any]) -> None:
    """cases: X3, X11"""
    declaration = small_declaration()
    raw = raw_of(declaration)
    with pytest.raises(FormatError, match="x: not the compact form") as caught:
        expand_form(form_of(declaration, **change), raw, "x")
    assert "\n" not in str(caught.value)
    form = json.loads(form_of(declaration))
    for broken in ({**form, "declaration": None}, {"of": form["of"]}):
        with pytest.raises(FormatError, match="x: not the compact form"):
            expand_form(json.dumps(broken).encode(), raw, "x")


def test_a_smol_file_has_it(tmp_path: Path) -> None:
    assert COMPACT in SECTIONS
    folder = write_model(tmp_path / "model")
    checkpoint = load_checkpoint(folder)
    export_smol(checkpoint, tmp_path / "x.smol")
    sections = open_smol(tmp_path / "x.smol").metadata
    assert sections[COMPACT] == compact_form((folder / FILE).read_bytes())
    tokenizer = load_checkpoint(tmp_path / "x.smol").tokenizer
    assert checkpoint.tokenizer is not None
    assert tokenizer is not None
    assert tokenizer.encode("these things") == checkpoint.tokenizer.encode("these things")
    assert tokenizer.files() == checkpoint.tokenizer.files()


def test_a_tokenizer_without_the_form_is_exported_without_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    declaration = json.loads((folder / FILE).read_text(encoding="utf-8"))
    del declaration["model"]["vocab"]["\u0100"]  # leaves a hole in the ids
    (folder / FILE).write_text(json.dumps(declaration), encoding="utf-8")
    export_smol(load_checkpoint(folder), tmp_path / "x.smol")
    assert COMPACT not in open_smol(tmp_path / "x.smol").metadata
    tokenizer = load_checkpoint(tmp_path / "x.smol").tokenizer
    assert tokenizer is not None
    assert tokenizer.files()[FILE] == (folder / FILE).read_bytes()
