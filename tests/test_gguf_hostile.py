"""GGUF files from a stranger: one file a fault, then mutations and noise."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from smollm2.errors import FormatError
from smollm2.formats.gguf import open_gguf
from smollm2.formats.tensorfile import TensorFile

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def key(name: str | bytes, type_id: int, value: bytes) -> bytes:
    return text(name) + u32(type_id) + value


def array(type_id: int, count: int, items: bytes = b"") -> bytes:
    return u32(type_id) + u64(count) + items


class Tensor(NamedTuple):
    """A tensor info; the defaults are 32 values of F32, 128 bytes."""

    name: str | bytes = "a"
    dims: tuple[int, ...] = (32,)
    type_id: int = 0
    offset: int = 0
    dim_count: int | None = None

    def packed(self) -> bytes:
        count = len(self.dims) if self.dim_count is None else self.dim_count
        dims = b"".join(map(u64, self.dims))
        return text(self.name) + u32(count) + dims + u32(self.type_id) + u64(self.offset)


def packed(
    keys: list[bytes] | None = None,
    tensors: list[Tensor] | None = None,
    data: int = 128,
    *,
    magic: bytes = b"GGUF",
    version: bytes = u32(3),
    tensor_count: int | None = None,
    key_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file whose counts may lie, with ``data`` bytes of tensors."""
    keys = [key("general.architecture", STRING, text("llama"))] if keys is None else keys
    tensors = [Tensor()] if tensors is None else tensors
    head = magic + version
    head += u64(len(tensors) if tensor_count is None else tensor_count)
    head += u64(len(keys) if key_count is None else key_count)
    head += b"".join(keys) + b"".join(tensor.packed() for tensor in tensors)
    return head + bytes(-len(head) % alignment) + bytes(data)


def of_key(type_id: int, value: bytes) -> bytes:
    return packed([key("k", type_id, value)])


def of_tensor(data: int = 128, **changes: Any) -> bytes:
    return packed(tensors=[Tensor(**changes)], data=data)


def aligned(type_id: int, value: bytes) -> bytes:
    return packed([key("general.alignment", type_id, value)])


