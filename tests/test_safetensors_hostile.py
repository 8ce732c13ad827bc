"""Safetensors files from a stranger: one file a fault, then mutations and noise."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from safetensors import SafetensorError, numpy as reference

from smollm2.errors import FormatError
from smollm2.formats.safetensors import open_safetensors, write_safetensors
from smollm2.formats.tensorfile import TensorFile

VALID_ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
VALID_HEADER = f'{{"a":{VALID_ENTRY}}}'
MORE = 8  # bytes of data that a valid header describes


def packed(header: str | bytes, data: int = MORE, size: int | None = None) -> bytes:
    """A file of this header, ``data`` bytes of tensors, and a length field that may lie."""
    raw = header.encode() if isinstance(header, str) else header
    return (len(raw) if size is None else size).to_bytes(8, "little") + raw + bytes(data)


def entry(**changes: Any) -> bytes:
    value: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    value.update(changes)
    return packed(json.dumps({"a": {key: item for key, item in value.items() if item is not ...}}))


def entries(*spans: tuple[int, int], data: int) -> bytes:
    """Tensors of bytes at these offsets."""
    header = {
        f"t{index}": {"dtype": "U8", "shape": [max(0, end - start)], "data_offsets": [start, end]}
        for index, (start, end) in enumerate(spans)
    }
    return packed(json.dumps(header), data)


HOSTILE = {
    "empty file": (b"", "the file is empty"),
    "no room for the length": (b"\x01\x02\x03", "does not fit a file of 3 bytes"),
    "no header": ((0).to_bytes(8, "little"), "does not start with '{'"),
    "header past the end": (packed(VALID_HEADER, 0, size=10**6), "does not fit"),
    "header of 2^63": (packed(VALID_HEADER, size=2**63), "does not fit"),
    "header of 2^64 - 1": (packed(VALID_HEADER, size=2**64 - 1), "does not fit"),
    "header of 2^64 - 8": (packed(VALID_HEADER, size=2**64 - 8), "does not fit"),
    "starts with a space": (packed(" " + VALID_HEADER), "does not start with '{'"),
    "starts with a bracket": (packed("[]"), "does not start with '{'"),
    "a pickle": (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." * 9, "does not fit"),
    "cut JSON": (packed(VALID_HEADER[:-1]), "not JSON"),
    "JSON and more": (packed(VALID_HEADER + "{}"), "not JSON"),
    "NUL padding": (packed(VALID_HEADER + "\0\0"), "not JSON"),
    "not UTF-8": (packed(b'{"\xff":1}'), "not UTF-8"),
    "lone surrogate": (packed('{"\\udc00":' + VALID_ENTRY + "}"), "not UTF-8"),
    "duplicate tensor": (packed(f'{{"a":{VALID_ENTRY},"a":{VALID_ENTRY}}}'), "'a' appears twice"),
    "duplicate metadata": (packed('{"__metadata__":{},"__metadata__":{}}'), "appears twice"),
    "duplicate in metadata": (packed('{"__metadata__":{"k":"1","k":"2"}}'), "'k' appears twice"),
    "duplicate in entry": (
        packed('{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
        "'dtype' appears twice",
    ),
    "deep arrays": (packed('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "nested too deep"),
    "deep objects": (packed('{"a":' * 100_000 + "1" + "}" * 100_000), "nested too deep"),
    "metadata of numbers": (packed('{"__metadata__":{"k":1}}', 0), "object of strings"),
    "metadata is a list": (packed('{"__metadata__":["k"]}', 0), "object of strings"),
    "metadata is null": (packed('{"__metadata__":null}', 0), "object of strings"),
    "entry is a list": (packed('{"a":[]}'), "dtype, shape and data_offsets"),
    "no dtype": (entry(dtype=...), "dtype, shape and data_offsets"),
    "no shape": (entry(shape=...), "dtype, shape and data_offsets"),
    "no offsets": (entry(data_offsets=...), "dtype, shape and data_offsets"),
    "unknown key": (entry(strides=[1]), "and nothing else"),
    "unknown dtype": (entry(dtype="F8_E4M3"), "'a' has the unknown dtype 'F8_E4M3'"),
    "dtype in lower case": (entry(dtype="f32"), "unknown dtype"),
    "dtype is a number": (entry(dtype=32), "a string as its dtype"),
    "dtype is a list": (entry(dtype=["F32"]), "a string as its dtype"),
    "dtype is null": (entry(dtype=None), "a string as its dtype"),
    "shape is a number": (entry(shape=2), "a shape is"),
    "shape of floats": (entry(shape=[2.0]), "a shape is"),
    "shape of strings": (entry(shape=["2"]), "a shape is"),
    "shape of bools": (entry(shape=[2, True]), "a shape is"),
    "negative shape": (entry(shape=[-2]), "a shape is"),
    "two negative dims": (entry(shape=[-1, -2]), "a shape is"),
    "33 dims": (entry(shape=[1] * 32 + [2]), "at most 32"),
    "a million dims": (entry(shape=[1] * 10**6), "at most 32"),
    "dim of 2^62": (entry(shape=[2**62]), "too large"),
    "product wraps to 8": (entry(shape=[2**32, 2**32 + 2]), "too large"),
    "product wraps to 0": (entry(shape=[2**62, 4], data_offsets=[0, 0]), "too large"),
    "huge but empty": (entry(shape=[2**62, 0, 2**62], data_offsets=[0, 0]), "too large"),
    "dim of 2^63": (entry(shape=[2**63]), "a shape is"),
    "dim of 4000 digits": (entry(shape=[10**4000]), "a shape is"),
    "dim of 5000 digits": (packed(VALID_HEADER.replace("[2]", f"[{'9' * 5000}]")), "not JSON"),
    "one offset": (entry(data_offsets=[0]), "two integers"),
    "three offsets": (entry(data_offsets=[0, 4, 8]), "two integers"),
    "offsets of floats": (entry(data_offsets=[0, 8.0]), "two integers"),
    "offsets of bools": (entry(data_offsets=[False, 8]), "two integers"),
    "offsets are an object": (entry(data_offsets={"start": 0}), "two integers"),
    "end before start": (entry(data_offsets=[8, 0]), "start ≤ end"),
    "negative start": (entry(data_offsets=[-8, 0]), "two integers"),
    "span too small": (entry(data_offsets=[0, 4]), "is 8 bytes, not 4"),
    "span too large": (entry(shape=[1]), "is 4 bytes, not 8"),
    "does not start at 0": (entry(data_offsets=[8, 16]), "a gap before tensor 'a'"),
    "offset of 2^62": (entry(data_offsets=[2**62, 2**62 + 8]), "a gap before"),
    "offset of 2^63": (entry(data_offsets=[2**63 - 8, 2**63]), "two integers"),
    "offset of 4299 nines": (entry(data_offsets=[0, 10**4299 - 1]), "two integers"),
    "hole": (entries((0, 4), (5, 8), data=8), "a gap before tensor 't1'"),
    "overlap": (entries((0, 4), (3, 8), data=8), "an overlap at tensor 't1'"),
    "one inside another": (entries((0, 8), (2, 4), data=8), "an overlap at tensor 't1'"),
    "the same bytes twice": (entries((0, 4), (0, 4), data=4), "an overlap at"),
    "empty tensor inside another": (entries((0, 8), (4, 4), data=8), "an overlap at"),
    "cut short by a byte": (packed(VALID_HEADER, MORE - 1), "cut short"),
    "no data": (packed(VALID_HEADER, 0), "cut short"),
    "a byte too many": (packed(VALID_HEADER, MORE + 1), "1 bytes after the last tensor"),
    "data without tensors": (packed("{}", 4), "4 bytes after the last tensor"),
}
STRICTER = {
    "unknown key",
    "duplicate tensor",
    "metadata is null",
    "starts with a space",
    "33 dims",
}
"""What the package lets pass and we do not."""


def opened(path: Path, raw: bytes) -> TensorFile:
    path.write_bytes(raw)
    return open_safetensors(path)


# cases: X6, W11; feature table: 137
@pytest.mark.parametrize(("raw", "message"), HOSTILE.values(), ids=list(HOSTILE))
def test_each_fault_is_refused_by_name(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(FormatError) as caught:
        opened(path, raw)
    text = str(caught.value)
    assert message in text
    assert text.startswith(str(path))
    assert len(text.splitlines()) == 1
    assert len(text) < 300 + len(str(path))


@pytest.mark.parametrize("fault", sorted(HOSTILE.keys() - STRICTER))
def test_what_the_package_refuses_as_well(tmp_path: Path, fault: str) -> None:
    """A second opinion on each file of the table, so that none is refused for a wrong reason."""
    raw, _ = HOSTILE[fault]
    try:
        reference.load(raw)
    except (SafetensorError, RecursionError, KeyError):
        return
    pytest.fail(f"the package opens {fault!r}")


@pytest.mark.parametrize(
    "raw",
    [
        packed("{}", 0),
        packed("{}      ", 0),
        packed('{"__metadata__":{}}', 0),
        packed(VALID_HEADER + " " * 11),
        packed('{"":' + VALID_ENTRY + "}"),
        entries((0, 0), (0, 4), (4, 4), (4, 8), data=8),
        entries((4, 8), (0, 4), data=8),
        entry(shape=[2] + [1] * 31),
        packed('{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', 4),
    ],
)
def test_what_is_unusual_but_allowed_is_opened(tmp_path: Path, raw: bytes) -> None:
    file = opened(tmp_path / "model.safetensors", raw)
    assert {name: file.array(name).shape for name in file.entries} == {
        name: array.shape for name, array in reference.load(raw).items()
    }


def test_a_header_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.write(b"{")
        file.truncate(200_000_000)  # sparse: takes no room on the disk
    tracemalloc.start()
    with pytest.raises(FormatError, match="over the limit 100000000"):
        open_safetensors(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "pipe", tmp_path / "loop"):
        with pytest.raises(FormatError, match="no such file"):
            open_safetensors(path)


# cases: W11
def test_no_prefix_of_a_file_opens(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": np.ones(3, "f4"), "b": np.ones((2, 2), "f2")}, {"k": "v"})
    raw = path.read_bytes()
    opened(path, raw)
    for size in range(len(raw)):
        with pytest.raises(FormatError):
            opened(path, raw[:size])


def mutated(draw: st.DrawFn, raw: bytes) -> bytes:
    """A file with a few bytes replaced, removed or put in."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(raw)))
        stop = start + draw(st.integers(0, 9))
        patch = draw(st.binary(max_size=9) | st.sampled_from([b"{", b"}", b"-1", b"9" * 30, b'"']))
        raw = raw[:start] + patch + raw[stop:]
    return raw


@st.composite
def files(draw: st.DrawFn) -> bytes:
    header = draw(
        st.sampled_from([VALID_HEADER, '{"__metadata__":{"k":"v"},' + VALID_HEADER[1:]])
        | st.text('{}[]":,0128aF3__metadata__dtypeshapeoffsets', max_size=60)
        | st.binary(max_size=40)
    )
    raw = packed(header, draw(st.integers(0, 16)))
    return mutated(draw, raw) if draw(st.booleans()) else raw


# cases: X6; feature table: 137
@settings(max_examples=400, deadline=1000)
@given(raw=files() | st.binary(max_size=100))
@example(raw=packed(VALID_HEADER))
def test_any_bytes_open_or_are_a_format_error(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    try:
        file = opened(path, raw)
    except FormatError:
        return
    theirs = reference.load(raw)
    assert {name: file.array(name).tobytes() for name in file.entries} == {
        name: array.tobytes() for name, array in theirs.items()
    }
