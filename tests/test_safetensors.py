"""Safetensors files: read and written, each compared with the ``safetensors`` package."""

from __future__ import annotations

import itertools
import json
import os
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from safetensors import numpy as reference, safe_open

from smollm2.errors import FormatError, InputError
from smollm2.formats.safetensors import open_safetensors, write_safetensors
from smollm2.formats.tensorfile import DENSE_DTYPES

Tensors = dict[str, NDArray[Any]]
SHAPES = [(), (1,), (0,), (3, 0, 2), (5,), (2, 3), (2, 1, 3, 2)]


def of_every_dtype_and_shape() -> Tensors:
    rng = np.random.default_rng(0)
    tensors: Tensors = {}
    for (kind, dtype), shape in itertools.product(DENSE_DTYPES.items(), SHAPES):
        values = rng.integers(0, 2 if kind == "BOOL" else 100, shape)
        tensors[f"{kind}.{'x'.join(map(str, shape))}"] = np.asarray(values).astype(dtype)
    return tensors


def read(path: Path) -> Tensors:
    file = open_safetensors(path)
    return {name: file.array(name) for name in file.entries}


def assert_same(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        assert got[name].tobytes() == array.tobytes()


def test_ours_reads_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = of_every_dtype_and_shape()
    reference.save_file(tensors, path, metadata={"format": "pt", "ü": "🦙\n"})
    assert_same(read(path), tensors)
    assert open_safetensors(path).metadata == {"format": "pt", "ü": "🦙\n"}
    assert open_safetensors(path).format == "safetensors"


def test_the_package_reads_what_ours_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = of_every_dtype_and_shape()
    write_safetensors(path, tensors, {"format": "pt", "ü": "🦙\n"})
    assert_same(reference.load_file(path), tensors)
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt", "ü": "🦙\n"}


# feature table: 145
def test_files_equal_the_packages_byte_for_byte(tmp_path: Path) -> None:
    """Where no two dtypes have one size: among those the package keeps an order of its own."""
    rng = np.random.default_rng(1)
    tensors: Tensors = {
        f'{name}.{kind}."\\\t\u007f\u00e9': rng.random((3, 2)).astype(DENSE_DTYPES[kind])
        for kind, name in itertools.product(("BF16", "F64", "F32", "U8"), ("b", "a", "B", "a.9"))
    }
    for metadata in (None, {}, {"format": "pt"}):
        reference.save_file(tensors, tmp_path / "theirs", metadata=metadata)
        write_safetensors(tmp_path / "ours", tensors, metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


# feature table: 145
def test_tensors_are_sorted_by_element_size_then_name_and_aligned(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors: Tensors = {
        "byte": np.ones(3, "u1"),
        "b": np.ones(3, "f4"),
        "half": np.ones(3, ml_dtypes.bfloat16),
        "a": np.ones(3, "f4"),
        "long": np.ones(1, "i8"),
    }
    for pad in range(8):
        write_safetensors(path, tensors, {"pad": "x" * pad})
        file = open_safetensors(path)
        assert list(file.entries) == ["long", "a", "b", "half", "byte"]
        starts = {entry.offset % file.array(name).itemsize for name, entry in file.entries.items()}
        assert starts == {0}
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_arrays_of_any_strides_and_byte_order_are_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    base = np.arange(24, dtype="f4").reshape(4, 6)
    tensors: Tensors = {
        "transposed": base.T,
        "strided": base[::2, ::-3],
        "broadcast": np.broadcast_to(np.float32(7), (2, 3)),
        "big_endian": base.astype(">f4"),
        "fortran": np.asfortranarray(base.astype(ml_dtypes.bfloat16)),
    }
    write_safetensors(path, tensors)
    for name, array in reference.load_file(path).items():
        np.testing.assert_array_equal(array, tensors[name])
    assert_same(read(path), reference.load_file(path))


@settings(max_examples=50)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=20).filter("__metadata__".__ne__),
        st.sampled_from(list(DENSE_DTYPES.values())).flatmap(
            lambda dtype: st.tuples(
                st.just(dtype),
                arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
            ).map(lambda made: np.ones(made[1], dtype=made[0]))
        ),
        max_size=6,
    ),
    metadata=st.none() | st.dictionaries(*[st.text(st.characters(codec="utf-8"))] * 2, max_size=3),
)
def test_round_trips(
    tmp_path_factory: pytest.TempPathFactory, tensors: Tensors, metadata: dict[str, str] | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.safetensors"
    write_safetensors(path, tensors, metadata)
    assert_same(read(path), tensors)
    assert_same(reference.load_file(path), tensors)
    assert open_safetensors(path).metadata == (metadata or {})


def test_arrays_are_read_only_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": np.ones(4, "f4")})
    file = open_safetensors(path)
    array = file.array("a")
    assert np.shares_memory(array, file.data)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2
    path.unlink()
    del file
    assert array.sum() == 4


def test_a_tensor_that_is_not_aligned_is_copied(tmp_path: Path) -> None:
    """A header of any length is allowed, and some writers do not pad it."""
    path = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert len(header) % 4
    path.write_bytes(len(header).to_bytes(8, "little") + header + np.float32([1, 2]).tobytes())
    array = open_safetensors(path).array("a")
    assert array.flags.aligned
    np.testing.assert_array_equal(array, reference.load_file(path)["a"])


class Lazy(Mapping[str, NDArray[Any]]):
    """Four tensors of 4 MB that exist only while someone holds them."""

    def __getitem__(self, name: str) -> NDArray[Any]:
        return np.full((1024, 1024), float(name), dtype=np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter("1234")

    def __len__(self) -> int:
        return 4


def test_no_more_than_one_tensor_is_held_while_writing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tracemalloc.start()
    write_safetensors(path, Lazy())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * 4 * 2**20
    assert {name: array[0, 0] for name, array in read(path).items()} == {
        "1": 1,
        "2": 2,
        "3": 3,
        "4": 4,
    }


class Shrinking(Lazy):
    """Tensors that are smaller each time they are asked for."""

    size = 10

    def __getitem__(self, name: str) -> NDArray[Any]:
        self.size -= 1
        return np.zeros(self.size)


# cases: W12
@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"a": np.zeros(2, "c8")}, None, "'a': safetensors has no dtype for complex64"),
        ({"a": np.zeros(2, "u2")}, None, "no dtype for uint16"),
        ({"a": np.array(["x"])}, None, "no dtype for <U1"),
        ({"a": np.array([None])}, None, "no dtype for object"),
        ({"__metadata__": np.zeros(2)}, None, "cannot be named __metadata__"),
        ({"\ud800": np.zeros(2)}, None, "not text"),
        ({}, {"a": 1}, "strings to strings"),
        ({}, {1: "a"}, "strings to strings"),
        (Shrinking(), None, "changed while it was written"),
    ],
)
def test_what_cannot_be_written_leaves_no_file(
    tmp_path: Path, tensors: Tensors, metadata: Any, message: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(InputError, match=message):
        write_safetensors(path, tensors, metadata)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_header_that_no_reader_takes_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(InputError, match="over the limit"):
        write_safetensors(path, {}, {"a": "x" * 100_000_000})
    assert not path.exists()


def test_a_model_of_no_tensors_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {})
    assert path.read_bytes() == (8).to_bytes(8, "little") + b"{}      "
    assert reference.load_file(path) == read(path) == {}


def test_a_quantized_kind_is_not_an_array(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": np.zeros(2)})
    entry = open_safetensors(path).entries["a"]
    assert (entry.kind, entry.shape, entry.nbytes, entry.is_dense) == ("F64", (2,), 16, True)
    header = {"a": {"dtype": "Q4_1", "shape": [32], "data_offsets": [0, 20]}}
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(20))
    with pytest.raises(FormatError, match="unknown dtype 'Q4_1'"):
        open_safetensors(path)
