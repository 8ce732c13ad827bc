"""The writer of GGUF files: what the gguf package and our own reader find in them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from smollm2.errors import FormatError, InputError
from smollm2.formats import gguf_writer
from smollm2.formats.gguf import GGML_TYPES, GROUPS, open_gguf
from smollm2.formats.gguf_writer import GgufTensor, write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.text": "naïve 🦙",
    "a.yes": True,
    "a.no": False,
    "a.count": 2**32 - 1,
    "a.number": 0.5,
    "a.texts": ["x", "", "ü"],
    "a.empty": [],
    "a.types": np.array([1, 3, 4], dtype=np.int32),
    "a.scores": np.array([0.5, -1], dtype=np.float32),
}


def arrays() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.standard_normal((3, 5), dtype=np.float32),
        "b.weight": rng.standard_normal(7, dtype=np.float32).astype(np.float16),
        "c.weight": rng.standard_normal((2, 3, 4), dtype=np.float32).astype(ml_dtypes.bfloat16),
        "d.weight": rng.standard_normal((4, 64), dtype=np.float32),
    }


KINDS = {"a.weight": "F32", "b.weight": "F16", "c.weight": "BF16", "d.weight": "Q8_0"}


def stored(name: str, array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a tensor, by the gguf package where it is quantized."""
    if KINDS[name] in GROUPS:
        kind = gguf.GGMLQuantizationType[KINDS[name]]
        return np.asarray(gguf.quants.quantize(array, kind)).reshape(-1)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def write(path: Path, metadata: dict[str, Any] = METADATA) -> dict[str, NDArray[np.uint8]]:
    tensors = arrays()
    raw = {name: stored(name, array) for name, array in tensors.items()}
    specs = [GgufTensor(name, KINDS[name], array.shape) for name, array in tensors.items()]

    def pieces(tensor: GgufTensor) -> Iterator[NDArray[np.uint8]]:
        half = len(raw[tensor.name]) // 2
        yield raw[tensor.name][:half]
        yield raw[tensor.name][half:]

    write_gguf(path, metadata, specs, pieces)
    return raw


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    raw = write(tmp_path / "x.gguf")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert reader.fields["GGUF.version"].contents() == 3
    for key, value in METADATA.items():
        found = reader.fields[key].contents()
        assert found == (value.tolist() if isinstance(value, np.ndarray) else value), key
    types = {key: reader.fields[key].types for key in METADATA}
    of = gguf.GGUFValueType
    assert types["a.count"] == [of.UINT32]
    assert types["a.number"] == [of.FLOAT32]
    assert types["a.yes"] == [of.BOOL]
    assert types["a.types"] == [of.ARRAY, of.INT32]
    assert types["a.texts"][:2] == [of.ARRAY, of.STRING]
    assert [tensor.name for tensor in reader.tensors] == list(KINDS)
    for tensor in reader.tensors:
        assert tensor.tensor_type.name == KINDS[tensor.name]
        assert tuple(map(int, tensor.shape)) == arrays()[tensor.name].shape[::-1]
        assert tensor.data_offset % 32 == 0
        assert np.array_equal(np.asarray(tensor.data).reshape(-1).view(np.uint8), raw[tensor.name])


def test_our_reader_reads_it(tmp_path: Path) -> None:
    raw = write(tmp_path / "x.gguf")
    file = open_gguf(tmp_path / "x.gguf")
    assert list(file.metadata) == list(METADATA)
    for key, value in METADATA.items():
        assert np.array_equal(file.metadata[key], value), key
    for name, array in arrays().items():
        assert file.entries[name].shape == array.shape
        assert file.entries[name].kind == KINDS[name]
        assert np.array_equal(file.raw(name), raw[name])
    assert len(file.data) % 32 == 0


def test_the_same_bytes_as_the_gguf_package(tmp_path: Path) -> None:
    """Header, order, padding: nothing is ours alone."""
    write(tmp_path / "ours.gguf")
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_string("a.text", METADATA["a.text"])
    writer.add_bool("a.yes", True)
    writer.add_bool("a.no", False)
    writer.add_uint32("a.count", METADATA["a.count"])
    writer.add_float32("a.number", 0.5)
    writer.add_array("a.texts", METADATA["a.texts"])
    writer.add_array("a.types", METADATA["a.types"].tolist())
    writer.add_array("a.scores", METADATA["a.scores"].tolist())
    for name, array in arrays().items():
        kind = gguf.GGMLQuantizationType[KINDS[name]]
        raw = stored(name, array)
        if KINDS[name] in ("F32", "F16"):
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, raw.reshape(*array.shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    without_empty = {key: value for key, value in METADATA.items() if key != "a.empty"}
    write(tmp_path / "ours.gguf", without_empty)
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    metadata=st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda key: key != "general.alignment"),
        st.one_of(
            st.text(max_size=50),
            st.booleans(),
            st.integers(0, 2**32 - 1),
            st.floats(width=32, allow_nan=False),
            st.lists(st.text(max_size=10), max_size=5),
        ),
        max_size=6,
    ),
    sizes=st.lists(st.integers(1, 40), max_size=5),
)
def test_any_metadata_and_sizes(tmp_path: Path, metadata: dict[str, Any], sizes: list[int]) -> None:
    tensors = [GgufTensor(f"t{i}", "F32", (size,)) for i, size in enumerate(sizes)]
    write_gguf(
        tmp_path / "x.gguf",
        metadata,
        tensors,
        lambda tensor: [np.full(tensor.nbytes, len(tensor.name), dtype=np.uint8)],
    )
    file = open_gguf(tmp_path / "x.gguf")
    assert dict(file.metadata) == metadata
    assert [entry.shape for entry in file.entries.values()] == [(size,) for size in sizes]


