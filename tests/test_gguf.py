"""GGUF files that are well-formed, compared with what the ``gguf`` package wrote or reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from smollm2.errors import FormatError
from smollm2.formats.gguf import GGML_TYPES, GROUPS, open_gguf

ARRAYS: dict[str, Any] = {
    "strings": ["", "Ġhello", "🦙", "\n", "a" * 1000],
    "bools": [True, False],
    "ints": [1, -2, 3],
    "floats": [0.5, -1.0],
}
SCALARS: dict[str, Any] = {
    "add_uint8": 200,
    "add_int8": -100,
    "add_uint16": 60000,
    "add_int16": -30000,
    "add_uint32": 4_000_000_000,
    "add_int32": -2_000_000_000,
    "add_uint64": 2**63,
    "add_int64": -(2**63),
    "add_float32": 0.5,
    "add_float64": 0.1,
    "add_bool": True,
    "add_string": "naïve 🦙",
}


def write(path: Path, kinds: dict[str, tuple[str, tuple[int, ...]]], alignment: int = 32) -> Any:
    """A file of random tensors, name → kind and shape; the bytes of each."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for add, value in SCALARS.items():
        getattr(writer, add)(f"test.{add}", value)
    for name, values in ARRAYS.items():
        writer.add_array(f"test.{name}", values)
    stored = {}
    for name, (kind, shape) in kinds.items():
        number = gguf.GGMLQuantizationType[kind]
        values, nbytes = gguf.GGML_QUANT_SIZES[number]
        rows = (*shape[:-1], shape[-1] // values * nbytes)
        stored[name] = rng.integers(0, 256, rows, dtype=np.uint8)
        writer.add_tensor(name, stored[name], raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def equal(ours: Any, theirs: Any) -> bool:
    return bool(np.array_equal(ours, theirs))


def test_every_type_of_metadata_is_read(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", {})
    metadata = open_gguf(tmp_path / "model.gguf").metadata
    assert metadata["general.architecture"] == "llama"
    for add, value in SCALARS.items():
        assert type(metadata[f"test.{add}"]) is type(value)
        assert metadata[f"test.{add}"] == value
    assert metadata["test.strings"] == ARRAYS["strings"]
    for name in ("bools", "ints", "floats"):
        assert isinstance(metadata[f"test.{name}"], np.ndarray)
        assert metadata[f"test.{name}"].tolist() == ARRAYS[name]
    assert metadata["test.bools"].dtype == np.bool_
    assert metadata["test.ints"].dtype == np.int32
    assert metadata["test.floats"].dtype == np.float32


@pytest.mark.parametrize("alignment", [8, 32, 1024])
def test_every_supported_kind_is_read(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "model.gguf"
    kinds = {
        **{kind: (kind, (3, 512)) for kind in ("F32", "F16", "BF16", "F64", *GROUPS)},
        "vector": ("F32", (5,)),
        "cube": ("Q8_0", (2, 3, 64)),
        "four": ("F16", (2, 1, 3, 7)),
    }
    stored = write(path, kinds, alignment)
    file = open_gguf(path)
    assert file.format == "gguf"
    assert list(file.entries) == list(kinds)
    for name, (kind, shape) in kinds.items():
        entry = file.entries[name]
        assert (entry.kind, entry.shape) == (kind, shape)
        assert entry.is_dense == (kind not in GROUPS)
        assert equal(file.raw(name), stored[name].reshape(-1))
        if entry.is_dense:
            assert file.array(name).shape == shape
            assert file.array(name).tobytes() == stored[name].tobytes()
        else:
            with pytest.raises(FormatError, match=f"'{name}' is {kind}, not a dense array"):
                file.array(name)


def test_the_tables_of_types_are_ggmls() -> None:
    theirs = {number.value: number.name for number in gguf.GGMLQuantizationType}
    assert {number: theirs.get(number) for number in GGML_TYPES} == dict(GGML_TYPES)
    for kind, sizes in GROUPS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == sizes


def test_version_2_is_read_as_version_3(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    stored = write(path, {"a": ("Q4_0", (2, 32))})
    raw = bytearray(path.read_bytes())
    raw[4] = 2
    path.write_bytes(raw)
    assert equal(open_gguf(path).raw("a"), stored["a"].reshape(-1))


def test_a_file_of_metadata_alone_may_end_before_the_padding(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    write(path, {})
    raw = path.read_bytes()
    end = raw.rindex(np.float32(ARRAYS["floats"]).tobytes()) + 8
    path.write_bytes(raw[:end])
    file = open_gguf(path)
    assert not file.entries
    assert file.metadata["test.floats"].tolist() == ARRAYS["floats"]


# cases: W14
def test_a_vocabulary_opens_fast_and_only_what_is_used_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    tokens = [f"token {number}" for number in range(49152)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.5] * len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        metadata = open_gguf(path).metadata
        seconds.append(time.perf_counter() - start)
    assert metadata["tokenizer.ggml.tokens"] == tokens
    assert metadata["tokenizer.ggml.scores"].shape == (49152,)
    assert min(seconds) < 0.1


@pytest.mark.weights
def test_the_real_file_opens_in_a_moment(real_gguf: Path) -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        open_gguf(real_gguf)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.15


@pytest.mark.weights
def test_the_real_file_equals_what_the_package_reads(real_gguf: Path) -> None:
    ours, theirs = open_gguf(real_gguf), gguf.GGUFReader(real_gguf)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for name, field in fields.items():
        assert equal(ours.metadata[name], field.contents()), name
    assert len(ours.entries) == len(theirs.tensors) == 272
    for tensor in theirs.tensors:
        entry = ours.entries[tensor.name]
        assert entry.kind == tensor.tensor_type.name
        assert entry.shape == tuple(tensor.shape.tolist())[::-1]
        assert entry.offset == tensor.data_offset
        assert equal(ours.raw(tensor.name), tensor.data.reshape(-1).view(np.uint8))


# cases: W11
@pytest.mark.weights
def test_the_real_file_cut_short_is_refused_by_name(real_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with real_gguf.open("rb") as file:
        path.write_bytes(file.read(50_000_000))
    with pytest.raises(FormatError, match=r"cut\.gguf: tensor 'blk\.\d+\..*' ends at byte"):
        open_gguf(path)
