"""The module that is trained: its losses and gradients are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smollm2.backends import numpy
from smollm2.batch import Batch, Span
from smollm2.causal_lm import NO_TARGET
from smollm2.entries import log_probs_packed, loss_packed
from smollm2.errors import InputError
from tests.tiny import random_weights, tiny_config, write_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from smollm2.backends.torch import backend  # noqa: E402

TIED = tiny_config()
UNTIED = tiny_config(tie_word_embeddings=False, num_key_value_heads=1)
IDS = torch.from_numpy(np.random.default_rng(7).integers(0, TIED.vocab_size, (3, 12)))
LEFT = torch.tensor([[0] * 5 + [1] * 7, [1] * 12, [0] * 11 + [1]])


@pytest.fixture(scope="module", params=["tied", "untied"])
def models(request: Any, tmp_path_factory: Any) -> tuple[Any, Any]:
    """The same weights in ours and in transformers' model."""
    config = TIED if request.param == "tied" else UNTIED
    weights = random_weights(config, seed=3)
    folder = write_hf(tmp_path_factory.mktemp("model") / "hf", config, weights)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return backend.load(config, weights), theirs


@pytest.fixture
def modules(models: tuple[Any, Any]) -> tuple[Any, Any]:
    """Both as modules, without gradients."""
    module = models[0].as_module()
    models[1].zero_grad()
    return module, models[1]


def assert_same_gradients(ours: Any, theirs: Any) -> None:
    """Each tensor's, within 1e-5 of its norm."""
    expected = dict(theirs.named_parameters())
    got = dict(ours.named_parameters())
    assert list(got) == [name for name in got if name in expected]
    assert len(got) == len(expected)
    for name, parameter in got.items():
        difference = (parameter.grad - expected[name].grad).norm()
        assert difference <= 1e-5 * expected[name].grad.norm(), name


def mask_labels(mask: Any) -> Any:
    """Labels without padding, and without the first token, which only padding could predict."""
    return torch.where((mask > 0) & (mask.cumsum(1) > 1), IDS, NO_TARGET)


def test_names_are_those_of_hugging_face(modules: tuple[Any, Any]) -> None:
    """Feature rows 107 and 109: each tensor once, the tied head with the embedding."""
    module, theirs = modules
    expected = {name: value.shape for name, value in theirs.named_parameters()}
    assert {name: value.shape for name, value in module.named_parameters()} == expected
    assert set(module.state_dict()) == set(expected)
    for name, value in theirs.named_parameters():
        assert torch.equal(module.get_parameter(name), value)


def test_it_shares_the_memory_of_the_model(models: tuple[Any, Any]) -> None:
    model = models[0]
    batch = Batch.build([Span(0, 0, [3, 4, 5])])
    before = model.forward(batch)
    parameter = model.as_module().get_parameter("model.norm.weight")
    with torch.no_grad():
        parameter *= 2
    np.testing.assert_allclose(model.forward(batch), 2 * before, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        parameter /= 2


@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(1)], ids=["whole", "left", "right"])
def test_logits_and_loss_equal_transformers(modules: tuple[Any, Any], mask: Any) -> None:
    """Feature rows 52, 126 and 152."""
    module, theirs = modules
    real = torch.ones_like(IDS) if mask is None else mask
    labels = mask_labels(real)
    with torch.no_grad():
        got = module(IDS, attention_mask=mask, labels=labels)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        expected = theirs(IDS, attention_mask=mask, position_ids=positions, labels=labels)
    assert got["logits"].dtype == torch.float32
    torch.testing.assert_close(
        got.logits[real > 0], expected.logits[real > 0], rtol=1e-4, atol=1e-5
    )
    assert (got.logits[real == 0] == 0).all()
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-6, atol=1e-6)
    all_labels = module(IDS, attention_mask=mask, labels=IDS)
    torch.testing.assert_close(all_labels.loss, got.loss)


