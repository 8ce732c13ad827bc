"""A model split over two processes is the model of one: logits, gradients, memory, talk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smollm2.errors import InputError
from tests.conftest import REPOSITORY
from tests.tiny import tiny_config

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from smollm2.backends.torch import backend  # noqa: E402
from tests import shard_worker  # noqa: E402

LAYERS = 2
SECONDS = 120
"""After which the processes are ended; they take about ten."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """What two processes wrote."""
    folder: Path = tmp_path_factory.mktemp("shards")
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.shard_worker", str(rank), str(folder)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(said)
    return folder


@pytest.fixture(scope="module")
def shards(folder: Path) -> list[Any]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module", params=shard_worker.CONFIGS)
def pair(request: Any, shards: list[Any], tmp_path_factory: Any) -> tuple[str, list[Any], Any]:
    """A name of a config, what two processes made of it, and one alone."""
    name = request.param
    model = shard_worker.load(name)
    one = {
        **shard_worker.answers(model),
        "weight_bytes": sum(weight.nbytes for _, weight in model.weights.items()),
        **shard_worker.trained(model, tmp_path_factory.mktemp("one")),
    }
    return name, [shard[name] for shard in shards], one


@pytest.mark.parametrize("what", ["forward", "cached", "hidden", "log_probs"])
def test_results_equal_one_process(pair: tuple[str, list[Any], Any], what: str) -> None:
    """Feature row 114."""
    _, both, one = pair
    for shard in both:
        np.testing.assert_allclose(shard[what], one[what], rtol=1e-5, atol=1e-5)
    assert np.array_equal(both[0][what], both[1][what])


def test_greedy_ids_equal_one_process(pair: tuple[str, list[Any], Any]) -> None:
    _, both, one = pair
    assert [shard["greedy"] for shard in both] == [one["greedy"]] * 2


def test_what_is_drawn_without_a_seed_is_the_same_in_all(shards: list[Any]) -> None:
    """Each process would draw a seed of its own, and go on with ids of its own."""
    ids, seed, with_logprobs, other, *choices = shards[0]["tied"]["drawn"]
    assert (len(ids), len(with_logprobs)) == (9, 9)
    assert seed != other
    assert len({*map(tuple, choices)}) > 1
    assert shards[1]["tied"]["drawn"] == shards[0]["tied"]["drawn"]


def test_losses_and_gradients_equal_one_process(pair: tuple[str, list[Any], Any]) -> None:
    """Feature rows 68 and 71: each gradient within 1e-5 of its norm, and the same in both."""
    _, both, one = pair
    for shard in both:
        for name in ("loss", "row_loss", "norm"):
            torch.testing.assert_close(shard[name], one[name], rtol=1e-5, atol=1e-5)
        for name, gradient in one["gradients"].items():
            difference = (shard["gradients"][name] - gradient).norm()
            assert difference <= 1e-5 * gradient.norm(), name
            assert torch.equal(shard["gradients"][name], both[0]["gradients"][name])


def test_a_step_of_an_optimizer_equals_one_process(
    pair: tuple[str, list[Any], Any], folder: Path
) -> None:
    """And what is saved is whole, written once."""
    name, both, one = pair
    stepped = both[0]["stepped"]
    for tensor, value in one["stepped"].items():
        torch.testing.assert_close(stepped[tensor], value, rtol=1e-3, atol=1e-3)
    from safetensors.torch import load_file

    saved = load_file(folder / name / "model.safetensors")
    assert saved.keys() == stepped.keys()
    for tensor, value in saved.items():
        assert torch.equal(value, stepped[tensor])


def test_processes_talk_twice_a_layer(pair: tuple[str, list[Any], Any]) -> None:
    """Once more for the embedding, and once for the gathered logits or twice for the loss."""
    for shard in pair[1]:
        sums = {"c10d_functional.all_reduce": 2 * LAYERS + 1}
        gathers = {"c10d_functional.all_gather_into_tensor": 1}
        assert shard["collectives"] == {
            "logits": {**sums, **gathers},
            "logits_backward": sums,
            "loss": {**sums, "c10d.allreduce_": 2},
            "loss_backward": sums,
        }


def test_each_process_holds_half(pair: tuple[str, list[Any], Any]) -> None:
    """Norms are whole everywhere."""
    name, both, one = pair
    config = shard_worker.CONFIGS[name]
    norms = 4 * config.hidden_size * (2 * LAYERS + 1)
    for shard in both:
        assert 2 * (shard["weight_bytes"] - norms) == one["weight_bytes"] - norms
        assert 2 * shard["cache_bytes"] == one["cache_bytes"]


def test_meshes_and_other_dtypes(shards: list[Any]) -> None:
    for shard in shards:
        assert np.array_equal(shard["mesh"], shards[0]["tied"]["forward"])
        difference = shard["bfloat16"] - shards[0]["tied"]["forward"]
        assert 0 < np.sqrt((difference**2).mean()) < 0.05


def test_what_cannot_be_shared_is_an_error(shards: list[Any]) -> None:
    errors = shards[0]["errors"]
    assert errors["none"].startswith("tensor_parallel=2 needs as many processes: start the program")
    assert "torchrun --nproc-per-node 2 PROGRAM.py" in errors["none"]
    assert errors["mesh"] == (
        "tensor_parallel is a mesh of 2 dimensions: give one of them, mesh[name]"
    )
    assert "choose from 1, 2" in errors["divides"]
    assert errors["kind"].startswith("tensor_parallel is '2': give a number of processes")
    assert errors["size"] == (
        "tensor_parallel=4, but 2 processes run: start 4, or give a mesh of 4 of them"
    )
    assert errors["device"] == (
        "device is 'cuda', but the mesh of tensor_parallel is of 'cpu': give that one"
    )
    assert shards[1]["errors"] == errors


def test_one_process_needs_no_group() -> None:
    assert not torch.distributed.is_initialized()
    config = tiny_config()
    model = backend.load(config, shard_worker.random_weights(config), tensor_parallel=1)
    assert type(model.weights.token_embedding) is torch.Tensor
    with pytest.raises(InputError, match="torchrun"):
        backend.load(config, shard_worker.random_weights(config), tensor_parallel=2)