def zeros(tensor: GgufTensor) -> list[NDArray[np.uint8]]:
    return [np.zeros(tensor.nbytes, dtype=np.uint8)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1, "-1"),
        (2**32, "4294967296"),
        (None, "None"),
        ([1, 2], r"\[1, 2\]"),
        (np.zeros((2, 2), dtype=np.float32), "array"),
        (np.zeros(2, dtype=np.complex64), "array"),
        ({"a": 1}, "a"),
    ],
)
def test_metadata_that_gguf_does_not_hold(tmp_path: Path, value: Any, text: str) -> None:
    with pytest.raises(InputError, match=f"metadata 'k' cannot be .*{text}"):
        write_gguf(tmp_path / "x.gguf", {"k": value}, [], zeros)
    with pytest.raises(InputError, match="is not text"):
        write_gguf(tmp_path / "x.gguf", {"k": "\ud800"}, [], zeros)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (GgufTensor("", "F32", (1,)), "has a name that is not of 1 to 63 bytes"),
        (GgufTensor("ü" * 32, "F32", (1,)), "has a name that is not of 1 to 63 bytes"),
        (GgufTensor("a", "I9", (1,)), "has the unknown kind 'I9'"),
        (GgufTensor("a", "IQ1_S", (256,)), "has the unknown kind 'IQ1_S'"),
        (GgufTensor("a", "F32", ()), r"has the shape \[\]"),
        (GgufTensor("a", "F32", (2, 0)), r"has the shape \[2, 0\]"),
        (GgufTensor("a", "F32", (1,) * 5), "must have 1 to 4 sizes"),
        (GgufTensor("a", "Q4_0", (2, 48)), "has rows of 48, but Q4_0 needs a multiple of 32"),
    ],
)
def test_tensors_that_gguf_does_not_hold(tmp_path: Path, tensor: GgufTensor, text: str) -> None:
    with pytest.raises(InputError, match=text):
        write_gguf(tmp_path / "x.gguf", {}, [tensor], zeros)
    assert not list(tmp_path.iterdir())


def test_a_tensor_twice_and_of_other_bytes(tmp_path: Path) -> None:
    tensor = GgufTensor("a", "F32", (2,))
    with pytest.raises(InputError, match="'a' is given twice"):
        write_gguf(tmp_path / "x.gguf", {}, [tensor, tensor], zeros)
    with pytest.raises(InputError, match="'a' needs 8 bytes: got 7"):
        write_gguf(tmp_path / "x.gguf", {}, [tensor], lambda _: [np.zeros(7, dtype=np.uint8)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("find", "said"),
    [(b"ve \xf0", "the header reads otherwise"), (None, "'d.weight' reads otherwise")],
    ids=["header", "tensors"],
)
def test_a_broken_disk_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: bytes | None, said: str
) -> None:
    """What is read back is compared with what was written; an old file stays."""
    write(tmp_path / "x.gguf")
    before = (tmp_path / "x.gguf").read_bytes()

    def damaged(path: Path) -> Any:
        raw = bytearray(path.read_bytes())
        raw[raw.index(find) if find else len(raw) - 50] ^= 1
        path.write_bytes(raw)
        return open_gguf(path)

    monkeypatch.setattr(gguf_writer, "open_gguf", damaged)
    with pytest.raises(FormatError, match=rf"/x\.gguf: .*{said} than it was w"):
        write(tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_one_piece_is_held_at_a_time(tmp_path: Path) -> None:
    tensors = [GgufTensor(f"t{i}", "F32", (4, 2**18)) for i in range(3)]

    def pieces(tensor: GgufTensor) -> Iterator[NDArray[np.uint8]]:
        for _ in range(4):
            yield np.ones(2**20, dtype=np.uint8)

    tracemalloc.start()
    write_gguf(tmp_path / "x.gguf", {}, tensors, pieces)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * 2**20


def test_every_kind_of_the_reader_can_be_written(tmp_path: Path) -> None:
    kinds = [kind for kind in GGML_TYPES.values() if kind in GROUPS] + ["F64", "F32"]
    tensors = [GgufTensor(kind, kind, (2, 256)) for kind in kinds]
    write_gguf(tmp_path / "x.gguf", {}, tensors, zeros)
    assert {name: entry.kind for name, entry in open_gguf(tmp_path / "x.gguf").entries.items()} == {
        kind: kind for kind in kinds
    }
