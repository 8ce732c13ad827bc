"""NameMapping: rules, ambiguity, collision and duplicates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from smollm2.errors import CheckpointError, InputError
from smollm2.state import NameMapping


def test_rules() -> None:
    """Row 142."""
    mapping = NameMapping(
        rename={"wte": "embed.weight"},
        rewrite={"x.{a}.y.{b}": "z.{b}.y.{a}", "h.{i}.w": "layers.{i}.weight"},
        ignore_suffix=("inv_freq", "rotary.bias"),
    )
    names = [
        "wte",
        "x.1.y.k",
        "h.10.w",
        "h.1.2.w",
        "xx.1.y.k",
        "h.0.rope.inv_freq",
        "my_inv_freq",
        "inv_freq",
        "a.rotary.bias",
    ]
    assert mapping.apply(names) == {
        "wte": "embed.weight",
        "x.1.y.k": "z.k.y.1",
        "h.10.w": "layers.10.weight",
        "h.1.2.w": "h.1.2.w",
        "xx.1.y.k": "xx.1.y.k",
        "h.0.rope.inv_freq": None,
        "my_inv_freq": "my_inv_freq",
        "inv_freq": None,
        "a.rotary.bias": None,
    }


@given(st.lists(st.text(min_size=1), unique=True))
def test_without_rules_names_stay(names: list[str]) -> None:
    assert NameMapping().apply(names) == {name: name for name in names}


@given(st.from_regex(r"[^.]+", fullmatch=True), st.from_regex(r"[^.]+", fullmatch=True))
def test_rewriting_back_is_identity(first: str, second: str) -> None:
    there = NameMapping(rewrite={"a.{x}.b.{y}": "c.{y}.{x}"})
    back = NameMapping(rewrite={"c.{y}.{x}": "a.{x}.b.{y}"})
    name = f"a.{first}.b.{second}"
    (mapped,) = there.apply([name]).values()
    assert mapped == f"c.{second}.{first}"
    assert back.apply([mapped]) == {mapped: name}


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        ({"rename": {"a.b": "c"}, "rewrite": {"a.{x}": "d.{x}"}}, "a.b"),
        ({"rewrite": {"a.{x}": "c.{x}", "{x}.b": "d.{x}"}}, "a.b"),
        ({"rename": {"a.b": "c"}, "ignore_suffix": ("b",)}, "a.b"),
        ({"ignore_suffix": ("c", "b.c")}, "a.b.c"),
    ],
)
def test_a_name_that_two_rules_match_is_an_error(rules: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}' matches two mapping rules"):
        NameMapping(**rules).apply([name])


@pytest.mark.parametrize(
    "mapping",
    [
        NameMapping(rename={"a": "b"}),
        NameMapping(rewrite={"a": "b"}),
        NameMapping(rename={"a": "c", "b": "c"}),
    ],
)
def test_two_names_with_one_target_are_an_error(mapping: NameMapping) -> None:
    with pytest.raises(CheckpointError, match=r"'a' and 'b' are both mapped to '[bc]'"):
        mapping.apply(["a", "b"])


def test_swapping_is_no_collision() -> None:
    assert NameMapping(rename={"a": "b", "b": "a"}).apply(["a", "b"]) == {"a": "b", "b": "a"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"rename": {"a": ""}}, "empty segment"),
        ({"rename": {"a..b": "c"}}, "empty segment"),
        ({"ignore_suffix": ("",)}, "empty segment"),
        ({"ignore_suffix": ("a", "a")}, "twice"),
        ({"rewrite": {"a.{x}": "b"}}, "once on each side"),
        ({"rewrite": {"a.b": "b.{x}"}}, "once on each side"),
        ({"rewrite": {"a.{x}.{x}": "b.{x}.{x}"}}, "once on each side"),
        ({"rewrite": {"a.{x}": "b.{x}.{x}"}}, "once on each side"),
        ({"rewrite": {"a.pre{x}": "b.{x}"}}, "whole segment"),
        ({"rewrite": {"a.{}": "b.{}"}}, "whole segment"),
        ({"rewrite": {"a.{x": "b.{x"}}, "whole segment"),
        ({"rewrite": {"a..{x}": "b.{x}"}}, "must not be empty"),
        ({"rewrite": {"a.{x}": "b.{x}", "a.{y}": "c.{y}"}}, "same pattern"),
    ],
)
def test_malformed_rules(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        NameMapping(**rules)
