"""The .smol format, versions 1 and 2: what the Dart package ``smollm2`` writes. Read only.

Layout, little-endian, nothing aligned or padded: ``SMOL``, u32 version, (version 2: u32 quant id,
u32 reserved,) seven u32 and two f32 of the architecture, u32 tokens, u32 merges, the tokens, the
merges, (since 1.0.6: the added tokens,) then the tensors in a fixed order. A string is a u32 length
and UTF-8. Merges were one string at first (``"a b"``) and two later, so three layouts share
version 2 and nothing tells them apart but their length: merges written in one way are longer if
read as the other, and an added list is at least its count. So at most one layout ends where the
file does, and that one is taken.

Norms are plain f32. ``q8`` and ``q16`` have one f32 scale for a whole tensor, two u32 hashes, and
int8 or int16; ``bf16`` has the values, then the hashes. The hashes cover the values alone. They
cannot be computed in parallel: without the extension a big file takes minutes, so export it once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import FormatError
from smollm2.extension import compiled
from smollm2.formats.tensorfile import DENSE_DTYPES, TensorEntry, map_bytes

Integers = NDArray[np.integer[Any]]
Layout = Literal["joined merges", "paired merges", "added tokens"]
LAYOUTS: tuple[Layout, ...] = ("added tokens", "paired merges", "joined merges")

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
"""The seven u32 of the header, under Hugging Face's names."""

_QUANTS: Mapping[int, str] = {1: "q8", 2: "q16", 4: "bf16"}
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "q8": np.dtype("i1"),
    "q16": np.dtype("<i2"),
    "bf16": np.dtype("<u2"),
    "f32": np.dtype("<f4"),
}
_HASHED: Mapping[str, str] = {"|i1": "q8", "<i2": "q16", "<u2": "bf16"}
_HASHES = 8
_MASK_32, _MASK_64 = 2**32 - 1, 2**64 - 1
_OFFSET, _PRIME_1, _PRIME_2 = 2166136261, 16777619, 2246822519
_CHUNK = 2**16
_U32 = Struct("<I")


@dataclass(frozen=True)
class DartFile:
    """An opened file: header, vocabulary, and tensors under canonical names.

    ``sizes`` are those of ``SIZES``; ``added`` lists (text, id), None in the layouts without.
    """

    path: Path
    version: int
    quant: str
    layout: Layout
    sizes: Mapping[str, int]
    rope_theta: float
    rms_norm_eps: float
    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    added: tuple[tuple[str, int], ...] | None
    tensors: Mapping[str, TensorEntry]
    data: NDArray[np.uint8] = field(repr=False)

    def read(self, name: str) -> NDArray[Any]:
        """A tensor as float32, or as bfloat16 where it is stored so; its hashes are checked.

        Raises ``FormatError`` for a tensor that is damaged.
        """
        entry = self.tensors[name]
        raw = self.data[entry.offset : entry.offset + entry.nbytes].tobytes()
        scaled = entry.kind in ("q8", "q16")
        scale = np.frombuffer(raw[:4], dtype="<f4")[0] if scaled else np.float32(1)
        start = 4 + _HASHES if scaled else 0
        values = np.frombuffer(
            raw, dtype=_DTYPES[entry.kind], count=math.prod(entry.shape), offset=start
        )
        if entry.kind == "f32":
            return values.reshape(entry.shape)
        stored = raw[4:start] if scaled else raw[-_HASHES:]
        if hashes_of(values) != (_U32.unpack_from(stored)[0], _U32.unpack_from(stored, 4)[0]):
            raise FormatError(f"{self.path}: tensor {name!r} is damaged: its hashes do not match")
        if not scaled:
            return values.view(DENSE_DTYPES["BF16"]).reshape(entry.shape)
        if not 0 < scale < np.inf:
            raise FormatError(f"{self.path}: tensor {name!r} has the scale {scale}")
        dense: NDArray[np.float32] = np.multiply(values, scale, dtype=np.float32)
        return dense.reshape(entry.shape)