def test_positions_that_start_again_are_a_new_sequence(modules: tuple[Any, Any]) -> None:
    """As transformers' collator without padding makes them: one row, labels masked at starts."""
    module, theirs = modules
    lengths = [5, 4, 3]
    row = IDS[:1]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    got = module(row, position_ids=positions, labels=row)
    parts = row[0].split(lengths)
    losses = [theirs(part[None], labels=part[None]).loss * (len(part) - 1) for part in parts]
    expected = sum(losses) / (sum(lengths) - len(lengths))
    torch.testing.assert_close(got.loss, expected, rtol=1e-6, atol=1e-6)
    got.loss.backward()
    expected.backward()
    assert_same_gradients(module, theirs)


def packed_case(lengths: list[int]) -> tuple[Any, ...]:
    """Tokens, positions, segments and targets of sequences side by side, two of them padding."""
    ids = IDS.flatten()[: sum(lengths)]
    parts = ids.split(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    targets = torch.cat([torch.cat([part[1:], torch.tensor([NO_TARGET])]) for part in parts])
    pad = torch.tensor([7, 7])
    return (
        parts,
        torch.cat([ids, pad]),
        torch.cat([positions, 0 * pad]),
        torch.cat([segments, pad * 0 - 1]),
        torch.cat([targets, 0 * pad + NO_TARGET]),
    )


def test_packed_loss_and_gradients_equal_sequences_alone(modules: tuple[Any, Any]) -> None:
    """Feature rows 68 and 118; transformers computes sequence by sequence."""
    module, theirs = modules
    parts, tokens, positions, segments, targets = packed_case([12, 3, 1, 9])
    weights = torch.linspace(-0.5, 2, len(tokens)) * (targets != NO_TARGET)
    loss = module.loss_packed(tokens, positions, segments, targets, weights)
    expected, start = 0.0, 0
    for part in parts:
        log_probs = theirs(part[None]).logits[0, :-1].log_softmax(-1)
        chosen = log_probs.gather(1, part[1:, None])[:, 0]
        expected = expected - (weights[start : start + len(part) - 1] * chosen).sum()
        start += len(part)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    assert_same_gradients(module, theirs)


def test_log_probs_and_hidden_states_of_packed_sequences(models: tuple[Any, Any]) -> None:
    """Feature rows 69 and 70."""
    model, theirs = models
    module = model.as_module()
    parts, tokens, positions, segments, targets = packed_case([12, 3, 1, 9])
    with torch.no_grad():
        hidden = module.hidden_packed(tokens, positions, segments)
        log_probs = module.log_probs_packed(tokens, positions, segments, targets)
        states = torch.cat([theirs.model(part[None]).last_hidden_state[0] for part in parts])
        logits = torch.cat([theirs(part[None]).logits[0] for part in parts])
    torch.testing.assert_close(hidden[:-2], states, rtol=1e-4, atol=1e-5)
    learned = targets[:-2] != NO_TARGET
    expected = logits.log_softmax(-1).gather(1, targets[:-2].clamp(min=0)[:, None])[:, 0]
    torch.testing.assert_close(log_probs[:-2], expected * learned, rtol=1e-4, atol=1e-5)
    assert (hidden[-2:] == 0).all()
    assert (log_probs[-2:] == 0).all()


def test_entries_and_numpy_agree_with_the_module(models: tuple[Any, Any]) -> None:
    model = models[0]
    _, *inputs, targets = packed_case([12, 3, 1, 9])
    inputs = [values.numpy() for values in inputs]
    weights = np.linspace(0, 2, len(targets), dtype=np.float32) * (targets.numpy() != NO_TARGET)
    reference = numpy.backend.load(model.config, model.weights.map(lambda _, w: w.numpy()))
    with torch.no_grad():
        log_probs = model.as_module().log_probs_packed(*inputs, targets)
        loss = model.as_module().loss_packed(*inputs, targets, weights)
    for lm in (model, reference):
        got = log_probs_packed(lm, *inputs, targets.numpy())
        np.testing.assert_allclose(got, log_probs, rtol=1e-4, atol=1e-5)
        got = loss_packed(lm, *inputs, targets.numpy(), weights)
        assert got == pytest.approx(loss.item(), rel=1e-5)
    with pytest.raises(InputError, match="target 96 is not in a vocabulary of 96"):
        model.log_probs(Batch.build([Span(0, 0, [3])]), np.array([96], np.int32))


def test_the_mean_is_over_what_is_learned(modules: tuple[Any, Any]) -> None:
    module = modules[0]
    labels = IDS.clone()
    labels[:, :5] = NO_TARGET
    mean = module(IDS, labels=labels).loss
    total = module(IDS, labels=labels, num_items_in_batch=1).loss
    torch.testing.assert_close(total, 3 * 7 * mean)
    torch.testing.assert_close(
        module(IDS, labels=labels, num_items_in_batch=torch.tensor(42)).loss, mean / 2
    )
    nothing = module(IDS, labels=torch.full_like(IDS, NO_TARGET)).loss
    nothing.backward()
    assert nothing == 0


def test_logits_are_made_where_they_are_asked_for(models: tuple[Any, Any]) -> None:
    model = models[0]
    module = model.as_module()
    assert set(module(IDS)) == {"logits"}
    assert set(module(IDS, labels=IDS)) == {"loss"}
    assert module(IDS, labels=IDS).logits is None
    assert set(module(IDS, labels=IDS, return_logits=True)) == {"loss", "logits"}
    assert set(model.as_module(return_logits=True)(IDS, labels=IDS)) == {"loss", "logits"}
    with torch.no_grad():
        assert set(module(IDS, labels=IDS)) == {"loss", "logits"}
        assert set(module(IDS, labels=IDS, return_logits=False)) == {"loss"}


def test_a_forward_gathers_its_weights_once(
    models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes two milliseconds of 30 layers."""
    module, gathered = models[0].as_module(), []
    weights = type(module).weights.fget
    monkeypatch.setattr(
        type(module), "weights", property(lambda self: gathered.append(0) or weights(self))
    )
    module(IDS, attention_mask=LEFT, labels=IDS, return_logits=True)
    assert len(gathered) == 1


def test_accumulated_gradients_are_those_of_one_batch(models: tuple[Any, Any]) -> None:
    """Feature row 119."""
    once, parts = models[0].as_module(), models[0].as_module()
    once(IDS, labels=IDS).loss.backward()
    for row in IDS:
        parts(row[None], labels=row[None], num_items_in_batch=33).loss.backward()
    assert_same_gradients(parts, once)


def saved_bytes(module: Any) -> int:
    """What a forward keeps for its backward pass, parameters included; the gradients come back."""
    saved: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module(IDS, labels=IDS).loss
    kept = sum(saved.values())
    loss.backward()
    return kept


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointed_layers_have_the_same_gradients(
    models: tuple[Any, Any], autocast: bool
) -> None:
    """And keep less; the model that the module came from is as it was."""
    model = models[0]
    plain, frugal, half = (model.as_module() for _ in range(3))
    assert frugal.supports_gradient_checkpointing
    frugal.gradient_checkpointing_enable({"use_reentrant": False})
    half.activation_checkpointing_enable(every_n_layers=2, offload=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        kept, least, less = (saved_bytes(module) for module in (plain, frugal, half))
    assert least < less < kept
    for name, value in plain.named_parameters():
        assert torch.equal(frugal.get_parameter(name).grad, value.grad), name
        assert torch.equal(half.get_parameter(name).grad, value.grad), name
    assert (frugal.is_gradient_checkpointing, plain.is_activation_checkpointing) == (True, False)
    frugal.gradient_checkpointing_disable()
    assert saved_bytes(frugal) == saved_bytes(plain)
    assert model.ops.recompute_every == 0
    with pytest.raises(InputError, match="leave offload out"):
        plain.activation_checkpointing_enable(offload=True)


def test_autocast_and_other_dtypes(models: tuple[Any, Any]) -> None:
    """Feature row 125."""
    module = models[0].as_module()
    exact = module(IDS, labels=IDS).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = module(IDS, labels=IDS).loss
    rounded.backward()
    assert module.get_parameter("model.norm.weight").grad.dtype == torch.float32
    half = models[0].as_module().to(torch.bfloat16)
    converted = half(IDS, labels=IDS).loss
    converted.backward()
    for loss in (rounded, converted):
        assert loss.dtype == torch.float32
        assert 0 < (loss - exact).abs() < 0.05
    assert half.get_parameter("model.norm.weight").grad.dtype == torch.bfloat16
    assert models[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_loads_in_transformers(
    models: tuple[Any, Any], dtype: Any, tmp_path: Path
) -> None:
    """Feature row 131."""
    module = models[0].as_module().to(dtype)
    module.save_pretrained(tmp_path / "new" / "folder", safe_serialization=True)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "new" / "folder")
    assert theirs.dtype == dtype
    for name, value in theirs.named_parameters():
        assert torch.equal(module.get_parameter(name), value)
    config = models[0].config
    other = backend.load(config, random_weights(config)).as_module().to(dtype)
    other.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(other(IDS).logits, module(IDS).logits)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({}, strict=True)


def test_the_config_is_that_of_transformers(modules: tuple[Any, Any]) -> None:
    module, theirs = modules
    assert isinstance(module.config, transformers.LlamaConfig)
    assert module.config is module.config
    for name in ("vocab_size", "num_key_value_heads", "tie_word_embeddings", "rope_parameters"):
        assert getattr(module.config, name) == getattr(theirs.config, name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS[0]}, r"input_ids have shape \[12\], but must have 2 dimensions"),
        (
            {"input_ids": IDS[:0]},
            r"have shape \[0, 12\], but must have 2 dimensions, none of them 0",
        ),
        ({"input_ids": IDS.float()}, "input_ids must be integers, not float32"),
        ({"input_ids": IDS + 90}, "token id .* is not in a vocabulary of 96"),
        ({"labels": IDS[:, :3]}, r"labels have shape \[3, 3\], but must have shape \[3, 12\]"),
        ({"labels": IDS * 0 - 1}, "target -1 is not in a vocabulary of 96"),
        ({"labels": IDS * 0 + 96}, "target 96 is not in a vocabulary of 96: -100 as a label"),
        ({"attention_mask": IDS * 0}, "no tokens"),
        ({"use_cache": True}, "forward has no use_cache=True: leave it out"),
        ({"inputs_embeds": IDS.float()}, "forward has no inputs_embeds"),
        ({"return_dict": 1}, "forward has no return_dict=1"),
        ({"position_ids": IDS * 0 + 256}, "context length is 256"),
    ],
)
def test_what_cannot_be_computed_is_an_error(
    modules: tuple[Any, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        modules[0](**{"input_ids": IDS, **arguments})


def test_training_may_follow_inference(models: tuple[Any, Any]) -> None:
    module = models[0].as_module()
    with torch.inference_mode():
        before = module(IDS, labels=IDS).loss.item()
    module(IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        assert module(IDS, labels=IDS).loss.item() == pytest.approx(before, rel=1e-6)


def test_what_trl_asks_for(modules: tuple[Any, Any]) -> None:
    """TRL 1 takes hidden states and the head, and makes the loss by itself."""
    module, theirs = modules
    with torch.no_grad():
        got = module.base_model(IDS, attention_mask=LEFT.flip(1), use_cache=False)
        expected = theirs.base_model(IDS, attention_mask=LEFT.flip(1)).last_hidden_state
    real = LEFT.flip(1) > 0
    torch.testing.assert_close(got.last_hidden_state[real], expected[real], rtol=1e-4, atol=1e-5)
    assert (got.last_hidden_state[~real] == 0).all()
    head = module.get_output_embeddings()
    assert torch.equal(head.weight, theirs.get_output_embeddings().weight)
    assert head.bias is None
    assert module.generation_config.eos_token_id == theirs.generation_config.eos_token_id
    module.add_model_tags(["sft"])


def test_arguments_that_ask_for_nothing_are_fine(modules: tuple[Any, Any]) -> None:
    nothing = {"use_cache": False, "past_key_values": None, "return_dict": True}
    assert modules[0](IDS, **nothing).logits is not None


def test_packed_arrays_must_fit_each_other(modules: tuple[Any, Any]) -> None:
    module = modules[0]
    _, tokens, positions, segments, targets = packed_case([4, 5])
    with pytest.raises(InputError, match=r"positions have shape \[10\], .* shape \[11\]"):
        module.hidden_packed(tokens, positions[1:], segments)
    with pytest.raises(InputError, match=r"weights have shape \[1\], targets \[11\]"):
        module.loss_packed(tokens, positions, segments, targets, np.ones(1))
    with pytest.raises(InputError, match="target -100 is not in a vocabulary"):
        module.loss_packed(tokens, positions, segments, targets, np.ones(11))
