"""Random model: a GGUF file of a size whose weights cannot be had here, for measuring speed.

    python benchmarks/random_model.py 360M VOCABULARY.gguf TARGET.gguf

The matrices are random Q8_0 groups, made and written one tensor at a time; the norms are ones. The
tokenizer is that of VOCABULARY.gguf, so that every engine opens the file as it opens a real one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from smollm2.config import Config
from smollm2.formats.gguf import open_gguf

_BASE = Config(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
)
SIZES: Mapping[str, Config] = {
    "135M": _BASE,
    "360M": replace(
        _BASE,
        hidden_size=960,
        intermediate_size=2560,
        num_hidden_layers=32,
        num_attention_heads=15,
        num_key_value_heads=5,
    ),
    "1.7B": replace(
        _BASE,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        rope_theta=130000.0,
    ),
}
"""The three sizes of SmolLM2, as the config.json of each has them."""

_GROUP = 32
_Q8_0 = gguf.GGMLQuantizationType.Q8_0
_VOCABULARY = "tokenizer."
_UNIFORM_DEVIATION = 127 / 3**0.5


def write_random(path: Path, config: Config, vocabulary: Path, seed: int = 0) -> None:
    """Write a GGUF file with tied or untied head; ``vocabulary`` is another, with a tokenizer.

    Matrices [rows, cols] have a standard deviation of cols^-1/2, which keeps the scale of what
    goes through them.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in _metadata(config, vocabulary):
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, shape in config.shapes.items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None
        kind = _Q8_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        size = gguf.quant_shape_to_byte_shape(shape, _Q8_0) if len(shape) == 2 else (4 * shape[0],)
        writer.add_tensor_info(
            theirs, shape, np.dtype(np.float32), int(np.prod(size)), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for shape in config.shapes.values():
        tensor = _groups(rng, *shape) if len(shape) == 2 else np.ones(shape, dtype=np.float32)
        writer.write_tensor_data(tensor)
    writer.close()


def _groups(rng: np.random.Generator, rows: int, cols: int) -> NDArray[Any]:
    """Q8_0 groups of one scale: a half float, then 32 values of a byte."""
    groups = np.empty((rows * cols // _GROUP, 2 + _GROUP), dtype=np.uint8)
    scale = np.float16(1 / (_UNIFORM_DEVIATION * cols**0.5))
    groups[:, :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    groups[:, 2:] = rng.integers(-127, 128, (len(groups), _GROUP), dtype=np.int8).view(np.uint8)
    return groups


def _metadata(config: Config, vocabulary: Path) -> Iterator[tuple[str, Any]]:
    yield "general.file_type", int(gguf.LlamaFileType.MOSTLY_Q8_0)
    yield "general.quantization_version", 2
    yield "llama.block_count", config.num_hidden_layers
    yield "llama.context_length", config.max_position_embeddings
    yield "llama.embedding_length", config.hidden_size
    yield "llama.feed_forward_length", config.intermediate_size
    yield "llama.attention.head_count", config.num_attention_heads
    yield "llama.attention.head_count_kv", config.num_key_value_heads
    yield "llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps
    yield "llama.rope.freq_base", config.rope_theta
    yield "llama.rope.dimension_count", config.head_dim
    yield "llama.vocab_size", config.vocab_size
    for key, value in open_gguf(vocabulary).metadata.items():
        if key.startswith(_VOCABULARY):
            yield key, value


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, np.asarray(value).tolist())


def main() -> None:
    """Write the file that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    write_random(arguments.target, SIZES[arguments.size], arguments.vocabulary)


if __name__ == "__main__":
    main()
