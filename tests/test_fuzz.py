"""Broken files through the whole of it: parsers, packed bytes, kernels.

Each file is an error of ours or a model that runs, whatever its bytes; ``make fuzz`` does the same
10,000 times with an extension that checks itself. After a crash the file that did it is
``fuzz.smol``, or ``fuzz`` with another ending, in the folders that pytest leaves.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from smollm2.backends import native
from smollm2.batch import Batch, Span
from smollm2.checkpoint import load_checkpoint
from smollm2.errors import SmolLM2Error
from smollm2.export import export_smol
from smollm2.formats.smol import BLOCK_BYTES, packed_bytes
from tests.dartfile import QUANT_IDS, Vocabulary, write_dart
from tests.tiny import random_weights, tiny_config, write_gguf, write_hf

FILES = int(os.environ.get("SMOLLM2_FUZZ", "300"))
SEED = int(os.environ.get("SMOLLM2_FUZZ_SEED", "0"))
CONFIG = tiny_config(num_hidden_layers=1, vocab_size=40, hidden_size=48, intermediate_size=80)

POWERS = (2**bits for bits in (31, 32, 53, 63, 64))
NUMBERS = (-1, 0, 1, 2, 3, 7, 63, 64, 65, 1000, 2**31 - 1, 10**30, *POWERS)
VALUES = (*NUMBERS, 0.5, -0.0, 1e308, 1e-308, 1e400, None, True, "", "q8", "\0", [], {}, [1] * 9)


@dataclass
class Item:
    """A tensor as its file describes it; vectors have a shape of one size."""

    kind: str
    shape: list[int]
    data: bytes


@dataclass
class Parts:
    """What a .smol file is made of."""

    sections: dict[str, bytes]
    tensors: dict[str, Item]

    @classmethod
    def of(cls, raw: bytes) -> Parts:
        header = json.loads(raw[16 : 16 + int.from_bytes(raw[8:16], "little")])

        def data(item: dict[str, Any]) -> bytes:
            return raw[item["offset"] : item["offset"] + item["length"]]

        return cls(
            {name: data(item) for name, item in header["sections"].items()},
            {
                name: Item(item["kind"], item["shape"], data(item))
                for name, item in header["tensors"].items()
            },
        )

    def header(self, start: int) -> tuple[dict[str, Any], bytes]:
        """The header of items that begin at ``start``, and the items."""
        body = b""
        groups: dict[str, Any] = {"sections": {}, "tensors": {}}
        for group, items in (
            ("sections", [(name, data, {}) for name, data in self.sections.items()]),
            (
                "tensors",
                [
                    (name, item.data, {"kind": item.kind, "shape": item.shape})
                    for name, item in self.tensors.items()
                ],
            ),
        ):
            for name, data, extra in items:
                body += bytes(-len(body) % 64)
                groups[group][name] = {
                    **extra,
                    "offset": start + len(body),
                    "length": len(data),
                    "checksum": f"{zlib.crc32(data):08x}",
                }
                body += data
        return groups, body

    def written(self, change: Callable[[dict[str, Any]], object] = lambda _: None) -> bytes:
        """A file of these parts, whose header ``change`` may break."""
        start = 8192
        header, body = self.header(start)
        change(header)
        text = json.dumps(header).encode().ljust(start - 16)
        return b"SMOL\3\0\0\0" + len(text).to_bytes(8, "little") + text + body


def replaced(rng: random.Random, tree: Any, value: Any) -> None:
    """Put ``value`` in place of any value of nested objects and lists."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(tree[key], dict | list) and tree[key] and rng.random() < 0.9:
        replaced(rng, tree[key], value)
    elif rng.random() < 0.1 and isinstance(tree, dict):
        del tree[key]
    else:
        tree[key] = value


