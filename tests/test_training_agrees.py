"""Two ways to train the same model: transformers' Trainer and optax come to the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smollm2.backends import get_backend
from tests.tiny import random_weights, tiny_config

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG, seed=3)
STEPS, ROWS, LENGTH = 2, 4, 24
RATE = 0.05
IDS = np.random.default_rng(5).integers(3, CONFIG.vocab_size, (STEPS, ROWS, LENGTH))


def with_trainer(folder: Path) -> tuple[list[float], Any]:
    """Losses of the PyTorch module's steps in transformers' Trainer, and the module."""
    backend: Any = get_backend("torch")
    module = backend.load(CONFIG, WEIGHTS, dtype="float32").as_module()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    examples = [{"input_ids": ids, "labels": ids} for ids in IDS.reshape(-1, LENGTH).tolist()]
    trainer = transformers.Trainer(
        model=module,
        args=arguments,
        train_dataset=examples,
        optimizers=(torch.optim.SGD(module.parameters(), RATE), None),
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(examples)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], module


def with_optax() -> tuple[list[float], Any]:
    """Losses of the NNX module's steps with optax, and the module."""
    backend: Any = get_backend("jax")
    module = backend.load(CONFIG, WEIGHTS, dtype="float32").as_nnx()
    optimizer = nnx.Optimizer(module, optax.sgd(RATE), wrt=nnx.Param)
    positions, segments = np.tile(np.arange(LENGTH), ROWS), np.repeat(np.arange(ROWS), LENGTH)
    losses = []
    for rows in IDS:
        targets = np.hstack([rows[:, 1:], np.full((ROWS, 1), -100)]).reshape(-1)
        weights = (targets >= 0) / np.float32(ROWS * (LENGTH - 1))
        arrays = rows.reshape(-1), positions, segments, targets, weights.astype(np.float32)
        loss, gradients = nnx.value_and_grad(lambda m, a: m.loss_packed(*a))(module, arrays)
        optimizer.update(module, gradients)
        losses.append(float(loss))
    return losses, module


def test_two_steps_of_trainer_and_of_optax_are_the_same(tmp_path: Path) -> None:
    """The losses of both steps, and the weights that they lead to."""
    losses, torch_module = with_trainer(tmp_path)
    others, nnx_module = with_optax()
    np.testing.assert_allclose(losses, others, rtol=2e-5)
    assert losses[0] != losses[1]
    moved = dict(torch_module.named_parameters())
    for name, start in WEIGHTS.items():
        ours = moved[name].detach().numpy() - start
        theirs = np.asarray(nnx_module.parameters[name][...]) - start
        assert np.linalg.norm(ours - theirs) <= 1e-3 * np.linalg.norm(theirs), name
