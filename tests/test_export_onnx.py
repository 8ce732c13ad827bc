"""ONNX files in onnxruntime, against the entries that they were made of on the NumPy backend."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smollm2 import entries
from smollm2.backends import get_backend
from smollm2.causal_lm import CausalLM
from smollm2.checkpoint import Checkpoint, load_checkpoint
from smollm2.config import Config
from smollm2.entries import ENTRIES
from smollm2.errors import CheckpointError, InputError, MissingDependencyError
from smollm2.export import onnx as module
from smollm2.export.binding import bind
from smollm2.export.onnx import export_onnx
from tests.entry_inputs import Arrays, sizes_of
from tests.graph_rules import CACHES, CONFIG, WEIGHTS, GraphRules, Graphs
from tests.tiny import random_weights, tiny_config, write_hf

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytest.importorskip("torch")

TWO = {"B": 1, "S": 2}


class Graph:
    """An ONNX file in onnxruntime."""

    def __init__(self, path: Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.outputs = [output.name for output in self.session.get_outputs()]

    def __call__(self, inputs: Arrays) -> Arrays:
        results = self.session.run(None, inputs)
        return dict(zip(self.outputs, results, strict=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("onnx") / "tiny"
    return load_checkpoint(write_hf(folder, CONFIG, WEIGHTS))


@pytest.fixture(scope="module")
def lm(checkpoint: Checkpoint) -> CausalLM:
    return get_backend("numpy").load(checkpoint.config, checkpoint.weights)


@pytest.fixture(scope="module")
def graphs(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    """Graphs of entries, each written once."""
    folder = tmp_path_factory.mktemp("graphs")
    made: dict[str, Graph] = {}

    def graph(name: str) -> Graph:
        if name not in made:
            path = folder / f"{name}.onnx"
            export_onnx(checkpoint, path, entry=name, sizes=sizes_of(ENTRIES[name]))
            made[name] = Graph(path)
        return made[name]

    return graph


@pytest.fixture(scope="module")
def program(checkpoint: Checkpoint) -> Any:
    """``next_token`` of two tokens as torch's exporter makes it, for tests of the file alone."""
    return module._program(checkpoint, bind("next_token", checkpoint.config, TWO), "float32")