def open_dart(path: Path) -> DartFile:
    """Map a file and check its structure; the tensors' hashes are checked when they are read.

    Raises ``FormatError`` for what the format forbids, for quants that the Dart package does not
    read itself, and for a file that ends where none of the layouts ends.
    """
    data = map_bytes(path)
    reader = _Reader(path, data)
    if reader.size < 4 or reader.take(4, "the magic") != b"SMOL":
        raise reader.error("not a .smol file: it does not start with 'SMOL'")
    version = reader.u32("the version")
    if version not in (1, 2):
        raise reader.error(f".smol version {version} is not one of the Dart package's: 1 and 2")
    quant = "q8" if version == 1 else _quant(reader)
    sizes = _sizes(reader)
    rope_theta, rms_norm_eps = (
        float(np.frombuffer(reader.take(4, name), dtype="<f4")[0]) for name in ("rope", "epsilon")
    )
    shapes = _shapes(sizes)
    tensor_bytes = _tensor_bytes(sizes, quant)
    if tensor_bytes > reader.size:
        raise reader.error(
            f"tensors of {tensor_bytes} bytes do not fit a file of {reader.size}: "
            "it is cut short or broken"
        )
    start = reader.size - tensor_bytes
    layout, vocabulary = _vocabulary(reader, start)
    return DartFile(
        path=path,
        version=version,
        quant=quant,
        layout=layout,
        sizes=MappingProxyType(sizes),
        rope_theta=rope_theta,
        rms_norm_eps=rms_norm_eps,
        tokens=vocabulary.tokens,
        merges=vocabulary.merges,
        added=vocabulary.added,
        tensors=MappingProxyType(dict(_entries(shapes, quant, start))),
        data=data,
    )


def hashes_of(values: Integers) -> tuple[int, int]:
    """The two hashes of a tensor: int8 of q8, int16 of q16, or the bits of bf16 as uint16.

    Of whole numbers they are taken forwards and backwards. The first is FNV-1a over sign-extended
    values, of which 32 bits are kept. The second mixes the low byte of ``v ^ (v << 5)`` in 64 bits:
    multiplied, then ``(h << 13) | (h >> 19)``. Of bf16 they are FNV-1a, and another prime over
    ``v >> 1``.
    """
    native = compiled("dart_hashes")
    if native is None:
        return hashes_reference(values)
    first, second = native(np.ascontiguousarray(values).view(np.uint8), _HASHED[values.dtype.str])
    return first, second


def hashes_reference(values: Integers) -> tuple[int, int]:
    """Do what ``hashes_of`` does, in Python."""
    if values.dtype == np.uint16:
        return _hashes_of_bf16(values)
    first, second = _OFFSET, _OFFSET ^ 0x9E3779B9
    wide = values.astype(np.int32)
    mixed = ((wide ^ (wide << 5)) & 0xFF)[::-1]
    for start in range(0, len(wide), _CHUNK):
        part = slice(start, start + _CHUNK)
        for forward, backward in zip(wide[part].tolist(), mixed[part].tolist(), strict=True):
            first = (first ^ forward) * _PRIME_1 & _MASK_32
            second = (second ^ backward) * _PRIME_2 & _MASK_64
            second = (second << 13 & _MASK_64) | second >> 19
    return first, second & _MASK_32


def _hashes_of_bf16(values: Integers) -> tuple[int, int]:
    first = second = _OFFSET
    for start in range(0, len(values), _CHUNK):
        for bits in values[start : start + _CHUNK].tolist():
            first = (first ^ bits) * _PRIME_1 & _MASK_32
            second = (second ^ bits >> 1) * _PRIME_2 & _MASK_32
    return first, second


