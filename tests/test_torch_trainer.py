"""transformers' Trainer trains our module as it trains its own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import random_weights, tiny_config, write_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402

from smollm2.backends.torch import backend  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG, seed=3)
SOURCE = np.random.default_rng(0)
DATA = [
    {"input_ids": SOURCE.integers(3, CONFIG.vocab_size, int(length)).tolist()}
    for length in SOURCE.integers(2, 20, 16)
]
STEPS = 2


def padded(examples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """A batch padded to the right, whose padding is not learned."""
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(rows, batch_first=True, padding_value=2),
        "attention_mask": pad([row * 0 + 1 for row in rows], batch_first=True),
        "labels": pad(rows, batch_first=True, padding_value=-100),
    }


def shape_of(prediction: Any) -> dict[str, float]:
    return {"width": float(prediction.predictions.shape[-1])}


def trained(model: Any, folder: Path, **options: Any) -> list[dict[str, float]]:
    """Train two steps of two batches, then evaluate; returns what was logged."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=STEPS,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=DATA,
        eval_dataset=DATA[:5],
        data_collator=padded,
        compute_metrics=shape_of,
    )
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    names = ("loss", "grad_norm", "eval_loss", "eval_width")
    return [
        {name: entry[name] for name in names if name in entry}
        for entry in trainer.state.log_history[: STEPS + 1]
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return write_hf(tmp_path_factory.mktemp("model") / "hf", CONFIG, WEIGHTS)


def test_two_steps_equal_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Feature rows 117, 119 and 126: losses, norms of gradients, evaluation, trained weights."""
    model = backend.load(CONFIG, WEIGHTS)
    ours = model.as_module()
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
    got, expected = trained(ours, tmp_path / "ours"), trained(theirs, tmp_path / "theirs")
    assert [set(entry) for entry in got] == [set(entry) for entry in expected]
    for ours_step, theirs_step in zip(got, expected, strict=True):
        assert ours_step == pytest.approx(theirs_step, rel=1e-5)
    assert got[2]["eval_width"] == CONFIG.vocab_size
    for name, value in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), value, rtol=1e-3, atol=1e-4)
    other = backend.load(CONFIG, WEIGHTS).as_module()
    other.load_state_dict(load_file(tmp_path / "ours" / "saved" / "model.safetensors"))
    for name, value in ours.named_parameters():
        assert torch.equal(other.get_parameter(name), value)


def test_smoothed_labels_are_shifted(folder: Path, tmp_path: Path) -> None:
    """The Trainer takes that loss of logits, and knows by the name of a model whether to shift."""
    ours = backend.load(CONFIG, WEIGHTS).as_module()
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
    got = trained(ours, tmp_path / "ours", label_smoothing_factor=0.1)
    expected = trained(theirs, tmp_path / "theirs", label_smoothing_factor=0.1)
    for ours_step, theirs_step in zip(got, expected, strict=True):
        assert ours_step == pytest.approx(theirs_step, rel=1e-5)


def test_the_compiler_leaves_a_module_as_it_is(tmp_path: Path) -> None:
    """It cannot follow NumPy; layers are compiled where ``load`` is told so."""
    plain, compiled = (backend.load(CONFIG, WEIGHTS).as_module() for _ in range(2))
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    assert trained(compiled, tmp_path / "c", **options) == trained(plain, tmp_path / "p")


def test_checkpointing_changes_no_number(tmp_path: Path) -> None:
    """The default of TRL: layers keep what came in, and are computed once more."""
    module = backend.load(CONFIG, WEIGHTS).as_module()
    kept = trained(module, tmp_path / "kept")
    other = backend.load(CONFIG, WEIGHTS).as_module()
    option = "activation_checkpointing"
    if not hasattr(transformers.TrainingArguments, option):
        option = "gradient_checkpointing"
    assert trained(other, tmp_path / "other", **{option: True}) == kept
    assert other.is_gradient_checkpointing
    assert not module.is_gradient_checkpointing
    for name, value in module.named_parameters():
        assert torch.equal(other.get_parameter(name), value)


def test_mixed_precision_trains(tmp_path: Path) -> None:
    """Feature row 125: parameters stay float32, products are of bfloat16."""
    exact = trained(backend.load(CONFIG, WEIGHTS).as_module(), tmp_path / "exact")
    module = backend.load(CONFIG, WEIGHTS).as_module(return_logits=True)
    mixed = trained(module, tmp_path / "mixed", bf16=True)
    assert module.get_parameter("model.norm.weight").dtype == torch.float32
    for ours, theirs in zip(mixed, exact, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2)
    assert mixed[0]["loss"] != exact[0]["loss"]