@pytest.fixture
def traced(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is traced."""
    monkeypatch.setattr(module, "_program", lambda *_: program)


class TestRules(GraphRules):
    """What every export of entries keeps to."""


def test_names_shapes_and_metadata(graphs: Any) -> None:
    session = graphs("prefill").session
    shapes = {item.name: item.shape for item in session.get_inputs()}
    cache = {key: [3 * 16 + 1, 2, 16] for key in CACHES}
    assert shapes == {"tokens": [3, 5], "pos": [], **cache}
    assert graphs("prefill").outputs == ["logits", *(f"new_{name}" for name in CACHES)]
    metadata = session.get_modelmeta().custom_metadata_map
    assert metadata["smollm2.entry"] == "prefill"
    assert json.loads(metadata["smollm2.sizes"]) == {"Batch": 3, "S": 5, "MaxSeq": 16}
    assert Config.from_dict(json.loads(metadata["smollm2.config"])) == CONFIG
    assert metadata["smollm2.signature"].startswith("prefill(tokens [Batch, S], pos) → logits")
    assert "finite everywhere" in metadata["smollm2.notes"]


@pytest.mark.usefixtures("traced")
def test_weights_keep_their_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    said: list[str] = []
    exported = export_onnx(checkpoint, path, entry="next_token", sizes=TWO, say=said.append)
    assert said == ["tracing next_token with B=1, S=2", "writing x.onnx", "checking x.onnx"]
    assert exported.nbytes == path.stat().st_size
    assert [(kind.kind, kind.tensors) for kind in exported.kinds] == [("F32", 20)]
    held = {item.name: item for item in onnx.load(path).graph.initializer}
    for name, weight in checkpoint.weights.items():
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(held[name]), weight)
    assert [item.name for item in tmp_path.iterdir()] == ["x.onnx"]
    assert b".py" not in path.read_bytes(), "a place in the source of who exported"


@pytest.mark.usefixtures("traced")
def test_weights_beside_the_file(
    checkpoint: Checkpoint, lm: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = tmp_path / "x.onnx", tmp_path / "x.onnx.data"
    call: Any = partial(export_onnx, checkpoint, path, entry="next_token", sizes=TWO)
    with monkeypatch.context() as patch:
        patch.setattr(module, "SINGLE_FILE", 1000)
        exported = call()
    assert sorted(tmp_path.iterdir()) == [path, data]
    assert exported.nbytes == path.stat().st_size + data.stat().st_size
    tokens = np.array([[5, 7]], np.int32)
    result = Graph(path)({"tokens": tokens})["logits"]
    np.testing.assert_allclose(result, entries.next_token(lm, tokens), atol=2e-5)
    path.unlink()
    with pytest.raises(InputError, match=r"x\.onnx\.data: exists: give another name, or --force"):
        call()
    call(force=True)
    assert [*tmp_path.iterdir()] == [path]


def test_a_cache_that_this_machine_could_not_hold(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A graph is made of shapes: 130 GB of keys and values are there where it runs."""
    path = tmp_path / "huge.onnx"
    export_onnx(checkpoint, path, entry="decode", sizes={"B": 2_000_000})
    shapes = {tuple(item.shape) for item in Graph(path).session.get_inputs()}
    assert (2_000_000 * CONFIG.max_position_embeddings + 1, 2, 16) in shapes


def test_half_precision(checkpoint: Checkpoint, lm: CausalLM, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    export_onnx(checkpoint, path, entry="next_token", sizes={"B": 1, "S": 6}, dtype="float16")
    tokens = np.arange(6, dtype=np.int32)[None] + 3
    result = Graph(path)({"tokens": tokens})["logits"]
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, entries.next_token(lm, tokens), atol=0.03)


def test_weights_that_a_dtype_has_no_room_for(tmp_path: Path) -> None:
    """An infinity would be written in their place."""
    weights = random_weights(CONFIG)
    weights.blocks[1].mlp.down[3, 4] = -1e5
    source = load_checkpoint(write_hf(tmp_path / "hf", CONFIG, weights))
    with pytest.raises(InputError, match=r"/hf: .*1\.mlp\.down.* 1e\+05 are too large for F16"):
        export_onnx(source, tmp_path / "x.onnx", entry="forward", sizes=TWO, dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.usefixtures("traced")
def test_a_failure_leaves_what_was_there(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(b"old")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnx.checker.check_model", fail)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        export_onnx(checkpoint, path, entry="next_token", sizes=TWO, force=True)
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_what_cannot_be_exported(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: Any = export_onnx
    path, sizes = tmp_path / "x.onnx", TWO
    with pytest.raises(InputError, match="no entry named 'prefil': did you mean prefill"):
        call(checkpoint, path, entry="prefil", sizes=sizes)
    with pytest.raises(InputError, match="dtype is 'bfloat16': it must be one of float32, float1"):
        call(checkpoint, path, entry="forward", sizes=sizes, dtype="bfloat16")
    with pytest.raises(InputError, match=r"give one that ends in \.onnx"):
        call(checkpoint, tmp_path / "x.gguf", entry="forward", sizes=sizes)
    with pytest.raises(InputError, match=r"/no/x\.onnx: there is no folder .*/no: make it first"):
        call(checkpoint, tmp_path / "no" / "x.onnx", entry="forward", sizes=sizes)
    other = replace(checkpoint, config=tiny_config(num_hidden_layers=3))
    with pytest.raises(CheckpointError, match="other names or shapes than the config"):
        call(other, path, entry="forward", sizes=sizes)
    path.touch()
    with pytest.raises(InputError, match=r"x\.onnx: exists: give another name, or --force"):
        call(checkpoint, path, entry="forward", sizes=sizes)
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "onnxscript" else True)
    with pytest.raises(MissingDependencyError, match=r"onnxscript, .* 'smollm2\[export\]'$"):
        call(checkpoint, path, entry="forward", sizes=sizes, force=True)
    assert path.stat().st_size == 0
