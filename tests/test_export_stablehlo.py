"""StableHLO programs in XLA's own runtime, against the entries that they were made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from smollm2 import entries
from smollm2.backends import get_backend
from smollm2.checkpoint import Checkpoint, load_checkpoint
from smollm2.cli import main
from smollm2.config import Config
from smollm2.entries import ENTRIES
from smollm2.errors import InputError, MissingDependencyError
from smollm2.export.stablehlo import export_stablehlo
from tests.entry_inputs import SIZES, Arrays, random_inputs, sizes_of
from tests.graph_rules import CACHES, CONFIG, WEIGHTS, GraphRules, Graphs
from tests.tiny import random_weights, tiny_config, write_hf

jax = pytest.importorskip("jax")

from jax.extend.mlir import ir  # noqa: E402
from jax.extend.mlir.dialects import stablehlo  # noqa: E402


class Program:
    """A program of text, and of the names that its bytecode has."""

    def __init__(self, text: Path, bytecode: Path, weights: Mapping[str, Any]) -> None:
        with ir.Context() as context:
            module = stablehlo.deserialize_portable_artifact(context, bytecode.read_bytes())
            assert str(module) == text.read_text(encoding="utf-8")
            main = module.body.operations[0]
            facts = module.operation.attributes
            self.facts = {
                name.removeprefix("smollm2."): ir.StringAttr(facts[name]).value
                for name in facts
                if name.startswith("smollm2.")
            }
            self.arguments, self.results = (
                [ir.StringAttr(ir.DictAttr(one)["smollm2.name"]).value for one in attributes]
                for attributes in (main.attributes["arg_attrs"], main.attributes["res_attrs"])
            )
            self.types = [str(ir.RankedTensorType(one).element_type) for one in main.type.inputs]
        device = jax.devices("cpu")[0]
        self._run = device.client.compile_and_load(text.read_text(encoding="utf-8"), [device])
        self._weights = {name: jax.device_put(array, device) for name, array in weights.items()}

    def __call__(self, inputs: Arrays) -> Arrays:
        given = {**self._weights, **{name: jax.device_put(x) for name, x in inputs.items()}}
        results = self._run.execute_sharded([given[name] for name in self.arguments])
        arrays = results.disassemble_into_single_device_arrays()
        return {n: np.asarray(array) for n, (array,) in zip(self.results, arrays, strict=True)}


def exported(
    checkpoint: Checkpoint, folder: Path, name: str, weights: Any = WEIGHTS, **options: Any
) -> Program:
    sizes = options.pop("sizes", None) or sizes_of(ENTRIES[name])
    paths = folder / f"{name}.mlir", folder / f"{name}.mlirbc"
    for path in paths:
        export_stablehlo(checkpoint, path, entry=name, sizes=sizes, **options)
    return Program(*paths, dict(weights.items()))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("stablehlo") / "tiny"
    return load_checkpoint(write_hf(folder, CONFIG, WEIGHTS))


@pytest.fixture(scope="module")
def graphs(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    """Programs of entries, each written once."""
    folder = tmp_path_factory.mktemp("programs")
    made: dict[str, Program] = {}

    def graph(name: str) -> Program:
        if name not in made:
            made[name] = exported(checkpoint, folder, name)
        return made[name]

    return graph


class TestRules(GraphRules):
    """What every export of entries keeps to."""


@pytest.mark.parametrize("name", ENTRIES)
def test_nothing_but_stablehlo_and_names(name: str, graphs: Any) -> None:
    """Arguments: the entry's inputs, its cache, then all weights in file order."""
    program = graphs(name)
    entry = ENTRIES[name]
    cache = [] if entry.cache is None else CACHES
    inputs = [item.name for item in entry.inputs]
    assert program.arguments == [*inputs, *cache, *CONFIG.shapes]
    counts = ["counts"] if name == "generate_until" else []
    assert program.results == [entry.output, *counts, *(f"new_{part}" for part in cache)]
    assert program.facts["entry"] == name
    assert program.facts["signature"] == entry.signature
    assert json.loads(program.facts["sizes"]) == sizes_of(entry)
    assert Config.from_dict(json.loads(program.facts["config"])) == CONFIG
    assert ("finite everywhere" in program.facts["notes"]) == (entry.cache is not None)


