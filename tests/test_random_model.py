"""benchmarks/random_model.py: the file is one that the gguf package and we read alike."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from random_model import SIZES, write_random

import smollm2
from tests.fakes import write_byte_tokenizer
from tests.tiny import gguf_name, random_weights, tiny_config, write_gguf

CONFIG = tiny_config(vocab_size=260)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizer = write_byte_tokenizer(folder)
    weights = random_weights(CONFIG)
    return write_gguf(folder / "real.gguf", CONFIG, weights, "Q8_0", tokenizer=tokenizer)


@pytest.mark.parametrize("tied", [True, False])
def test_the_gguf_package_reads_it(tmp_path: Path, vocabulary: Path, tied: bool) -> None:
    config = tiny_config(vocab_size=260, tie_word_embeddings=tied)
    path = tmp_path / "random.gguf"
    write_random(path, config, vocabulary)
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert {*found} == {gguf_name(name) for name in config.shapes}
    for name, shape in config.shapes.items():
        tensor = found[gguf_name(name)]
        assert tuple(int(n) for n in reversed(tensor.shape)) == shape
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if len(shape) == 1:
            assert (values == 1).all()
        else:
            assert tensor.tensor_type.name == "Q8_0"
            assert values.std() == pytest.approx(shape[1] ** -0.5, rel=0.1)
            assert abs(values.mean()) < 0.1 * values.std()
    theirs = gguf.GGUFReader(vocabulary).fields
    for key in ("tokens", "merges", "token_type", "pre"):
        name = f"tokenizer.ggml.{key}"
        assert reader.fields[name].contents() == theirs[name].contents()


def test_it_opens_and_writes(tmp_path: Path, vocabulary: Path) -> None:
    path = tmp_path / "random.gguf"
    write_random(path, CONFIG, vocabulary)
    texts = []
    for backend in ("numpy", "native"):
        with smollm2.load(path, backend=backend) as model:
            assert model.config.hidden_size == CONFIG.hidden_size
            assert model.config.num_key_value_heads == CONFIG.num_key_value_heads
            texts.append(model.generate("th", max_tokens=6).token_ids)
            scores = model.score("the quick brown fox")
            assert np.isfinite(scores.mean)
    assert len(texts[0]) == 6
    again = tmp_path / "again.gguf"
    write_random(again, CONFIG, vocabulary)
    assert again.read_bytes() == path.read_bytes()


def test_the_sizes_are_those_of_the_models() -> None:
    """Parameters, the tied tensor once, as the model cards say."""
    counts = {size: config.parameter_count for size, config in SIZES.items()}
    assert counts == {"135M": 134_515_008, "360M": 361_821_120, "1.7B": 1_711_376_384}
