"""ONNX files in onnxruntime, against the entries that they were made of on the NumPy backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from smollm2 import entries
from smollm2.backends import get_backend
from smollm2.cache import Cache
from smollm2.causal_lm import NO_TARGET, CausalLM
from smollm2.checkpoint import Checkpoint, load_checkpoint
from smollm2.config import Config
from smollm2.entries import ENTRIES
from smollm2.errors import CheckpointError, InputError, MissingDependencyError
from smollm2.export import onnx as module
from smollm2.export.binding import bind
from smollm2.export.onnx import export_onnx
from tests.entry_inputs import SIZES, Arrays, page_table, random_inputs, sizes_of
from tests.tiny import random_weights, tiny_config, write_hf

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytest.importorskip("torch")

TWO = {"B": 1, "S": 2}
WITHOUT_CACHE = [name for name, entry in ENTRIES.items() if entry.cache is None]


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


Graphs = Callable[[str], Graph]


class Both:
    """The same calls to graphs and to the NumPy backend, each with a cache of its own."""

    def __init__(self, graphs: Graphs, lm: CausalLM, cache: Cache | None) -> None:
        self.graphs, self.lm, self.cache = graphs, lm, cache
        slots = 0 if cache is None else cache.layout.slots + (not cache.layout.paged)
        config = lm.config
        self.stored = {} if cache is None else zeros(config, slots)

    def __call__(self, name: str, inputs: Arrays) -> NDArray[Any]:
        """The result of both, which must be the same, bar the order of sums."""
        found = self.graphs(name)({**inputs, **self.stored})
        self.stored = {key: found[f"new_{key}"] for key in self.stored}
        result = found[ENTRIES[name].output]
        expected = reference(self.lm, self.cache, name, inputs)
        if ENTRIES[name].output == "ids":
            np.testing.assert_array_equal(result, expected)
        else:
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5)
        return result


def zeros(config: Config, slots: int) -> Arrays:
    """An empty cache of a graph."""
    shape = (slots, config.num_key_value_heads, config.head_dim)
    layers = range(config.num_hidden_layers)
    names = [f"cache_{part}.{layer}" for layer in layers for part in ("keys", "values")]
    return {name: np.zeros(shape, np.float32) for name in names}


def reference(lm: CausalLM, cache: Cache | None, name: str, inputs: Arrays) -> NDArray[Any]:
    """What the entry gives; of loops, as many columns as the graph has."""
    call: Any = getattr(entries, name)
    of_cache = () if cache is None else (cache,)
    given = [value.item() if value.ndim == 0 else value for value in inputs.values()]
    if ENTRIES[name].output != "ids":
        return np.asarray(call(lm, *of_cache, *given))
    result = call(lm, *of_cache, *given, SIZES["Steps"])
    ids = result[0] if isinstance(result, tuple) else result
    return np.pad(ids, ((0, 0), (0, SIZES["Steps"] - ids.shape[1])))


@pytest.fixture(scope="module")
def config() -> Config:
    return tiny_config()


@pytest.fixture(scope="module")
def checkpoint(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("onnx") / "tiny"
    return load_checkpoint(write_hf(folder, config, random_weights(config)))


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


@pytest.fixture
def fixed(graphs: Graphs, lm: CausalLM) -> Both:
    return Both(graphs, lm, lm.new_cache(SIZES["Batch"], SIZES["MaxSeq"]))


@pytest.fixture
def paged(graphs: Graphs, lm: CausalLM) -> Both:
    return Both(graphs, lm, lm.new_paged_cache(SIZES["Pool"]))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("name", WITHOUT_CACHE)
def test_entries_without_a_cache(name: str, graphs: Graphs, lm: CausalLM) -> None:
    both = Both(graphs, lm, None)
    for seed in range(4):
        inputs = random_inputs(name, np.random.default_rng(seed))
        if "targets" in inputs:
            inputs["targets"][::3] = NO_TARGET
        if "weights" in inputs:
            inputs["weights"][1::3] = 0
            inputs["targets"][1::3] = 10**6  # of weight 0: may be anything
        both(name, inputs)


def test_prompts_in_two_parts_and_then_steps(fixed: Both, rng: np.random.Generator) -> None:
    for stored in (0, SIZES["S"]):
        fixed("prefill", random_inputs("prefill", rng, [stored] * 3))
    length = 2 * SIZES["S"]
    fixed("decode", random_inputs("decode", rng, [length] * 3))
    fixed("decode_rows", random_inputs("decode_rows", rng, [length + 1, 0, length + 1]))
    scratch = 3 * SIZES["MaxSeq"]
    for part in fixed.stored.values():
        assert part[16 + length].any()
        assert not part[16 + length + 1 : 32].any(), "an idle row was written"
        assert part[scratch].any(), "padding goes to scratch"


def test_rows_of_their_own(fixed: Both, rng: np.random.Generator) -> None:
    inputs = random_inputs("prefill_slots", rng, [0, 7, 0])
    inputs["lengths"] = np.array([4, 0], np.int32)
    fixed("prefill_slots", inputs)
    assert fixed.cache is not None
    before = {key: part.copy() for key, part in fixed.stored.items()}
    stored = list(fixed.cache.lengths)
    assert sorted(stored) == [0, 0, 4]
    fixed("prefill_packed", random_inputs("prefill_packed", rng, stored))
    row = stored.index(4) * SIZES["MaxSeq"]
    for key, part in fixed.stored.items():
        untouched = slice(row, row + SIZES["MaxSeq"])
        np.testing.assert_array_equal(part[untouched], before[key][untouched])
    fixed("decode_rows", random_inputs("decode_rows", rng, fixed.cache.lengths))


def test_prompts_and_steps_in_one_pass(fixed: Both, rng: np.random.Generator) -> None:
    fixed("prefill_packed", random_inputs("prefill_packed", rng, [0, -1, 0]))
    assert fixed.cache is not None
    for _ in range(2):
        fixed("step_packed", random_inputs("step_packed", rng, fixed.cache.lengths))


def test_pages_in_any_order(paged: Both, rng: np.random.Generator) -> None:
    table = page_table(rng)
    table[0, 0], table[2, 0] = 8, 1
    rng.shuffle(table[1])
    stored = [0, 0, 0]
    for _ in range(3):
        inputs = random_inputs("prefill_paged", rng, stored, table=table)
        paged("prefill_paged", inputs)
        for row, last in enumerate(inputs["last"].tolist()):
            stored[row] = int(inputs["positions"][last]) + 1 if last >= 0 else stored[row]
    assert min(stored) > 0
    paged("decode_paged", random_inputs("decode_paged", rng, [*stored[:2], 0], table=table))


def test_steps_across_a_border_of_pages(paged: Both, rng: np.random.Generator) -> None:
    table = page_table(rng)
    for start in range(0, 60, 12):
        inputs = random_inputs("prefill_paged", rng, [0, 0, 0], table=table)
        inputs["rows"][:], inputs["positions"] = 1, np.arange(start, start + 12, dtype=np.int32)
        inputs["slots"] = table[1, 0] * 64 + inputs["positions"]
        inputs["last"] = np.array([-1, 11, -1], np.int32)
        paged("prefill_paged", inputs)
    paged("step_paged", random_inputs("step_paged", rng, [0, 60, 0], table=table))
    for position in range(61, 66):
        inputs = random_inputs("decode_paged", rng, [0, position, 0], table=table)
        paged("decode_paged", inputs)


@pytest.mark.parametrize("name", ["prefill_packed", "step_packed", "hidden_packed"])
def test_padding_changes_nothing(
    name: str, graphs: Graphs, lm: CausalLM, rng: np.random.Generator
) -> None:
    inputs = random_inputs(name, rng, [0, 3, 0])
    if ENTRIES[name].cache is not None:
        inputs |= zeros(lm.config, 3 * SIZES["MaxSeq"] + 1)
    padding = inputs["segments"] < 0
    assert padding.any()
    first = graphs(name)(inputs)
    for key in {"tokens", "positions", "rows"} & inputs.keys():
        inputs[key][padding] = 2
    for key, value in graphs(name)(inputs).items():
        slots = slice(None, -1) if key.startswith("new_cache") else slice(None)  # bar scratch
        np.testing.assert_array_equal(value[slots], first[key][slots])


def test_greedy_steps_unrolled(fixed: Both, rng: np.random.Generator) -> None:
    fixed("prefill", random_inputs("prefill", rng, [0] * 3))
    ids = fixed("generate", random_inputs("generate", rng, [5] * 3))
    assert ids.dtype == np.int32


@pytest.mark.parametrize(("key", "temperature"), [(0, 1.0), (12345, 0.7), (2**31 - 2, 3), (7, 0)])
def test_sampled_steps(key: int, temperature: float, fixed: Both, rng: np.random.Generator) -> None:
    fixed("prefill", random_inputs("prefill", rng, [0] * 3))
    inputs = random_inputs("sample", rng, [5] * 3)
    inputs["key"] = np.array(key, np.int32)
    inputs["temperature"] = np.array(temperature, np.float32)
    fixed("sample", inputs)


def test_steps_until_a_row_has_ended(
    fixed: Both, lm: CausalLM, graphs: Graphs, rng: np.random.Generator
) -> None:
    fixed("prefill", random_inputs("prefill", rng, [0] * 3))
    inputs = random_inputs("generate_until", rng, [5] * 3)
    inputs["eos"] = np.array(-1, np.int32)
    free = graphs("generate_until")({**inputs, **fixed.stored})
    assert free["counts"].tolist() == [3, 3, 3]
    inputs["eos"] = np.array(free["ids"][1, 1])
    found = graphs("generate_until")({**inputs, **fixed.stored})
    assert fixed.cache is not None
    eos = int(inputs["eos"])
    ids, counts = entries.generate_until(lm, fixed.cache, inputs["token"], 5, eos, 3)
    assert found["counts"].tolist() == counts.tolist()
    np.testing.assert_array_equal(found["ids"][:, : ids.shape[1]], ids)
    ended = 16 + 5 + int(counts[1])
    assert not found["new_cache_keys.0"][ended : 16 + 16].any(), "an ended row was fed"


def test_names_shapes_and_metadata(graphs: Graphs, config: Config) -> None:
    session = graphs("prefill").session
    shapes = {item.name: item.shape for item in session.get_inputs()}
    caches = [*zeros(config, 1)]
    cache = {key: [3 * 16 + 1, 2, 16] for key in caches}
    assert shapes == {"tokens": [3, 5], "pos": [], **cache}
    assert graphs("prefill").outputs == ["logits", *(f"new_{name}" for name in caches)]
    metadata = session.get_modelmeta().custom_metadata_map
    assert metadata["smollm2.entry"] == "prefill"
    assert json.loads(metadata["smollm2.sizes"]) == {"Batch": 3, "S": 5, "MaxSeq": 16}
    assert Config.from_dict(json.loads(metadata["smollm2.config"])) == config
    assert metadata["smollm2.signature"].startswith("prefill(tokens [Batch, S], pos) → logits")


@pytest.mark.usefixtures("traced")
def test_weights_keep_their_names(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    said: list[str] = []
    exported = export_onnx(checkpoint, path, entry="next_token", sizes=TWO, say=said.append)
    assert said == ["tracing next_token", "writing x.onnx", "checking x.onnx"]
    assert exported.nbytes == path.stat().st_size
    assert [(kind.kind, kind.tensors) for kind in exported.kinds] == [("F32", 20)]
    held = {item.name: item for item in onnx.load(path).graph.initializer}
    for name, weight in checkpoint.weights.items():
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(held[name]), weight)
    assert [item.name for item in tmp_path.iterdir()] == ["x.onnx"]


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


def test_half_precision(checkpoint: Checkpoint, lm: CausalLM, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    export_onnx(checkpoint, path, entry="next_token", sizes={"B": 1, "S": 6}, dtype="float16")
    tokens = np.arange(6, dtype=np.int32)[None] + 3
    result = Graph(path)({"tokens": tokens})["logits"]
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, entries.next_token(lm, tokens), atol=0.03)


@pytest.mark.usefixtures("traced")
def test_a_failure_leaves_what_was_there(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(b"old")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnx.checker.check_model", fail)
    with pytest.raises(OSError, match="No space left"):
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
