"""Compiled layers and captured steps: the ids of the plain table, by few programs."""

from __future__ import annotations

import pickle
import shutil
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from smollm2.backends.torch import TorchBackend, TorchModel  # noqa: E402 - torch may be missing
from smollm2.backends.torch.graphs import MOST_GRAPHS  # noqa: E402
from smollm2.backends.torch.plan import Form, Plan, flatten  # noqa: E402
from smollm2.batch import Batch, Span  # noqa: E402
from smollm2.cache import Cache  # noqa: E402
from smollm2.lane import Lane  # noqa: E402
from smollm2.model import forward  # noqa: E402
from smollm2.sampling import Choice, Sampler, SamplingParams  # noqa: E402
from tests.backend_rules import CONFIG, IDS, WEIGHTS, full, spans  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

backend = TorchBackend()
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"
)


@pytest.fixture(scope="module")
def plain() -> TorchModel:
    return backend.load(CONFIG, WEIGHTS)


def greedy(model: TorchModel, prompt: list[int], count: int) -> list[int]:
    lane, pending, ids = Lane(model), prompt, list[int]()
    for position in range(len(prompt), len(prompt) + count):
        token = lane.choose(pending, Choice(Sampler(SamplingParams()), position))
        assert token is not None
        ids.append(token)
        pending = [token]
    return ids


@COMPILER
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of what the compiler imports
def test_inductor(plain: TorchModel) -> None:
    """Four programs, before and after attention for one token and for more, serve all batches."""
    model = backend.load(CONFIG, WEIGHTS, compile="inductor")
    torch._dynamo.utils.counters.clear()
    for prompt in (IDS[:5], IDS[:130], IDS[7:8]):
        assert greedy(model, prompt, 6) == greedy(plain, prompt, 6)
    np.testing.assert_allclose(full(model, IDS), full(plain, IDS), rtol=1e-4, atol=1e-5)
    cache = model.new_cache(3, 64)
    several = spans(cache, *(Span(row, 0, IDS[row : row + 4]) for row in range(3)))
    alone = [full(plain, IDS[row : row + 4])[-1] for row in range(3)]
    np.testing.assert_allclose(model.forward(several, cache), alone, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of what the compiler imports
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # it looks whether x has one
def test_compiled_layers_are_trained_and_copied(
    plain: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the compiler's own first half, which needs no other; a module of a model that has run."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model, ids = backend.load(CONFIG, WEIGHTS, compile="inductor"), torch.tensor([IDS[:9]])
    full(model, IDS[:9])
    ours, theirs = model.as_module(), plain.as_module()
    ours.gradient_checkpointing_enable(every_n_layers=2)
    theirs(ids, labels=ids).loss.backward()
    for module in (ours, pickle.loads(pickle.dumps(ours))):
        module(ids, labels=ids).loss.backward()
        for name, value in theirs.named_parameters():
            torch.testing.assert_close(module.get_parameter(name).grad, value.grad)


def read(model: TorchModel, batch: Batch, cache: Cache) -> tuple[Form, NDArray[np.float32]]:
    """The form of a batch among few, and the logits of that: what a graph would compute."""
    model.plan(batch, cache)
    form, numbers = flatten(batch, cache, few_forms=True)
    angles = model._planner.reserve(model.context_length)
    plan: Plan = model._planner.read(form, torch.from_numpy(numbers), angles, cache)
    with torch.inference_mode():
        return form, forward(model.weights, model.ops, plan).numpy()


@pytest.mark.parametrize("rows", [1, 2])
def test_steps_of_decode_have_few_forms(plain: TorchModel, rows: int) -> None:
    """What is masked in place of a shape of its own changes nothing."""
    cache, same = plain.new_cache(rows, 200), plain.new_cache(rows, 200)
    for each in (cache, same):
        start = [Span(0, 0, IDS[:60]), Span(1, 0, IDS[:3])]
        plain.forward(spans(each, *start[:rows]), each)
    forms = set()
    for step in range(100):
        new = [Span(0, 60 + step, IDS[step : step + 1]), Span(1, 3 + step, IDS[step : step + 1])]
        new = new[:rows]
        form, logits = read(plain, spans(cache, *new), cache)
        cache.advance(spans(cache, *new))
        forms.add(form)
        expected = plain.forward(spans(same, *new), same)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert {form.parts[0].keys for form in forms} == {64, 128, 200}
    assert len(forms) == 3


def test_forms_do_not_name_the_pages_of_a_paged_cache(plain: TorchModel) -> None:
    cache = plain.new_paged_cache(9)
    forms = set()
    for pages in ([3, 5], [4, 1], [8, 2]):
        table = np.array(pages, np.int32)[:, None]
        start = [Span(row, 0, IDS[row : row + 9]) for row in range(2)]
        plain.forward(Batch.build(start, page_table=table, page_size=64), cache)
        step = [Span(row, 9, IDS[row + 9 : row + 10]) for row in range(2)]
        batch = Batch.build(step, page_table=table, page_size=64)
        form, logits = read(plain, batch, cache)
        forms.add(form)
        expected = [full(plain, IDS[row : row + 10])[-1] for row in range(2)]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert len(forms) == 1


@GPU
def test_cudagraphs(plain: TorchModel) -> None:
    model = backend.load(CONFIG, WEIGHTS, device="cuda", compile="cudagraphs")
    for prompt in (IDS[:5], IDS[:130], IDS[7:8]):
        assert greedy(model, prompt, 40) == greedy(plain, prompt, 40)
    # Two caches in turn: each has graphs of its own.
    first, second = model.new_cache(1, 64), model.new_cache(1, 64)
    for step in range(20):
        for cache, ids in ((first, IDS), (second, IDS[50:])):
            span = Span(0, step, ids[step : step + 1])
            logits = model.forward(spans(cache, span), cache)
            expected = full(plain, ids[: step + 1])[-1:]
            np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)
    assert model._graphs is not None
    assert all(len(known.graphs) <= MOST_GRAPHS for known in model._graphs._caches.values())
    model.close()
    assert not model._graphs._caches
