"""The NNX module: its state, its logits, and what optimizers make of it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.tiny import random_weights, tiny_config
from tests.training import hf_loss, hf_model, packed

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from smollm2.backends import get_backend  # noqa: E402
from smollm2.backends.jax.model import JaxModel  # noqa: E402
from smollm2.backends.jax.nnx import SmolLM2  # noqa: E402
from smollm2.backends.jax.ops import JaxOps  # noqa: E402
from smollm2.errors import InputError, MissingDependencyError  # noqa: E402

CONFIG = tiny_config()
UNTIED = tiny_config(tie_word_embeddings=False)
WEIGHTS = random_weights(CONFIG, seed=3)


def module_of(config: Any = CONFIG) -> SmolLM2:
    weights = random_weights(config, seed=3)
    return SmolLM2(JaxOps(config), jax.tree.map(jax.numpy.asarray, weights))


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_state_is_the_named_tree(config: Any) -> None:
    """Feature row 107: every tensor under its name, a tied head once, and nothing else."""
    module = module_of(config)
    assert list(module.parameters) == list(config.shapes)
    paths = {
        ".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }
    assert paths == set(config.shapes)
    assert len(jax.tree.leaves(nnx.state(module))) == len(config.shapes)
    for name, array in random_weights(config, seed=3).items():
        np.testing.assert_array_equal(module.parameters[name][...], array)


def test_split_and_merge_give_the_same_model() -> None:
    module = module_of()
    graph, state = nnx.split(module)
    doubled = nnx.merge(graph, jax.tree.map(lambda x: 2 * x, state))
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(doubled.parameters[name][...], 2 * module.parameters[name][...])
    ids = np.arange(6)[None]
    np.testing.assert_array_equal(nnx.merge(graph, state)(ids), module(ids))
    assert not np.allclose(doubled(ids), module(ids))


def test_logits_equal_those_of_transformers_padded_left_and_right() -> None:
    """Feature rows 52, 152."""
    ids = np.random.default_rng(1).integers(0, 96, (3, 20))
    mask = np.ones_like(ids)
    mask[0, :6] = 0
    mask[2, 15:] = 0
    reference = hf_model(CONFIG, WEIGHTS)
    with torch.no_grad():
        expected = reference(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            position_ids=torch.tensor(np.maximum(mask.cumsum(1) - 1, 0)),
        ).logits.numpy()
    got = module_of()(ids, mask)
    real = mask > 0
    np.testing.assert_allclose(np.asarray(got)[real], expected[real], atol=5e-5)
    whole = module_of()(ids[1:2])
    np.testing.assert_allclose(whole[0], expected[1], atol=5e-5)
    shifted = module_of()(ids[1:2], position_ids=np.arange(9, 29)[None])
    np.testing.assert_allclose(shifted[0], expected[1], atol=1e-3)


POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3, 0], [4, 5, 6, 7, 0, 1, 9, 9]])
MASK = np.array([[1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 0]])
REAL = MASK > 0


@pytest.mark.parametrize("traced", [False, True])
def test_positions_that_start_again_start_a_sequence(traced: bool) -> None:
    """As in the torch module: each is what it is alone, with the mask or without it."""
    ids = np.random.default_rng(4).integers(0, 96, POSITIONS.shape)
    module = module_of()
    graph, state = nnx.split(module)

    def call(*arrays: Any) -> Any:
        return nnx.merge(graph, state)(*arrays)

    got = np.asarray((jax.jit(call) if traced else call)(ids, MASK, POSITIONS))
    theirs = get_backend("torch").load(CONFIG, WEIGHTS, dtype="float32").as_module()
    with torch.no_grad():
        expected = theirs(*map(torch.tensor, (ids, MASK, POSITIONS)))["logits"].numpy()
    np.testing.assert_allclose(got[REAL], expected[REAL], atol=5e-5)
    for row, places in ((0, slice(3)), (0, slice(3, 7)), (0, slice(7, 8)), (1, slice(4, 6))):
        alone = module(ids[row : row + 1, places])[0]
        np.testing.assert_allclose(got[row, places], alone, atol=5e-5)
    shared = call(ids, None, POSITIONS[:1])
    np.testing.assert_allclose(shared[1, 3:7], module(ids[1:, 3:7])[0], atol=5e-5)


@pytest.mark.parametrize(
    ("mask", "positions", "message"),
    [
        (None, [[0, 1, 2, 1]], "position_ids have 1 behind 2: they must rise, or be 0"),
        (None, [[3, 3, 4, 5]], "position_ids have 3 behind 3"),
        (None, [[0, 1, 2]], r"position_ids have shape \[1, 3\], input_ids \[1, 4\]"),
        ([[1, 0, 1, 1]], None, "attention_mask must be 1 for tokens and 0 for the padding"),
        ([[1, 1, 1]], None, r"attention_mask has shape \[1, 3\], input_ids \[1, 4\]"),
    ],
)
def test_masks_and_positions_are_checked_where_they_are_known(
    mask: Any, positions: Any, message: str
) -> None:
    arrays = [None if part is None else np.array(part) for part in (mask, positions)]
    with pytest.raises(InputError, match=message):
        module_of()(np.ones((1, 4), np.int32), *arrays)


@pytest.mark.parametrize("shape", [(), (3,), (1, 0), (0, 3), (1, 2, 3)])
def test_rows_of_tokens_are_what_it_takes(shape: tuple[int, ...]) -> None:
    message = rf"input_ids have shape {re.escape(str(list(shape)))}: give rows of tokens, \[B, S\]"
    with pytest.raises(InputError, match=message):
        module_of()(np.zeros(shape, np.int32))


def test_flax_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = get_backend("jax").load(CONFIG, WEIGHTS)
    monkeypatch.setattr("smollm2.backends._version", lambda _: "0.11.2")
    with pytest.raises(MissingDependencyError, match=r"Flax 0\.12 or later, but 0\.11\.2 is inst"):
        model.as_nnx()
    monkeypatch.setattr("smollm2.backends.find_spec", lambda _: None)
    message = r"^as_nnx\(\) needs Flax, which is not installed: pip install 'smollm2\[jax\]'$"
    with pytest.raises(MissingDependencyError, match=message):
        model.as_nnx()


OPTIMIZERS = {
    "sgd": (lambda: optax.sgd(1e-3, momentum=0.9), lambda p: torch.optim.SGD(p, 1e-3, 0.9)),
    "adamw": (
        lambda: optax.adamw(1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, 1e-3, (0.9, 0.999), 1e-8, 0.01),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_optax_equal_those_of_torch(name: str) -> None:
    """Feature row 117: the losses of two steps, and of what they lead to."""
    ours, theirs = OPTIMIZERS[name]
    batch = packed([9, 40, 14], vocabulary=96, padding=1)
    module, reference = module_of(), hf_model(CONFIG, WEIGHTS)
    optimizer = nnx.Optimizer(module, ours(), wrt=nnx.Param)
    other = theirs(reference.parameters())

    @nnx.jit
    def step(module: SmolLM2, optimizer: Any, arrays: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda module: module.loss_packed(*arrays))(module)
        optimizer.update(module, gradients)
        return loss

    losses, expected = [], []
    for _ in range(3):
        losses.append(float(step(module, optimizer, batch.arrays)))
        other.zero_grad()
        loss = hf_loss(reference, batch)
        loss.backward()
        other.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[2] < losses[1] < losses[0]
    before = random_weights(CONFIG, seed=3)
    for name, array in before.items():
        moved = np.abs(np.asarray(module.parameters[name][...]) - array).max()
        assert moved > 0, name


def test_a_step_is_compiled_once() -> None:
    """The first step leaves nothing where JAX has to compile the second one for."""
    module = get_backend("jax").load(CONFIG, WEIGHTS).as_nnx()
    optimizer = nnx.Optimizer(module, optax.adamw(1e-3), wrt=nnx.Param)
    arrays = packed([5, 3], vocabulary=96).arrays

    @nnx.jit
    def step(module: SmolLM2, optimizer: Any) -> Any:
        gradients = nnx.grad(lambda module: module.loss_packed(*arrays))(module)
        optimizer.update(module, gradients)

    compiled: list[str] = []

    def count(event: str, _: float, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    step(module, optimizer)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        step(module, optimizer)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert not compiled


def test_lists_and_names_are_taken_as_those_of_the_entries() -> None:
    """What the torch module takes, this one does: the same call, whoever computes."""
    module, batch = module_of(), packed([5, 3], vocabulary=96)
    lists = [array.tolist() for array in batch.arrays]
    names = ("tokens", "positions", "segments", "targets", "weights")
    got = module.loss_packed(**dict(zip(names, lists, strict=True)))
    assert got == module.loss_packed(*batch.arrays)
    ids = [[3, 4, 5], [6, 7, 8]]
    np.testing.assert_array_equal(module(ids), module(np.array(ids)))
    mask = [[1, 1, 1], [0, 1, 1]]
    np.testing.assert_array_equal(module(ids, mask), module(np.array(ids), np.array(mask)))
    with pytest.raises(InputError, match=r"input_ids have shape \[3\]: give rows of tokens"):
        module(ids[0])


def test_what_was_trained_computes_on() -> None:
    module = module_of()
    norm = module.parameters["model.norm.weight"]
    norm[...] = 2 * norm[...]
    model = JaxModel(module.ops, module.weights)
    ids = np.arange(5)
    batch = packed([5], vocabulary=96)
    np.testing.assert_allclose(
        module.hidden_packed(*batch.arrays[:3]),
        2 * np.asarray(module_of().hidden_packed(*batch.arrays[:3])),
        rtol=1e-6,
    )
    from smollm2.batch import Batch, Span

    logits = model.forward(Batch.build([Span(0, 0, ids.tolist(), "all")]))
    np.testing.assert_allclose(module(ids[None])[0], logits, atol=1e-5)
