""".smol files from a stranger: one file a fault, then mutations, cuts and noise."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings, strategies as st

from smollm2.checkpoint import load_checkpoint
from smollm2.errors import FormatError, SmolLM2Error
from smollm2.export import export_smol
from smollm2.formats.smol import open_smol
from tests.tiny import random_weights, tiny_config, write_hf

ITEM = {"offset": 0, "length": 0, "checksum": "00000000"}
Header = dict[str, Any]


def item(data: bytes, **changes: Any) -> dict[str, Any]:
    return {**ITEM, "length": len(data), "checksum": f"{zlib.crc32(data):08x}", **changes}


def tensor(**changes: Any) -> dict[str, Any]:
    return item(bytes(1088), kind="q8", shape=[16, 64], **changes)


def built(
    change: Callable[[Header], object] = lambda _: None,
    *,
    magic: bytes = b"SMOL",
    version: int = 3,
    size: int | None = None,
    text: bytes | None = None,
    tail: bytes = b"",
    cut: int | None = None,
) -> bytes:
    """A good file of one section and two tensors, and then what is wrong with it."""
    header: Header = {
        "sections": {"config.json": item(b"{}")},
        "tensors": {"a": tensor(), "b": tensor()},
    }
    start = 1024
    header["sections"]["config.json"]["offset"] = start
    header["tensors"]["a"]["offset"] = start + 64
    header["tensors"]["b"]["offset"] = start + 64 + 1088
    change(header)
    raw = json.dumps(header).encode() if text is None else text
    raw = raw.ljust(start - 16)
    prefix = magic + version.to_bytes(4, "little")
    prefix += (len(raw) if size is None else size).to_bytes(8, "little")
    return (prefix + raw + b"{}".ljust(64, b"\0") + bytes(2 * 1088) + tail)[:cut]


def of(name: str, **changes: Any) -> bytes:
    """The good file with a value of tensor ``name`` changed; None takes it away."""

    def change(header: Header) -> None:
        value = header["tensors"][name]
        value.update(changes)
        for key in [key for key in value if value[key] is None]:
            del value[key]

    return built(change)


def edited(change: Callable[[Header], object]) -> bytes:
    return built(change)


HOSTILE = {
    "empty file": (b"", "the file is empty"),
    "three bytes": (b"SMO", "not a .smol file"),
    "magic alone": (b"SMOL", "ends inside its prefix"),
    "no header length": (built(cut=12), "ends inside its prefix"),
    "other magic": (built(magic=b"GGUF"), "it does not start with 'SMOL'"),
    "version 0": (built(version=0), "version 0 is not supported: supported is 3"),
    "version 2": (built(version=2), "version 2 is not supported"),
    "version 4": (built(version=4), "version 4 is not supported"),
    "version 2^32 - 1": (built(version=2**32 - 1), "version 4294967295"),
    "header of 2^64 - 1": (built(size=2**64 - 1), "a header of 18446744073709551615 bytes"),
    "header past the end": (built(size=10**6), "cut short or broken"),
    "header not aligned": (built(size=1007), "the header ends at 1023, not a multiple of 64"),
    "header of nothing": (built(size=48), "not JSON"),
    "header cut": (built(cut=500), "cut short or broken"),
    "not JSON": (built(text=b"{nothing}"), "not JSON"),
    "not UTF-8": (built(text=b'{"\xff": 1}'), "not UTF-8"),
    "an array": (built(text=b"[]"), "an object is needed|a JSON object is needed"),
    "nested too deep": (built(text=b"[" * 1000), "not JSON|nested too deep"),
    "NaN": (built(text=b'{"sections": NaN, "tensors": {}}'), "NaN is not JSON"),
    "duplicate tensor": (
        built(text=b'{"sections": {}, "tensors": {"a": {}, "a": {}}}'),
        "the key 'a' appears twice",
    ),
    "no tensors": (edited(lambda h: h.pop("tensors")), "objects sections and tensors alone"),
    "no sections": (edited(lambda h: h.pop("sections")), "objects sections and tensors alone"),
    "more than both": (edited(lambda h: h.update(more={})), "objects sections and tensors alone"),
    "tensors as a list": (edited(lambda h: h.update(tensors=[])), "sections and tensors alone"),
    "unknown section": (
        edited(lambda h: h["sections"].update({"../config.json": item(b"")})),
        r"unknown section '\.\./config\.json'",
    ),
    "a section as a number": (
        edited(lambda h: h["sections"].update({"config.json": 7})),
        "section 'config.json' must have checksum, length, offset and nothing else",
    ),
    "a section with a kind": (
        edited(lambda h: h["sections"]["config.json"].update(kind="q8")),
        "and nothing else",
    ),
    "section damaged": (
        edited(lambda h: h["sections"]["config.json"].update(checksum="00000000")),
        "section 'config.json' is damaged",
    ),
    "section past the end": (
        edited(lambda h: h["sections"]["config.json"].update(length=2**62)),
        "cut short or broken",
    ),
    "section of 2^63": (
        edited(lambda h: h["sections"]["config.json"].update(length=2**63)),
        "must be integers from 0 on",
    ),
    "a tensor as null": (edited(lambda h: h["tensors"].update(a=None)), "and nothing else"),
    "no kind": (of("a", kind=None), "tensor 'a' must have checksum, kind, length"),
    "an unknown key": (of("a", dtype="q8"), "and nothing else"),
    "unknown kind": (of("a", kind="q5"), "tensor 'a' has the unknown kind 'q5': known are f32"),
    "kind of GGUF": (of("a", kind="Q8_0"), "the unknown kind 'Q8_0'"),
    "kind as a number": (of("a", kind=8), "kind must be a string"),
    "kind as a list": (of("a", kind=["q8"]), "kind must be a string"),
    "shape as a number": (of("a", shape=16), "shape a list"),
    "no dimensions": (of("a", shape=[]), r"the shape \[\]"),
    "three dimensions": (of("a", shape=[1, 16, 64]), "one or two sizes"),
    "dimension of 0": (of("a", shape=[0, 64]), "from 1 on"),
    "negative dimension": (of("a", shape=[-16, 64]), "from 1 on"),
    "dimension true": (of("a", shape=[True, 64]), "from 1 on"),
    "dimension 16.0": (of("a", shape=[16.0, 64]), "from 1 on"),
    "dimension of 2^31": (of("a", shape=[2**31, 64]), "from 1 on"),
    "product of 2^60": (of("a", shape=[2**30, 2**30]), "bytes, not 1088"),
    "vector of q8": (of("a", shape=[64]), "vectors are f32"),
    "longer than its shape": (of("a", length=1089), r"q8 \[16, 64\] is 1088 bytes, not 1089"),
    "kind of another length": (of("a", kind="q4"), "is 576 bytes, not 1088"),
    "more rows": (of("a", shape=[17, 64]), "is 2176 bytes, not 1088"),
    "length as text": (of("a", length="1088"), "must be integers"),
    "length negative": (of("a", length=-1), "must be integers"),
    "offset true": (of("a", offset=True), "must be integers"),
    "offset 1.5": (of("a", offset=1.5), "must be integers"),
    "offset of 2^64": (of("a", offset=2**64), "must be integers"),
    "offset of 2^62": (of("a", offset=2**62), "tensor 'a' follows a gap"),
    "not aligned": (of("a", offset=1089), "tensor 'a' is not aligned to 64 bytes"),
    "in the header": (of("a", offset=0), "tensor 'a' overlaps what is before it"),
    "overlap": (of("b", offset=1024 + 64), "tensor 'b' overlaps"),
    "a gap": (of("b", offset=1024 + 128 + 1088), "tensor 'b' follows a gap"),
    "checksum as a number": (of("a", checksum=7), "eight hexadecimal digits"),
    "checksum too short": (of("a", checksum="1234567"), "eight hexadecimal digits"),
    "checksum in capitals": (of("a", checksum="ABCDEF00"), "eight hexadecimal digits"),
    "name of 257": (edited(lambda h: h["tensors"].update({"n" * 257: tensor()})), "1 to 256"),
    "name of 0": (edited(lambda h: h["tensors"].update({"": tensor()})), "a name of 0 char"),
    "cut by a byte": (built(cut=-1), "tensor 'b' ends at byte 3264 of 3263: the file is cut"),
    "no data": (built(cut=1088), "cut short or broken"),
    "a byte too many": (built(tail=b"\0"), "1 bytes after the last tensor"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_each_fault_is_one_clear_error(tmp_path: Path, fault: str) -> None:
    """cases: W11; feature 3. Nothing is allocated for what a header only claims."""
    raw, message = HOSTILE[fault]
    path = tmp_path / "x.smol"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=message) as caught:
            open_smol(path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert not text.endswith(".")


def test_the_file_that_the_faults_are_made_of_is_good(tmp_path: Path) -> None:
    path = tmp_path / "x.smol"
    path.write_bytes(built())
    assert list(open_smol(path, verify=True).entries) == ["a", "b"]
    assert len(HOSTILE) >= 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model of one layer as a .smol file."""
    folder = tmp_path_factory.mktemp("hostile")
    config = tiny_config(num_hidden_layers=1)
    write_hf(folder / "hf", config, random_weights(config))
    export_smol(load_checkpoint(folder / "hf"), folder / "x.smol", quant="q4", stacked=True)
    return (folder / "x.smol").read_bytes()


hostile = settings(
    deadline=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@hostile
@given(data=st.data())
def test_mutations_are_errors_or_harmless(
    whole: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    """Bytes changed, mostly in the header, and the file cut: an error of ours, or a model."""
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        end = data.draw(st.sampled_from([16, 3000, len(raw)]))
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    path = tmp_path / "x.smol"
    path.write_bytes(raw)
    try:
        checkpoint = load_checkpoint(path)
    except SmolLM2Error as error:
        note(error)
    else:
        assert sum(weight.nbytes for _, weight in checkpoint.weights.items()) > 0


@hostile
@given(noise=st.binary(max_size=300))
def test_noise_is_an_error(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "x.smol"
    for raw in noise, b"SMOL\3\0\0\0" + noise, b"SMOL\2\0\0\0" + noise, b"SMOL\1\0\0\0" + noise:
        path.write_bytes(raw)
        with pytest.raises(SmolLM2Error):
            load_checkpoint(path)