HOSTILE = {
    "empty file": (b"", "the file is empty"),
    "two bytes": (b"GG", "not a GGUF file"),
    "magic alone": (b"GGUF", "the file ends inside the version"),
    "other magic": (packed(magic=b"GGML"), "not a GGUF file"),
    "a safetensors file": ((8).to_bytes(8, "little") + b"{}      ", "not a GGUF file"),
    "version 0": (packed(version=u32(0)), "version 0 is not supported"),
    "version 1": (packed(version=u32(1)), "version 1 is not supported: supported are 2 and 3"),
    "version 4": (packed(version=u32(4)), "version 4 is not supported"),
    "big-endian": (packed(version=b"\0\0\0\3"), "a big-endian GGUF file: convert it"),
    "no counts": (b"GGUF" + u32(3), "the file ends inside the number of tensors"),
    "2^60 tensors": (packed(tensor_count=2**60), "the number of tensors is 1152921504606846976"),
    "2^64 - 1 tensors": (packed(tensor_count=2**64 - 1), "more than the file can hold"),
    "one tensor too many": (packed(tensor_count=2), "tensor '' has 0 dimensions"),
    "2^60 keys": (packed(key_count=2**60), "the number of metadata keys is 1152921504606846976"),
    "one key too many": (
        packed(None, [], 0, key_count=2, alignment=1),
        "ends inside a metadata key",
    ),
    "key of 2^60 bytes": (packed([u64(2**60)], data=128), "more than the limit 65535"),
    "key of 65536 bytes": (packed([key(b"k" * 65536, U8, b"\1")]), "more than the limit 65535"),
    "key past the end": (packed([u64(5000)], [], 100), "the file ends inside a metadata key"),
    "key not UTF-8": (packed([key(b"\xff", U8, b"\1")]), "a metadata key is not UTF-8"),
    "duplicate key": (packed([key("k", U8, b"\1")] * 2), "metadata 'k' appears twice"),
    "unknown value type": (of_key(13, b""), "metadata 'k' has the unknown type 13"),
    "value type 2^32 - 1": (of_key(2**32 - 1, b""), "unknown type 4294967295"),
    "value cut short": (
        packed([key("k", U64, b"\1")], [], 0, alignment=1),
        "ends inside metadata 'k'",
    ),
    "bool of 2": (of_key(BOOL, b"\2"), "neither 0 nor 1"),
    "string of 2^63 bytes": (of_key(STRING, u64(2**63)), "metadata 'k' has 9223372036854775808"),
    "string past the end": (
        packed([key("k", STRING, u64(50))], [], 0),
        "the file ends inside metadata 'k'",
    ),
    "string not UTF-8": (of_key(STRING, text(b"\xc0\x80")), "metadata 'k' is not UTF-8"),
    "string of a surrogate": (of_key(STRING, text(b"\xed\xa0\x80")), "metadata 'k' is not UTF-8"),
    "nested array": (of_key(ARRAY, array(ARRAY, 1, array(U8, 1, b"\1"))), "has nested arrays"),
    "deeply nested": (of_key(ARRAY, array(ARRAY, 1) * 10_000), "has nested arrays"),
    "array of unknown type": (of_key(ARRAY, array(99, 1)), "items of the unknown type 99"),
    "array of 2^60 bytes": (of_key(ARRAY, array(U8, 2**60)), "the length of metadata 'k' is"),
    "array of 2^61 u64": (of_key(ARRAY, array(U64, 2**61)), "more than the file can hold"),
    "array of 2^64 - 1": (of_key(ARRAY, array(I32, 2**64 - 1)), "more than the file can hold"),
    "array past the end": (
        packed([key("k", ARRAY, array(F32, 9, bytes(32)))], [], 0, alignment=1),
        "more than the file can hold",
    ),
    "array of bools of 2": (of_key(ARRAY, array(BOOL, 2, b"\1\2")), "neither 0 nor 1"),
    "2^60 strings": (of_key(ARRAY, array(STRING, 2**60)), "more than the file can hold"),
    "an item of 2^63 bytes": (
        of_key(ARRAY, array(STRING, 2, text("x") + u64(2**63))),
        "the file ends inside metadata 'k'",
    ),
    "an item of 2^64 - 1 bytes": (
        of_key(ARRAY, array(STRING, 1, u64(2**64 - 1))),
        "the file ends inside metadata 'k'",
    ),
    "strings cut in a length": (
        packed([key("k", ARRAY, array(STRING, 2, text("x" * 20) + b"\1"))], [], 0, alignment=1),
        "the file ends inside metadata 'k'",
    ),
    "an item not UTF-8": (
        of_key(ARRAY, array(STRING, 2, text("x") + text(b"\xff"))),
        "metadata 'k', item 1: not UTF-8",
    ),
    "alignment 0": (aligned(U32, u32(0)), "general.alignment is 0"),
    "alignment 4": (aligned(U32, u32(4)), "general.alignment is 4"),
    "alignment 48": (aligned(U32, u32(48)), "power of two"),
    "alignment true": (aligned(BOOL, b"\1"), "general.alignment is True"),
    "alignment 32.0": (aligned(F32, struct.pack("<f", 32)), "general.alignment is 32.0"),
    "alignment as text": (aligned(STRING, text("32")), "general.alignment is '32'"),
    "alignment of 2^63": (aligned(U64, u64(2**63)), "ends at byte 9223372036854775936"),
    "name of 65 bytes": (of_tensor(name="n" * 65), "a tensor name has 65 bytes"),
    "name of 2^60 bytes": (
        packed([], [Tensor()], 0)[:24] + u64(2**60) * 9,
        "a tensor name has 1152921504606846976",
    ),
    "name not UTF-8": (of_tensor(name=b"\x80"), "a tensor name is not UTF-8"),
    "duplicate tensor": (
        packed(tensors=[Tensor(), Tensor(offset=128)], data=256),
        "tensor 'a' appears twice",
    ),
    "no dims": (of_tensor(dims=()), "tensor 'a' has 0 dimensions, not 1 to 4"),
    "five dims": (of_tensor(dims=(1,) * 5), "tensor 'a' has 5 dimensions"),
    "2^32 - 1 dims": (of_tensor(dim_count=2**32 - 1), "tensor 'a' has 4294967295 dimensions"),
    "dims cut short": (
        packed(tensors=[Tensor(dims=(1, 1), dim_count=4)], data=0, alignment=1),
        "the file ends inside tensor 'a'",
    ),
    "dim of 0": (of_tensor(dims=(32, 0)), "tensor 'a' has an empty dimension: [0, 32]"),
    "dim of 2^42 + 1": (of_tensor(dims=(2**42 + 1,)), "tensor 'a' ends at byte 1759218604"),
    "dim of 2^64 - 1": (of_tensor(dims=(2**64 - 1,)), "the file is cut short or broken"),
    "product wraps to 32": (of_tensor(dims=(2**32, 2**32, 32)), "cut short or broken"),
    "product of 2^256": (of_tensor(dims=(2**64 - 1,) * 4), "cut short or broken"),
    "unknown ggml type": (of_tensor(type_id=999), "tensor 'a' has the type 999"),
    "ggml type given up": (of_tensor(type_id=4), "tensor 'a' has the type 4, which"),
    "unsupported ggml type": (of_tensor(type_id=20), "tensor 'a' has the type IQ4_NL, which"),
    "integers": (of_tensor(type_id=26), "tensor 'a' has the type I32, which is not supported"),
    "rows of half a group": (of_tensor(type_id=2, dims=(48,)), "'a' is Q4_0 with rows of 48"),
    "rows of 576 in Q4_K": (
        of_tensor(type_id=12, dims=(576, 256), data=10**5),
        "'a' is Q4_K with rows of 576, not a multiple of 256",
    ),
    "offset not aligned": (of_tensor(offset=8, data=256), "'a' starts at 8, not a multiple of 32"),
    "offset of 2^63": (of_tensor(offset=2**63), "tensor 'a' ends at byte"),
    "offset of 2^64 - 32": (of_tensor(offset=2**64 - 32), "cut short or broken"),
    "offset at the end": (of_tensor(offset=128), "cut short or broken"),
    "cut short by a byte": (of_tensor(data=127), "cut short or broken"),
    "no data": (of_tensor(data=0), "cut short or broken"),
    "overlap": (
        packed(tensors=[Tensor("b", offset=96), Tensor("a")], data=256),
        "tensor 'b' overlaps the one before it",
    ),
    "the same bytes twice": (
        packed(tensors=[Tensor("a"), Tensor("b")]),
        "tensor 'b' overlaps the one before it",
    ),
}


