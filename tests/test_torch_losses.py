"""Log-probabilities in chunks against the whole in float64, and what they take of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from smollm2.errors import InputError
from tests.conftest import REPOSITORY

torch = pytest.importorskip("torch")

from smollm2.backends.torch import losses  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def case(tokens: int, vocabulary: int, seed: int, dtype: Any = torch.float64) -> tuple[Any, ...]:
    """Hidden states, a head, targets, and a gradient for each log-probability."""
    source = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 8, generator=source, dtype=torch.float64)
    head = torch.randn(vocabulary, 8, generator=source, dtype=torch.float64)
    targets = torch.randint(0, vocabulary, (tokens,), generator=source)
    gradient = torch.randn(tokens, generator=source, dtype=torch.float64)
    return hidden.to(dtype), head.to(dtype), targets, gradient.to(dtype)


def whole(hidden: Any, head: Any, targets: Any) -> Any:
    """The definition: all logits at once."""
    logits = torch.nn.functional.linear(hidden, head)
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def gradients(function: Any, hidden: Any, head: Any, targets: Any, gradient: Any) -> Any:
    leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    result = function(*leaves, targets)
    return result.detach(), *torch.autograd.grad(result, leaves, gradient.to(result.dtype))


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(0, 20),
    vocabulary=st.integers(1, 40),
    chunk=st.integers(1, 400),
    seed=st.integers(0, 99),
)
def test_any_chunks_equal_the_whole(tokens: int, vocabulary: int, chunk: int, seed: int) -> None:
    """Feature rows 69 and 71."""
    inputs = case(tokens, vocabulary, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK_BYTES", chunk)
        got = gradients(losses.log_probs, *inputs)
    for ours, theirs in zip(got, gradients(whole, *inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    hidden, head, targets, _ = case(5, 7, 1)
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    assert torch.autograd.gradcheck(lambda *x: losses.log_probs(*x, targets), leaves)


def test_a_gradient_that_nobody_needs_is_not_made() -> None:
    hidden, head, targets, gradient = case(5, 7, 1)
    head.requires_grad_()
    losses.log_probs(hidden, head, targets).backward(gradient)
    assert hidden.grad is None
    torch.testing.assert_close(
        head.grad, gradients(whole, hidden, head.detach(), targets, gradient)[2]
    )
    with torch.no_grad():
        assert not losses.log_probs(hidden, head, targets).requires_grad


def test_it_is_differentiated_once() -> None:
    hidden, head, targets, _ = case(5, 7, 1)
    result = losses.log_probs(hidden.requires_grad_(), head, targets).sum()
    with pytest.raises(InputError, match="differentiated once"):
        torch.autograd.grad(result, hidden, create_graph=True)


def test_a_target_of_no_token_does_no_harm() -> None:
    hidden, head, targets, gradient = case(5, 7, 2)
    kept = torch.tensor([True, False, True, True, False])
    wrong = torch.where(kept, targets, torch.tensor([-100, 7, 0, 0, -1]))
    got = gradients(losses.log_probs, hidden, head, wrong, gradient * kept)
    expected = gradients(whole, hidden, head, targets, gradient * kept)
    torch.testing.assert_close(got[0][kept], expected[0][kept])
    assert torch.isfinite(got[0]).all()
    torch.testing.assert_close(got[1:], expected[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_in_float32(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is the rounding of each logit, and of the results, to 16 bits."""
    inputs = case(300, 4000, 3, dtype)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * 4000 * 7)
    got = gradients(losses.log_probs, *inputs)
    expected = gradients(whole, *(x.double() if x.is_floating_point() else x for x in inputs))
    assert [x.dtype for x in got] == [torch.float32, dtype, dtype]
    step = torch.finfo(dtype).eps
    for ours, theirs, steps in zip(got, expected, (16, 2, 2), strict=True):
        assert (ours.double() - theirs).abs().max() < steps * step * theirs.abs().max().clamp(1)


def test_autocast_rounds_as_it_does_for_a_linear_layer() -> None:
    inputs = case(6, 9, 4, torch.float32)

    def cast(hidden: Any, head: Any, targets: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return losses.log_probs(hidden, head, targets)

    got = gradients(cast, *inputs)
    rounded = tuple(x.bfloat16() for x in inputs[:2])
    expected = gradients(losses.log_probs, *rounded, *inputs[2:])
    assert [x.dtype for x in got] == [torch.float32] * 3
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs.float())
    assert not torch.equal(got[0], gradients(losses.log_probs, *inputs)[0])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_the_peak_is_lower_by_more_than_the_logits() -> None:
    """Feature row 71: 4,096 tokens of 135M, of which one layer stands for all 30."""
    found = []
    for way in ("packed", "logits"):
        command = [sys.executable, "-m", "tests.loss_memory", way, "1"]
        paths = os.pathsep.join([str(REPOSITORY / "benchmarks"), *sys.path])
        said = subprocess.run(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        )
        loss, peak = said.stdout.split()
        found.append((float(loss), int(peak)))
    (ours, least), (theirs, most) = found
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert most - least >= 4096 * 49152 * 4
