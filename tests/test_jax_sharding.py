"""Weights that two devices share in JAX: the same results, and how few sums that takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from smollm2.backends import get_backend
from smollm2.batch import Batch, Span
from smollm2.errors import InputError
from smollm2.weights import HEAD
from tests.conftest import REPOSITORY
from tests.tiny import random_weights, tiny_config
from tests.training import assert_same_gradients

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

from jax.sharding import Mesh  # noqa: E402

from smollm2.backends.jax import losses  # noqa: E402

CONFIG = tiny_config(tie_word_embeddings=False)
PAIRS = [("one", "two"), ("tied", "mesh")]
_COLLECTIVE = re.compile(
    r"= \(?((?:\w+\[[\d,]*\]\S*,? ?)+)\)? (all-\w+|reduce-scatter|collective-\w+)\("
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What ``tests.sharded_jax`` computes, in a process with two devices."""
    path = tmp_path_factory.mktemp("sharded") / "runs.npz"
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    subprocess.run(
        [sys.executable, "-m", "tests.sharded_jax", str(path)],
        cwd=REPOSITORY,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=True,
    )
    return dict(np.load(path))


def collectives(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Kind and shape of each array that a compiled program exchanges."""
    return [
        (kind, tuple(int(size) for size in dims.split(",") if size))
        for shapes, kind in _COLLECTIVE.findall(text)
        for dims in re.findall(r"\[([\d,]*)\]", shapes)
    ]


@pytest.mark.parametrize("name", ["logits", "log_probs", "decode", "paged", "loss"])
def test_two_devices_give_what_one_gives(runs: Any, name: str) -> None:
    """Feature row 114."""
    for one, two in PAIRS:
        if f"{one}/{name}" in runs:
            expected = runs[f"{one}/{name}"]
            np.testing.assert_allclose(runs[f"{two}/{name}"], expected, rtol=1e-5, atol=1e-5)


def test_logits_are_those_of_numpy(runs: Any) -> None:
    ids = np.random.default_rng(7).integers(0, 96, 30).tolist()
    reference = get_backend("numpy").load(CONFIG, random_weights(CONFIG, seed=3))
    expected = reference.forward(Batch.build([Span(0, 0, ids, "all")]))
    np.testing.assert_allclose(runs["two/logits"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("run", ["one", "two", "tied", "mesh", "single"])
def test_a_module_of_shards_computes_on(runs: Any, run: str) -> None:
    """As trained: its layers have been taken out of a stack, and the cache is split as before."""
    np.testing.assert_allclose(runs[f"{run}/as_nnx"], runs[f"{run}/prompt"], rtol=1e-5, atol=1e-5)
    assert runs[f"{run}/as_nnx_split"] == runs[f"{run}/cache_split"]


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_greedy_ids_are_the_same(runs: Any, one: str, two: str) -> None:
    assert runs[f"{one}/ids"].tolist() == runs[f"{two}/ids"].tolist()


def test_ids_that_are_chosen_on_the_devices_are_the_same(runs: Any) -> None:
    assert runs["one/sampled"].tolist() == runs["two/sampled"].tolist()
    assert len(runs["one/sampled"]) == 3


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_gradients_are_the_same(runs: Any, one: str, two: str) -> None:
    sides = [
        {key.split(":")[1]: value for key, value in runs.items() if key.startswith(f"{run}/grad:")}
        for run in (one, two)
    ]
    assert_same_gradients(sides[1], sides[0])


def test_matrices_caches_and_gradients_are_split(runs: Any) -> None:
    for run, layers in (("two", 1), ("mesh", 2)):
        names = [name for name in CONFIG.shapes if not name.startswith("model.layers.")]
        names += [name for name in CONFIG.shapes if name.startswith("model.layers.")][: 9 * layers]
        matrices = {name for name in names if len(CONFIG.shapes[name]) == 2}
        assert set(runs[f"{run}/split"].tolist()) == matrices - ({HEAD} if run == "mesh" else set())
        assert runs[f"{run}/cache_split"]
    assert runs["one/split"].tolist() == []
    assert not runs["one/cache_split"]


def test_decode_adds_up_once_an_attention_and_once_an_mlp(runs: Any) -> None:
    """One token of 64 values each time, and once more for its embedding; logits stay split.

    Where layers are steps of a loop there are two sums in it, else two for each layer.
    """
    for run, layers in (("two", 1), ("mesh", CONFIG.num_hidden_layers)):
        sums = collectives(str(runs[f"{run}/decode_text"]))
        assert sums == [("all-reduce", (1, 64))] * (1 + 2 * layers)
    assert collectives(str(runs["one/decode_text"])) == []


@pytest.mark.parametrize("run", ["two", "mesh"])
def test_the_loss_exchanges_no_logits(runs: Any, run: str) -> None:
    """The vocabulary-parallel loss: of each token a few sums, of its hidden state the gradient."""
    exchanged = collectives(str(runs[f"{run}/loss_text"]))
    assert {kind for kind, _ in exchanged} == {"all-reduce"}
    split, chunk = CONFIG.vocab_size // 2, losses.LOGITS_CHUNK
    assert ("all-reduce", (chunk,)) in exchanged
    assert not any({split, 2 * split} & set(shape[1:]) for _, shape in exchanged)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel=3 does not divide .* choose from 1, 2$"),
        ({"tensor_parallel": 0}, "tensor_parallel=0 does not divide"),
        ({"tensor_parallel": "two"}, "tensor_parallel='two' is not of jax"),
        ({"tensor_parallel": 2, "device": "cpu:0"}, "both say where weights lie"),
    ],
)
def test_what_cannot_be_split_is_an_error(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        get_backend("jax").load(CONFIG, random_weights(CONFIG), **options)


def test_devices_that_are_not_there_are_an_error() -> None:
    if len(jax.devices("cpu")) > 1:
        pytest.skip("there are several devices")
    message = "but JAX finds 1 of cpu: start with JAX_NUM_CPU_DEVICES=2, or give 1 at most"
    with pytest.raises(InputError, match=message):
        get_backend("jax").load(CONFIG, random_weights(CONFIG), tensor_parallel=2, device="cpu")


def test_a_mesh_names_the_axis_that_weights_are_split_over() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b"))
    with pytest.raises(InputError, match=r"axes of the mesh are a, b: name the one .* 'tensor'"):
        get_backend("jax").load(CONFIG, random_weights(CONFIG), tensor_parallel=mesh)