class _Reader:
    """A cursor over the file that never reads beyond ``end``."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path = path
        self.size = self.end = len(data)
        self.position = 0
        self._view = data.data

    def error(self, text: str) -> FormatError:
        return FormatError(f"{self.path}: {text}")

    def take(self, count: int, what: str) -> bytes:
        stop = self.position + count
        if stop > self.end:
            raise self.error(f"the file ends inside {what}")
        taken = self._view[self.position : stop].tobytes()
        self.position = stop
        return taken

    def u32(self, what: str) -> int:
        value: int = _U32.unpack(self.take(4, what))[0]
        return value

    def strings(self, count: int, what: str) -> tuple[str, ...]:
        if count > (self.end - self.position) // 4:
            raise self.error(f"{count} {what} do not fit the file")
        try:
            return tuple(str(self.take(self.u32(what), what), "utf-8") for _ in range(count))
        except UnicodeDecodeError as error:
            raise self.error(f"{what} are not UTF-8: {error.reason}") from None


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    added: tuple[tuple[str, int], ...] | None


def _quant(reader: _Reader) -> str:
    number = reader.u32("the quant id")
    reader.u32("the reserved field")
    if number not in _QUANTS:
        known = ", ".join(f"{i} ({name})" for i, name in _QUANTS.items())
        raise reader.error(f"quant id {number} is not supported: supported are {known}")
    return _QUANTS[number]


def _sizes(reader: _Reader) -> dict[str, int]:
    sizes = {name: reader.u32(name) for name in SIZES}
    for name, size in sizes.items():
        if size == 0:
            raise reader.error(f"{name} is 0")
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise reader.error(
            f"hidden_size {sizes['hidden_size']} is not a multiple of num_attention_heads "
            f"{sizes['num_attention_heads']}"
        )
    return sizes


def _shapes(sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors in the order of the file, under their canonical names."""
    hidden = sizes["hidden_size"]
    yield "model.embed_tokens.weight", (sizes["vocab_size"], hidden)
    for layer in range(sizes["num_hidden_layers"]):
        for name, shape in _layer_shapes(sizes).items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)


def _layer_shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, mlp = sizes["hidden_size"], sizes["intermediate_size"]
    key = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    return {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    scale = {"q8": 4, "q16": 4}.get(kind, 0)
    return math.prod(shape) * _DTYPES[kind].itemsize + (0 if kind == "f32" else scale + _HASHES)


def _tensor_bytes(sizes: Mapping[str, int], quant: str) -> int:
    """Bytes of all tensors, without going through layers that a broken file only claims."""

    def size(shape: tuple[int, ...]) -> int:
        return _nbytes(shape, quant if len(shape) == 2 else "f32")

    layer = sum(map(size, _layer_shapes(sizes).values()))
    hidden = sizes["hidden_size"]
    ends = size((sizes["vocab_size"], hidden)) + size((hidden,))
    return ends + sizes["num_hidden_layers"] * layer


def _entries(
    shapes: Iterator[tuple[str, tuple[int, ...]]], quant: str, position: int
) -> Iterator[tuple[str, TensorEntry]]:
    for name, shape in shapes:
        kind = quant if len(shape) == 2 else "f32"
        entry = TensorEntry(name, kind, shape, position, _nbytes(shape, kind))
        position += entry.nbytes
        yield name, entry


def _vocabulary(reader: _Reader, end: int) -> tuple[Layout, _Vocabulary]:
    """Read the vocabulary in the layout that ends at ``end``, where the tensors begin."""
    reader.end = end
    count, merge_count = reader.u32("the number of tokens"), reader.u32("the number of merges")
    tokens = reader.strings(count, "tokens")
    start = reader.position
    for layout in LAYOUTS:
        reader.position = start
        try:
            merges, added = _merges(reader, merge_count, layout)
        except FormatError:
            continue
        if reader.position == end:
            return layout, _Vocabulary(tokens, merges, added)
    raise reader.error(
        f"the vocabulary ends at no place where the tensors can begin: none of the layouts "
        f"{', '.join(LAYOUTS)} fits, or the file is cut short or broken"
    )


def _merges(
    reader: _Reader, count: int, layout: Layout
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, int], ...] | None]:
    if layout == "joined merges":
        pairs = [text.split(" ") for text in reader.strings(count, "merges")]
        if not all(len(pair) == 2 for pair in pairs):
            raise reader.error("a merge is not a pair")
        return tuple((pair[0], pair[1]) for pair in pairs), None
    texts = reader.strings(2 * count, "merges")
    merges = tuple(zip(texts[0::2], texts[1::2], strict=True))
    if layout == "paired merges":
        return merges, None
    added: list[tuple[str, int]] = []
    for _ in range(reader.u32("the number of added tokens")):
        (text,) = reader.strings(1, "added tokens")
        added.append((text, reader.u32("an added token's id")))
    return merges, tuple(added)
