"""State: names, sharing, saving and loading, and the report of a load."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from smollm2.errors import CheckpointError, FormatError, InputError
from smollm2.quantize import Quantized
from smollm2.state import LoadReport, Mismatch, State, TensorSpec
from tests.tiny import BFLOAT16, random_weights, tiny_config


def ramp(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def quantized(rows: int = 4) -> tuple[Quantized, np.ndarray]:
    """A Q8_0 weight and its values, made by the gguf package."""
    values = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q8_0)
    return Quantized("Q8_0", (rows, 64), data), expected


def test_is_a_mapping_in_order_with_a_descriptor() -> None:
    """Row 143."""
    weight, _ = quantized()
    state = State({"b.weight": ramp(2, 3), "a": weight, "c": ramp(2).astype(BFLOAT16)})
    assert list(state) == ["b.weight", "a", "c"]
    assert state.descriptor == (
        TensorSpec("b.weight", (2, 3), "F32"),
        TensorSpec("a", (4, 64), "Q8_0"),
        TensorSpec("c", (2,), "BF16"),
    )
    assert state["a"] is weight
    assert "d" not in state
    assert len(State()) == 0


def test_one_tensor_under_two_names_is_listed_once() -> None:
    """Rows 109, 144: under its first name, whether it is the same object or the same memory."""
    head, (weight, _) = ramp(4, 2), quantized()
    state = State(
        [
            ("embed", head),
            ("lm_head", head),
            ("view", head[:]),
            ("part", head[:2]),
            ("turned", head.T),
            ("equal", head.copy()),
            ("q", weight),
            ("q2", Quantized(weight.kind, weight.shape, weight.data)),
            ("empty", ramp(0)),
            ("empty2", ramp(0)),
        ]
    )
    assert list(state) == ["embed", "part", "turned", "equal", "q", "empty", "empty2"]


@pytest.mark.parametrize("name", ["", ".", "a.", ".a", "a..b"])
def test_empty_segments_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="has an empty segment"):
        State({name: ramp(1)})


def test_a_name_twice_is_refused_even_for_one_tensor() -> None:
    array = ramp(1)
    with pytest.raises(CheckpointError, match="two tensors are named 'a'"):
        State([("a", array), ("a", array)])


def test_an_array_that_no_file_holds_is_refused() -> None:
    with pytest.raises(InputError, match="complex128"):
        State({"a": np.zeros(2, dtype=complex)})


def test_save_and_load_are_equal(tmp_path: Path) -> None:
    """Row 145, read back by the safetensors package too."""
    weights = random_weights(tiny_config(), dtype=BFLOAT16)
    state = State(weights.items())
    path = tmp_path / "model.safetensors"
    state.save(path)
    again, theirs = State.load(path), load_file(path)
    assert set(again) == set(theirs) == set(state)
    for name, weight in weights.items():
        for other in (again[name], theirs[name]):
            assert other.dtype == BFLOAT16
            assert np.array_equal(other.view(np.uint16), weight.view(np.uint16))
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


@settings(deadline=None, max_examples=25)
@given(
    st.dictionaries(
        st.from_regex(r"[a-zé0-9_]+(\.[a-z0-9]+)*", fullmatch=True),
        st.tuples(
            st.sampled_from(["<f4", "<f2", "<i8", "?"]), st.lists(st.integers(0, 3), max_size=3)
        ),
        max_size=5,
    )
)
def test_any_state_round_trips(
    tmp_path_factory: pytest.TempPathFactory, specs: dict[str, tuple[str, list[int]]]
) -> None:
    arrays = {name: ramp(*shape).astype(dtype) for name, (dtype, shape) in specs.items()}
    path = tmp_path_factory.mktemp("state") / "a.safetensors"
    State(arrays).save(path)
    again = State.load(path)
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(again[name], array)
        assert again[name].dtype == array.dtype
        assert again[name].shape == array.shape


def test_loaded_weights_are_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    State({"a": ramp(8, 8)}).save(path)
    weight = State.load(path)["a"]
    assert not weight.flags.owndata
    assert not weight.flags.writeable


def test_quantized_weights_are_dequantized_before_they_are_saved(tmp_path: Path) -> None:
    weight, expected = quantized()
    state = State({"norm": ramp(4), "q": weight})
    path = tmp_path / "a.safetensors"
    with pytest.raises(InputError, match=r"'q' is Q8_0, which safetensors cannot hold: dequantize"):
        state.save(path)
    assert not path.exists()
    dense = state.dequantize()
    dense.save(path)
    assert np.array_equal(load_file(path)["q"], expected)
    assert dense["norm"] is state["norm"]
    half = state.dequantize("bfloat16")
    assert [spec.kind for spec in half.descriptor] == ["BF16", "BF16"]
    assert np.array_equal(half["q"], expected.astype(BFLOAT16))
    with pytest.raises(InputError, match="dtype is 'int8'"):
        state.dequantize("int8")


def test_a_broken_file_is_a_format_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"{}")
    with pytest.raises(FormatError, match=re.escape(str(path))):
        State.load(path)


FAULTY = LoadReport(
    loaded=("a", "f"),
    ignored=("i",),
    missing=("b", "c"),
    unexpected=("d",),
    shape_mismatches=(Mismatch("e", (2, 3), (3, 2)),),
    dtype_mismatches=(Mismatch("f", "BF16", "F32"),),
)


def test_report_lists_everything_in_one_error() -> None:
    """Rows 139, 141."""
    text = (
        "missing: b, c; unexpected: d; "
        "shape mismatches: e (expected [2, 3], got [3, 2]); "
        "dtype mismatches: f (expected BF16, got F32)"
    )
    assert FAULTY.summary() == text
    with pytest.raises(CheckpointError, match=f"^{re.escape(text)}$"):
        FAULTY.raise_if_strict()
    with pytest.raises(CheckpointError, match=r"^missing: b, c; shape mismatches: [^;]*$"):
        FAULTY.raise_if_unusable()


def test_report_without_faults_raises_nothing() -> None:
    report = LoadReport(loaded=("a",), ignored=("b",))
    assert report.summary() == ""
    report.raise_if_strict()
    other_float = FAULTY.dtype_mismatches
    LoadReport(loaded=("f",), unexpected=("a",), dtype_mismatches=other_float).raise_if_unusable()
    with pytest.raises(CheckpointError, match=r"^dtype mismatches: f "):
        LoadReport(dtype_mismatches=other_float).raise_if_unusable()


def test_a_summary_is_one_short_line_whatever_the_names() -> None:
    mismatch = Mismatch("a\nb", "F32", "I32")
    report = LoadReport(unexpected=("a\nb", "x" * 10_000), dtype_mismatches=(mismatch,))
    assert report.summary().isprintable()
    assert len(report.summary()) < 400


def test_long_lists_are_cut() -> None:
    report = LoadReport(missing=tuple(f"t{i}" for i in range(1000)))
    assert report.summary().endswith("t18, t19 and 980 more")
    assert LoadReport(missing=("a",) * 20).summary().endswith(", a")