def opened(path: Path, raw: bytes) -> TensorFile:
    path.write_bytes(raw)
    return open_gguf(path)


def read_all(file: TensorFile) -> None:
    """Ask for every tensor: nothing may fail once a file has been opened."""
    for name, entry in file.entries.items():
        assert len(file.raw(name)) == entry.nbytes
        assert not entry.is_dense or file.array(name).shape == entry.shape


# cases: X3, W11
@pytest.mark.parametrize(("raw", "message"), HOSTILE.values(), ids=list(HOSTILE))
def test_each_fault_is_refused_by_name(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(FormatError) as caught:
        open_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300 + len(str(path))
    assert peak < 4_000_000


@pytest.mark.parametrize(
    "raw",
    [
        packed(),
        packed([], [], 0),
        packed(version=u32(2)),
        packed(data=1000),
        packed([key("k" * 65535, ARRAY, array(STRING, 0))]),
        packed([key("k", ARRAY, array(F32, 0)), key("", STRING, text(""))]),
        packed([key("k", ARRAY, array(BOOL, 0)), key("l", ARRAY, array(BOOL, 2, b"\0\1"))]),
        packed([key("", U8, b"\1")], [], 0, alignment=1),
        packed([key("k", ARRAY, array(STRING, 3, text("") * 3))], [], 0, alignment=1),
        packed([key("k", ARRAY, array(STRING, 1, text("x")))], [], 0, alignment=1),
        packed([key("general.alignment", U32, u32(8))], alignment=8),
        packed([key("general.alignment", U64, u64(4096))], alignment=4096),
        of_tensor(name="n" * 64),
        of_tensor(dims=(2, 4, 2, 2)),
        packed(tensors=[Tensor("b", offset=256), Tensor("a")], data=384),
    ],
)
def test_what_is_unusual_but_allowed_is_opened(tmp_path: Path, raw: bytes) -> None:
    read_all(opened(tmp_path / "model.gguf", raw))


# cases: W11
def test_no_prefix_of_a_file_opens(tmp_path: Path) -> None:
    keys = [
        key("s", STRING, text("text")),
        key("a", ARRAY, array(STRING, 2, text("x") + text("y"))),
        key("n", ARRAY, array(I32, 2, bytes(8))),
    ]
    raw = packed(keys, [Tensor("a", (32, 2), 2), Tensor("b", offset=64)], data=64 + 128)
    read_all(opened(tmp_path / "model.gguf", raw))
    for size in range(len(raw)):
        with pytest.raises(FormatError):
            opened(tmp_path / "model.gguf", raw[:size])


NUMBERS = st.sampled_from([0, 1, 2, 7, 31, 32, 2**31, 2**32, 2**42 + 1, 2**60, 2**63, 2**64 - 1])
VALUES = st.one_of(
    st.tuples(st.sampled_from([U8, BOOL]), st.binary(min_size=1, max_size=1)),
    st.tuples(st.just(STRING), st.binary(max_size=5).map(text)),
    st.tuples(st.just(ARRAY), st.builds(array, st.integers(0, 13), NUMBERS, st.binary())),
    st.tuples(st.integers(0, 20), st.binary(max_size=9)),
)
TENSORS = st.builds(
    Tensor,
    st.sampled_from(["a", "b", "c", b"\xff"]),
    st.lists(NUMBERS, max_size=5).map(tuple),
    st.integers(0, 42),
    NUMBERS,
    st.none() | st.integers(0, 2**32 - 1),
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A file that is valid, valid in form, or valid but for a few bytes."""
    raw = packed(
        [key(name, *draw(VALUES)) for name in draw(st.lists(st.text(max_size=3), max_size=3))],
        draw(st.lists(TENSORS, max_size=3)) if draw(st.booleans()) else None,
        draw(st.integers(0, 300)),
        tensor_count=draw(st.none() | NUMBERS),
        key_count=draw(st.none() | NUMBERS),
    )
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(raw)))
        patch = draw(st.binary(max_size=9) | NUMBERS.map(u64))
        raw = raw[:place] + patch + raw[place + draw(st.integers(0, 9)) :]
    return raw


# cases: X3
@settings(max_examples=500, deadline=1000)
@given(files() | st.binary(max_size=100) | st.binary(max_size=100).map(b"GGUF\3\0\0\0".__add__))
def test_any_bytes_open_or_are_a_format_error(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    try:
        file = opened(path, raw)
    except FormatError:
        return
    read_all(file)
