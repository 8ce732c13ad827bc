"""The .smol format: what is written comes back, byte for byte and aligned."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from smollm2.errors import FormatError, InputError
from smollm2.formats.smol import (
    BLOCK_BYTES,
    SECTIONS,
    SmolTensor,
    open_smol,
    packed_bytes,
    write_smol,
)

TENSORS = (
    SmolTensor("a.weight", "q8", (17, 65)),
    SmolTensor("a.norm", "f32", (5,)),
    SmolTensor("b.weight", "q4m", (16, 64)),
    SmolTensor("c.weight", "f32", (3, 3)),
)
TEXTS = {"config.json": b'{"a": 1}', "chat_template.jinja": "{{ é }}\r\n".encode()}


def content(tensor: SmolTensor) -> np.ndarray:
    rng = np.random.default_rng(len(tensor.name))
    return rng.integers(0, 256, packed_bytes(tensor.kind, tensor.shape), dtype=np.uint8)


def write(path: Path, **changes: object) -> Path:
    write_smol(path, TEXTS, TENSORS, content)
    return path


def header_of(raw: bytes) -> dict[str, dict[str, dict[str, object]]]:
    size = int.from_bytes(raw[8:16], "little")
    header: dict[str, dict[str, dict[str, object]]] = json.loads(raw[16 : 16 + size])
    return header


def test_the_bytes_are_as_described(tmp_path: Path) -> None:
    """cases: feature 2: magic and version; read by nothing but the description"""
    raw = write(tmp_path / "x.smol").read_bytes()
    assert raw[:8] == b"SMOL\x03\0\0\0"
    header = header_of(raw)
    assert list(header) == ["sections", "tensors"]
    assert list(header["sections"]) == list(TEXTS)
    assert list(header["tensors"]) == [tensor.name for tensor in TENSORS]
    end = 0
    for name, item in {**header["sections"], **header["tensors"]}.items():
        offset, length = item["offset"], item["length"]
        assert isinstance(offset, int)
        assert isinstance(length, int)
        assert offset % 64 == 0
        assert not any(raw[end:offset]) or end == 0
        part = raw[offset : offset + length]
        assert item["checksum"] == f"{zlib.crc32(part):08x}"
        tensor = next((tensor for tensor in TENSORS if tensor.name == name), None)
        assert part == (content(tensor).tobytes() if tensor else TEXTS[name])
        end = offset + length
    assert end == len(raw)
    assert header["tensors"]["a.weight"]["kind"] == "q8"
    assert header["tensors"]["a.weight"]["shape"] == [17, 65]
    assert header["tensors"]["a.weight"]["length"] == 2 * 2 * 17 * 64


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = open_smol(write(tmp_path / "x.smol"), verify=True)
    assert file.format == "smol"
    assert dict(file.metadata) == TEXTS
    assert {name: (entry.kind, entry.shape) for name, entry in file.entries.items()} == {
        "a.weight": ("q8", (17, 65)),
        "a.norm": ("F32", (5,)),
        "b.weight": ("q4m", (16, 64)),
        "c.weight": ("f32", (3, 3)),
    }
    for tensor in TENSORS:
        raw = file.raw(tensor.name)
        assert np.array_equal(raw, content(tensor))
        assert raw.ctypes.data % 64 == 0
        assert not raw.flags.owndata
        assert not raw.flags.writeable
    assert np.array_equal(file.array("a.norm"), content(TENSORS[1]).view("<f4"), equal_nan=True)
    with pytest.raises(FormatError, match="not a dense array"):
        file.array("c.weight")


@settings(deadline=None, max_examples=40)
@given(
    sections=st.dictionaries(st.sampled_from(SECTIONS), st.binary(max_size=200)),
    tensors=st.lists(
        st.builds(
            SmolTensor,
            st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
            st.sampled_from(tuple(BLOCK_BYTES)),
            st.tuples(st.integers(1, 40), st.integers(1, 150)),
        ),
        max_size=6,
        unique_by=lambda tensor: tensor.name,
    ),
)
def test_anything_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    sections: dict[str, bytes],
    tensors: list[SmolTensor],
) -> None:
    """Headers of any length, whose digits decide where everything lies."""
    path = tmp_path_factory.mktemp("smol") / "x.smol"
    write_smol(path, sections, tensors, content)
    file = open_smol(path, verify=True)
    assert dict(file.metadata) == sections
    assert list(file.entries) == [tensor.name for tensor in tensors]
    for tensor in tensors:
        assert (file.entries[tensor.name].kind, file.entries[tensor.name].shape) == tensor[1:]
        assert np.array_equal(file.raw(tensor.name), content(tensor))


@pytest.mark.parametrize(
    ("sections", "tensor", "message"),
    [
        ({"notes.txt": b""}, TENSORS[0], "has no section 'notes.txt'"),
        ({}, SmolTensor("", "q8", (1, 1)), "a name of 0 characters"),
        ({}, SmolTensor("x" * 257, "q8", (1, 1)), "a name of 257 characters"),
        ({}, SmolTensor("x", "Q8_0", (1, 1)), "the unknown kind 'Q8_0': known are f32"),
        ({}, SmolTensor("x", "q8", (0, 1)), r"the shape \[0, 1\]"),
        ({}, SmolTensor("x", "q8", (1, 1, 1)), "one or two sizes"),
        ({}, SmolTensor("x", "q8", (4,)), "a vector of q8: vectors are f32"),
    ],
)
def test_what_cannot_be_written(
    tmp_path: Path, sections: dict[str, bytes], tensor: SmolTensor, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        write_smol(tmp_path / "x.smol", sections, [tensor], content)
    with pytest.raises(InputError, match="is given twice"):
        write_smol(tmp_path / "x.smol", {}, [TENSORS[0], TENSORS[0]], content)
    with pytest.raises(InputError, match=r"needs 4352 bytes: got 1 items of float32"):
        write_smol(tmp_path / "x.smol", {}, TENSORS[:1], lambda _: np.zeros(1, np.float32).view())
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """cases: W12"""
    path = write(tmp_path / "x.smol")
    before = path.read_bytes()

    def fail(tensor: SmolTensor) -> np.ndarray:
        if tensor == TENSORS[2]:
            raise KeyboardInterrupt
        return content(tensor)

    with pytest.raises(KeyboardInterrupt):
        write_smol(path, TEXTS, TENSORS, fail)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_arrives_on_the_disk_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases: W12: a file that cannot be read back never gets its name"""
    from smollm2.formats import smol

    true = smol._checksum
    answers = iter([*[true] * 5, lambda _: "00000001"])
    monkeypatch.setattr(smol, "_checksum", lambda raw: next(answers, true)(raw))
    with pytest.raises(FormatError, match=r"tensor 'c\.weight' is damaged"):
        write(tmp_path / "x.smol")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verify", [True, False])
def test_a_flipped_byte_is_named(tmp_path: Path, verify: bool) -> None:
    """cases: feature 9, W11: sections always, tensors where it is asked for"""
    path = write(tmp_path / "x.smol")
    raw = bytearray(path.read_bytes())
    header = header_of(raw)
    for group, name in ("sections", "config.json"), ("tensors", "b.weight"), ("tensors", "a.norm"):
        offset, length = (header[group][name][key] for key in ("offset", "length"))
        assert isinstance(offset, int)
        assert isinstance(length, int)
        for place in offset, offset + length - 1:
            raw[place] ^= 1
            path.write_bytes(raw)
            if group == "sections" or verify:
                with pytest.raises(FormatError, match=f"{group[:-1]} '{name}' is damaged"):
                    open_smol(path, verify=verify)
            else:
                open_smol(path)
            raw[place] ^= 1
