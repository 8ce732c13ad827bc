"""Files of the Dart package: told apart, checked by their hashes, and computed with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

import smollm2
from smollm2.checkpoint import load_checkpoint
from smollm2.errors import ConfigError, FormatError, SmolLM2Error
from smollm2.formats import dart
from smollm2.formats.dart import hashes_of, hashes_reference, open_dart
from smollm2.quantize import as_float32
from smollm2.weights import Weights
from tests.dartfile import (
    LAYOUTS,
    QUANT_IDS,
    Vocabulary,
    hashed,
    hashed_bf16,
    header,
    stored,
    text,
    u32,
    write_dart,
)
from tests.fakes import SPECIALS, byte_alphabet
from tests.tiny import Arrays, random_weights, tiny_config
from tests.vocabulary import golden_declaration, golden_tokenizer

Hasher = Callable[[NDArray[Any]], tuple[int, int]]

CONFIG = tiny_config(vocab_size=260, num_hidden_layers=1, hidden_size=32, head_dim=8)
TOKENS = (*SPECIALS, *byte_alphabet(), "th")
BYTES = Vocabulary(TOKENS, [("t", "h")], [(token, i) for i, token in enumerate(SPECIALS)])


def weights_of(seed: int = 0) -> Arrays:
    return random_weights(CONFIG, seed)


def written(path: Path, quant: str = "q8", **options: object) -> Path:
    layout, version = options.get("layout", LAYOUTS[2]), options.get("version", 2)
    assert isinstance(layout, str)
    assert isinstance(version, int)
    return write_dart(path, CONFIG, weights_of(), quant, BYTES, layout=layout, version=version)


HASHERS = (hashes_of, hashes_reference)
"""In the extension, where it is there, and in Python."""


@pytest.mark.parametrize("hashes", HASHERS)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (0x811C9DC5, 0x1F2BE47C)),
        ([0], (0x050C5D1F, 0xF1F4C930)),
        ([1, -2, 3], (0xA730C52F, 0xFFFEE672)),
        ([127, -127, 0, 5], (0x41730846, 0xE559F889)),
        ([-32767, 32767, 12], (0xEDE73ADF, 0x6FABD1F9)),
    ],
)
def test_hash_vectors(hashes: Hasher, values: list[int], expected: tuple[int, int]) -> None:
    """cases: feature 4"""
    assert hashes(np.array(values, dtype=np.int16)) == expected
    assert hashed(values) == expected
    if all(abs(value) < 128 for value in values):
        assert hashes(np.array(values, dtype=np.int8)) == expected


@pytest.mark.parametrize("hashes", HASHERS)
def test_hash_vector_of_bf16(hashes: Hasher) -> None:
    """cases: feature 6"""
    values = np.array([0x3F80, 0xBF80, 0x0000], dtype=np.uint16)
    assert hashes(values) == (0x391DE7B7, 0x85593483)


@pytest.mark.parametrize("hashes", HASHERS)
@settings(deadline=None)
@given(values=st.lists(st.integers(-(2**15), 2**15 - 1), max_size=50))
def test_hashes_of_any_values(hashes: Hasher, values: list[int]) -> None:
    wide = np.array(values, dtype=np.int16)
    assert hashes(wide) == hashed(values)
    assert hashes(wide[::-1]) == hashed(values[::-1])  # not contiguous
    narrow = wide.astype(np.int8)
    assert hashes(narrow) == hashed(narrow.tolist())
    bits = wide.view(np.uint16)
    assert hashes(bits) == hashed_bf16(bits.tolist())


def test_it_reads_without_the_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for quant in QUANT_IDS:
        path = written(tmp_path / quant, quant)
        with monkeypatch.context() as patch:
            patch.setattr(dart, "compiled", lambda _: None)
            slow = dict(load_checkpoint(path).weights.items())
        for name, values in load_checkpoint(path).weights.items():
            assert np.array_equal(as_float32(values), as_float32(slow[name]))


@pytest.mark.skipif(dart.compiled("dart_hashes") is None, reason="the extension is not installed")
def test_the_extension_refuses_what_is_no_tensor() -> None:
    from smollm2 import _native

    for kind, size in ("q8x", 4), ("f32", 4), ("q16", 3), ("bf16", 1):
        with pytest.raises(ValueError, match=f"cannot hash {size} bytes as '{kind}'"):
            _native.dart_hashes(np.zeros(size, dtype=np.uint8), kind)
    with pytest.raises(ValueError, match="values must be a C-contiguous uint8 array"):
        _native.dart_hashes(np.zeros(4, dtype=np.int8), "q8")


@pytest.mark.parametrize("quant", QUANT_IDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_three_layouts_of_version_2(tmp_path: Path, quant: str, layout: str) -> None:
    """cases: features 3-6, 8, 10"""
    path = written(tmp_path / "x.bin", quant, layout=layout)
    file = open_dart(path)
    assert (file.version, file.quant, file.layout) == (2, quant, layout)
    assert file.merges == (("t", "h"),)
    assert file.added == (tuple(BYTES.added) if layout == "added tokens" else None)
    checkpoint = load_checkpoint(path)
    assert checkpoint.config == tiny_config(
        vocab_size=260,
        num_hidden_layers=1,
        hidden_size=32,
        head_dim=8,
        eos_token_ids=(2, 0),
    )
    loaded = dict(checkpoint.weights.items())
    for name, values in weights_of().items():
        assert np.array_equal(as_float32(loaded[name]), stored(values, quant)), name
    assert checkpoint.tokenizer is not None
    assert dict(checkpoint.tokenizer.special_tokens) == {t: i for i, t in enumerate(SPECIALS)}
    assert checkpoint.tokenizer.encode("the é") == [259, 104, 35, 198, 172]
    assert checkpoint.tokenizer.eos_id == 2


def test_version_1_is_q8_without_its_fields(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        path = written(tmp_path / f"{layout}.smol", layout=layout, version=1)
        file = open_dart(path)
        assert (file.version, file.quant, file.layout) == (1, "q8", layout)
        again = written(tmp_path / "v2.bin", layout=layout)
        for one, other in zip(
            load_checkpoint(path).weights.items(),
            load_checkpoint(again).weights.items(),
            strict=True,
        ):
            assert np.array_equal(as_float32(one[1]), as_float32(other[1]))


@pytest.mark.parametrize("quant", QUANT_IDS)
def test_it_generates(tmp_path: Path, quant: str) -> None:
    """The same tokens as a model of the weights that the file stands for."""
    path = written(tmp_path / "x.bin", quant)
    with smollm2.load(path, backend="numpy") as model:
        got = model.generate("the sea", max_tokens=12, ignore_eos=True)
    from smollm2.backends import get_backend

    weights = weights_of().map(lambda _, values: stored(values, quant))
    assert isinstance(weights, Weights)
    lm = get_backend("numpy").load(load_checkpoint(path).config, weights)
    other = smollm2.SmolLM2(lm, tokenizer=load_checkpoint(path).tokenizer)
    expected = other.generate("the sea", max_tokens=12, ignore_eos=True)
    assert len(got.token_ids) == 12
    assert got.token_ids == expected.token_ids


@pytest.mark.parametrize("quant", QUANT_IDS)
def test_a_flipped_byte_is_named_by_tensor(tmp_path: Path, quant: str) -> None:
    """cases: feature 9: whichever byte of whichever quantized tensor, its hashes included"""
    path = written(tmp_path / "x.bin", quant)
    raw = bytearray(path.read_bytes())
    for name, entry in open_dart(path).tensors.items():
        if entry.kind == "f32":
            continue
        start = entry.offset + (4 if quant != "bf16" else 0)  # the scale is not hashed
        for place in start, start + 8, start + 9, entry.offset + entry.nbytes - 1:
            raw[place] ^= 0x10
            path.write_bytes(raw)
            with pytest.raises(FormatError, match=f"tensor '{name}' is damaged"):
                load_checkpoint(path)
            raw[place] ^= 0x10


def test_the_real_vocabulary_gives_the_real_ids(tmp_path: Path, shared: Path) -> None:
    """cases: feature 10"""
    declaration = golden_declaration(shared)
    vocab = declaration["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [(left, right) for left, right in declaration["model"]["merges"]]
    added = [(token["content"], token["id"]) for token in declaration["added_tokens"]]
    config = tiny_config(vocab_size=len(tokens), num_hidden_layers=1, hidden_size=8, head_dim=2)
    golden = golden_tokenizer(shared)
    samples = json.loads((Path(__file__).parent / "data" / "tokens.json").read_text("utf-8"))
    for layout in LAYOUTS:
        path = write_dart(
            tmp_path / f"{layout}.bin",
            config,
            random_weights(config),
            "bf16",
            Vocabulary(tokens, merges, added),
            layout=layout,
        )
        tokenizer = load_checkpoint(path).tokenizer
        assert tokenizer is not None
        assert dict(tokenizer.special_tokens) == dict(golden.special_tokens)
        for sample in samples:
            for special in True, False:
                ids = tokenizer.encode(sample["text"], allow_special=special)
                assert ids == golden.encode(sample["text"], allow_special=special)


GOOD = header(CONFIG, "q8")


def changed(offset: int, *values: int) -> bytes:
    return GOOD[:offset] + u32(*values) + GOOD[offset + 4 * len(values) :]


FAULTS = {
    "quant id 0": (changed(8, 0), "quant id 0 is not supported: supported are 1 .q8."),
    "fp32 of 1.0.0": (changed(8, 3), "quant id 3"),
    "fp32": (changed(8, 5), "quant id 5"),
    "no width": (changed(16, 0), "hidden_size is 0"),
    "no heads": (changed(28, 0), "num_attention_heads is 0"),
    "heads that do not divide": (changed(28, 5), "hidden_size 32 is not a multiple"),
    "2^32 - 1 layers": (changed(24, 2**32 - 1), "do not fit a file of"),
    "2^32 - 1 of all": (changed(16, *[2**32 - 1] * 7), "do not fit a file of"),
    "one layer more": (changed(24, 2), "do not fit a file of|none of the layouts"),
    "other vocabulary": (changed(36, 261), "none of the layouts"),
    "kv heads that do not divide": (changed(32, 3), "ends inside tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_the_header_is_one_clear_error(tmp_path: Path, fault: str) -> None:
    """cases: features 2, 3; W11"""
    path = written(tmp_path / "x.bin")
    raw, message = FAULTS[fault]
    path.write_bytes(raw + path.read_bytes()[len(GOOD) :])
    with pytest.raises(FormatError, match=message) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)


def test_each_fault_of_the_vocabulary_is_one_clear_error(tmp_path: Path) -> None:
    path = written(tmp_path / "x.bin")
    raw = path.read_bytes()
    start = len(GOOD)
    rest = raw[start + len(BYTES.packed(LAYOUTS[2])) :]
    for vocabulary, message in (
        (u32(2**32 - 1, 0), "4294967295 tokens do not fit"),
        (u32(1, 0) + u32(2**32 - 1), "ends inside tokens"),
        (u32(1, 0) + u32(1) + b"\xff", "tokens are not UTF-8"),
        (u32(0, 2**32 - 1), "none of the layouts"),
        (u32(1, 1) + text("a") + text("nopair"), "none of the layouts"),
        (u32(1, 1) + text("a") + text("a b c"), "none of the layouts"),
        (b"", "none of the layouts|do not fit|ends inside"),
        (BYTES.packed(LAYOUTS[2]) + b"\0", "none of the layouts"),
        (BYTES.packed(LAYOUTS[2])[:-1], "none of the layouts"),
        (Vocabulary(("a", "a"), [("a", "a")]).packed(LAYOUTS[2]), "vocabulary twice"),
    ):
        path.write_bytes(raw[:start] + vocabulary + rest)
        with pytest.raises(FormatError, match=message):
            load_checkpoint(path)
    for size in 3, 7, 20, start + 6, len(raw) // 2, len(raw) - 1:
        path.write_bytes(raw[:size])
        with pytest.raises(SmolLM2Error):
            load_checkpoint(path)


def test_numbers_that_no_model_has(tmp_path: Path) -> None:
    path = written(tmp_path / "x.bin")
    raw = path.read_bytes()
    nan = np.float32(np.nan).tobytes()
    path.write_bytes(raw[:44] + nan + raw[48:])
    with pytest.raises(ConfigError, match="rope_theta"):
        load_checkpoint(path)
    offset = open_dart(written(path)).tensors["model.embed_tokens.weight"].offset
    for scale in np.nan, np.inf, 0, -0.01:
        raw = raw[:offset] + np.float32(scale).tobytes() + raw[offset + 4 :]
        path.write_bytes(raw)
        with pytest.raises(FormatError, match=r"embed_tokens\.weight' has the scale"):
            load_checkpoint(path)