def test_programs_hold_no_weights_and_no_places(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The file grows with layers, not with their width; no path of a machine is in it."""
    wide = tiny_config(hidden_size=256, intermediate_size=1024, head_dim=64)
    other = load_checkpoint(write_hf(tmp_path / "wide", wide, random_weights(wide)))
    for suffix in ("mlir", "mlirbc"):
        sizes = []
        for name, source in (("tiny", checkpoint), ("wide", other)):
            path = tmp_path / f"{name}.{suffix}"
            found = export_stablehlo(source, path, entry="prefill", sizes={"B": 1, "S": 8})
            data = path.read_bytes()
            assert found.nbytes == len(data)
            assert found.kinds == ()
            assert b"custom_call" not in data
            assert b".py" not in data
            sizes.append(len(data))
        assert sizes[1] < 1.1 * sizes[0]


def test_an_untied_head_is_an_argument(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=False, num_hidden_layers=1)
    weights = random_weights(config, seed=5)
    checkpoint = load_checkpoint(write_hf(tmp_path / "untied", config, weights))
    program = exported(checkpoint, tmp_path, "next_token", weights)
    assert program.arguments[-1] == "lm_head.weight"
    inputs = random_inputs("next_token", np.random.default_rng(0))
    lm = get_backend("numpy").load(config, weights)
    expected = entries.next_token(lm, inputs["tokens"])
    np.testing.assert_allclose(program(inputs)["logits"], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "bf16"), ("float16", "f16")])
def test_half_precision(checkpoint: Checkpoint, tmp_path: Path, dtype: str, kind: str) -> None:
    of = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    weights = WEIGHTS.map(lambda _, array: array.astype(of))
    program = exported(checkpoint, tmp_path, "prefill", weights, dtype=dtype)
    assert program.types == ["i32", "i32"] + [kind] * (4 + len(CONFIG.shapes))
    inputs = random_inputs("prefill", np.random.default_rng(0), [0] * 3)
    shape = (3 * SIZES["MaxSeq"] + 1, 2, 16)
    caches = {name: np.zeros(shape, of) for name in CACHES}
    found = program({**inputs, **caches})
    lm = get_backend("numpy").load(CONFIG, weights)
    expected = entries.prefill(lm, lm.new_cache(3, 16), inputs["tokens"], 0)
    assert found["logits"].dtype == np.float32
    atol = {"bfloat16": 0.15, "float16": 0.02}[dtype]
    np.testing.assert_allclose(found["logits"], expected, atol=atol)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entry": "prefil"}, "no entry named 'prefil': did you mean prefill"),
        ({"sizes": {"B": 1}}, "S of entry prefill is not bound"),
        ({"sizes": {"B": 1, "S": 8, "Q": 2}}, "entry prefill has no symbol 'Q'"),
        ({"dtype": "int8"}, "dtype is 'int8': it must be one of float32, bfloat16, float16"),
    ],
)
def test_what_cannot_be_written_is_an_error(
    checkpoint: Checkpoint, tmp_path: Path, options: Any, message: str
) -> None:
    given = {"entry": "prefill", "sizes": {"B": 1, "S": 8}, **options}
    with pytest.raises(InputError, match=message):
        export_stablehlo(checkpoint, tmp_path / "x.mlir", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_replaced_only_on_request(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "x.mlir"
    path.write_text("old")
    with pytest.raises(InputError, match=r"x\.mlir: exists"):
        export_stablehlo(checkpoint, path, entry="next_token", sizes={"B": 1, "S": 2})
    assert path.read_text() == "old"
    said: list[str] = []
    export_stablehlo(
        checkpoint,
        path,
        entry="next_token",
        sizes={"B": 1, "S": 2},
        force=True,
        say=said.append,
    )
    assert said == ["tracing next_token with B=1, S=2", "writing x.mlir"]
    assert path.read_text(encoding="utf-8").startswith("module @")


def test_the_command_writes_text_or_bytecode(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The path goes to stdout, all else to stderr."""
    monkeypatch.chdir(tmp_path)
    asked = ["--to", "stablehlo", "--entry", "prefill", "--bind", "B=1", "--bind", "S=8"]
    model = str(checkpoint.path)
    assert main(["export", model, *asked]) == 0
    out, err = capsys.readouterr()
    assert out == "tiny-prefill.mlir\n"
    *stages, remark, total = err.splitlines()
    assert stages == ["tracing prefill with Batch=1, S=8, MaxSeq=256", "writing tiny-prefill.mlir"]
    assert remark == "weights are arguments of the program: their values are not in it"
    assert total.startswith("tiny-prefill.mlir: ")
    text = (tmp_path / "tiny-prefill.mlir").read_text(encoding="utf-8")
    assert "tensor<1x8xi32>" in text
    assert "tensor<257x2x16xf32>" in text
    assert main(["export", model, "-o", "x.mlirbc", "--quant", "bf16", *asked]) == 0
    with ir.Context() as context:
        data = (tmp_path / "x.mlirbc").read_bytes()
        assert "xbf16>" in str(stablehlo.deserialize_portable_artifact(context, data))
    capsys.readouterr()
    assert main(["export", model, "-o", "y.mlir", *asked[:-2]]) == 1
    assert "error: S of entry prefill is not bound" in capsys.readouterr().err
    assert main(["export", model, "--to", "stablehlo"]) == 2
    assert "--to stablehlo needs --entry" in capsys.readouterr().err


def test_jax_is_asked_for_by_name(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smollm2.backends.find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"needs JAX.*pip install 'smollm2\[export\]'"):
        export_stablehlo(checkpoint, tmp_path / "x.mlir", entry="decode", sizes={"B": 1})