def any_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Tensors of any bytes: scales may be NaN or infinite, codes anything."""
    parts = Parts.of(raw)
    for item in parts.tensors.values():
        if rng.random() < 0.5:
            item.data = rng.randbytes(len(item.data))
    return parts.written()


def some_bytes(rng: random.Random, raw: bytes) -> bytes:
    broken = bytearray(raw)
    for _ in range(rng.randint(1, 6)):
        end = min(rng.choice([16, 64, 8192, *[len(raw)] * 4]), len(raw))
        broken[rng.randrange(end)] = rng.choice([0, 0x7F, 0xFF, 0x80, rng.randrange(256)])
    return bytes(broken)


def other_header(rng: random.Random, raw: bytes) -> bytes:
    return Parts.of(raw).written(lambda header: replaced(rng, header, rng.choice(VALUES)))


def other_config(rng: random.Random, raw: bytes) -> bytes:
    """Another number in the config, with its checksum: shapes or maths do not fit."""
    parts = Parts.of(raw)
    config = json.loads(parts.sections["config.json"])
    key = rng.choice(list(config))
    number = isinstance(config[key], int | float) and rng.random() < 0.8
    config[key] = rng.choice(NUMBERS if number else VALUES)
    parts.sections["config.json"] = json.dumps(config).encode()
    return parts.written()


def other_shape(rng: random.Random, raw: bytes) -> bytes:
    """A tensor of another kind or shape, with as many bytes as that has."""
    parts = Parts.of(raw)
    item = rng.choice(list(parts.tensors.values()))
    if rng.random() < 0.5 and len(item.shape) == 2:
        item.kind = rng.choice(list(BLOCK_BYTES))
    else:
        item.shape[rng.randrange(len(item.shape))] = rng.choice([1, 16, 17, 40, 48, 64, 80, 100])
    item.data = rng.randbytes(packed_bytes(item.kind, tuple(item.shape)))
    return parts.written()


def other_names(rng: random.Random, raw: bytes) -> bytes:
    parts = Parts.of(raw)
    names = list(parts.tensors)
    one, two = rng.sample(names, 2)
    if rng.random() < 0.5:
        parts.tensors[one], parts.tensors[two] = parts.tensors[two], parts.tensors[one]
    else:
        parts.tensors[rng.choice([one + "x", "", "model.norm.weight"])] = parts.tensors.pop(one)
    return parts.written()


def other_length(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw))] if rng.random() < 0.8 else raw + rng.randbytes(70)


Way = Callable[[random.Random, bytes], bytes]
WAYS: tuple[Way, ...] = (
    any_bytes,
    some_bytes,
    other_header,
    other_config,
    other_shape,
    other_names,
    other_length,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """A good file of each kind, with matrices in stacks or one by one."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_hf(folder / "hf", CONFIG, random_weights(CONFIG))
    checkpoint = load_checkpoint(folder / "hf")
    for i, quant in enumerate(BLOCK_BYTES):
        export_smol(checkpoint, folder / f"{quant}.smol", quant=quant, stacked=i % 2 == 0)
    return [(folder / f"{quant}.smol").read_bytes() for quant in BLOCK_BYTES]


def ran(path: Path, kv: str, threads: int) -> bool:
    """Whether the file is a model, which then has run; any error but ours gets out."""
    try:
        checkpoint = load_checkpoint(path)
        config = checkpoint.config
        model = native.backend.load(config, checkpoint.weights, kv=kv, threads=threads)
        count = min(70, config.max_position_embeddings)
        ids = [i * 7 % config.vocab_size for i in range(count)]
        logits = model.forward(Batch.build([Span(0, 0, ids)]))
    except SmolLM2Error as error:
        message = str(error)
    else:
        assert logits.shape == (1, config.vocab_size)
        return True
    assert message.startswith((f"{path}: ", "model.")), message  # the file, or a tensor by name
    assert "\n" not in message
    return False


def test_the_parts_are_those_of_the_file(files: list[bytes], tmp_path: Path) -> None:
    for raw in files:
        path = tmp_path / "x.smol"
        path.write_bytes(Parts.of(raw).written())
        assert ran(path, "int8", 1)


def check(path: Path, way: Way, number: int, good: Sequence[bytes]) -> bool:
    """Write a broken copy of one of the files, and say whether it is still a model."""
    rng = random.Random(f"{SEED} {number}")
    path.write_bytes(way(rng, rng.choice(good)))
    try:
        return ran(path, rng.choice(native.KV_KINDS), rng.choice([1, 1, 1, 2]))
    except Exception as error:
        raise AssertionError(f"file {number} of seed {SEED}: {way.__name__}") from error


@pytest.mark.timeout(3600)
def test_any_smol_file_is_an_error_or_a_model(files: list[bytes], tmp_path: Path) -> None:
    """cases: W11, X6; issue: 10,000 mutated files."""
    models = dict.fromkeys(WAYS, 0)
    for number in range(FILES):
        way = WAYS[number % len(WAYS)]
        models[way] += check(tmp_path / "fuzz.smol", way, number, files)
    assert models[any_bytes] == len(range(0, FILES, len(WAYS)))  # nothing is wrong with those
    assert 0 < models[other_config] < FILES // len(WAYS)
    assert 0 < models[some_bytes] < FILES // len(WAYS)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ending", [".gguf", ".bin"])
def test_other_formats_too(ending: str, tmp_path: Path) -> None:
    """GGUF, and the Dart package's .smol, whose hashes let no changed weight through."""
    config = tiny_config(num_hidden_layers=1, vocab_size=40)
    weights = random_weights(config)
    if ending == ".gguf":
        paths = [
            write_gguf(tmp_path / f"{kind}.gguf", config, weights, kind)
            for kind in ("Q8_0", "Q4_1", "BF16", "F32")
        ]
    else:
        tokens = ["a", "b", "ab", "<x>", *(f"t{i}" for i in range(36))]
        vocabulary = Vocabulary(tokens, [("a", "b")], [("<x>", 3)])
        paths = [
            write_dart(tmp_path / f"{quant}.bin", config, weights, quant, vocabulary)
            for quant in QUANT_IDS
        ]
    assert all(ran(path, "int16", 1) for path in paths)
    good = [path.read_bytes() for path in paths]
    models = 0
    for number in range(FILES // 4):
        way = (some_bytes, other_length)[number % 2]
        models += check(tmp_path / f"fuzz{ending}", way, number, good)
    assert models < FILES // 8  # most of them are none
