"""Switches of torch: what a forward sets, beside other forwards, and what is there after it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from smollm2.backends.torch import TorchBackend, TorchModel  # noqa: E402 - torch may be missing
from smollm2.backends.torch.numerics import switched  # noqa: E402
from smollm2.backends.torch.ops import TorchOps  # noqa: E402
from tests.backend_rules import CONFIG, IDS, WEIGHTS, full  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

backend = TorchBackend()
COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"
)
ONEDNN, CUDA = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
EXACT, FAST = ["ieee", "ieee", False, False], ["bf16", "tf32", True, True]
SECONDS = 30


def seen() -> list[object]:
    """What holds now."""
    return [
        ONEDNN.fp32_precision,
        CUDA.fp32_precision,
        CUDA.allow_bf16_reduced_precision_reduction,
        CUDA.allow_fp16_reduced_precision_reduction,
    ]


def old() -> str:
    """What the old switch says, which torch refuses to read where it differs from the new ones."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return "mix"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Whatever a test sets is gone after it."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = ONEDNN.fp32_precision = CUDA.fp32_precision = "none"


class Watching(TorchOps):
    """Operations that do something before the head."""

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__(CONFIG)
        self._look = look

    def head(self, *given: Any) -> Any:
        self._look()
        return super().head(*given)


def watched(numerics: str, look: Callable[[], object]) -> TorchModel:
    model = backend.load(CONFIG, WEIGHTS, numerics=numerics)
    model.ops = Watching(look)
    return model


def by_hand() -> None:
    torch.backends.fp32_precision = "tf32"


def by_hand_for_one() -> None:
    CUDA.fp32_precision, ONEDNN.fp32_precision = "tf32", "ieee"


def in_the_old_way() -> None:
    torch.set_float32_matmul_precision("high")


@pytest.mark.parametrize("user", [lambda: None, by_hand, by_hand_for_one, in_the_old_way])
@pytest.mark.parametrize(("numerics", "values"), [("exact", EXACT), ("fast", FAST)])
def test_switches_are_set_for_a_forward_only(
    numerics: str, values: list[object], user: Callable[[], None]
) -> None:
    """Also of one that fails; what a user has set is there again."""
    looks: list[object] = []

    def look() -> None:
        looks.append(seen())
        assert old() != "mix"
        if len(looks) > 1:
            raise RuntimeError("out of luck")

    user()
    before = seen(), old(), torch.backends.fp32_precision
    model = watched(numerics, look)
    full(model, IDS[:3])
    with pytest.raises(RuntimeError, match="out of luck"):
        full(model, IDS[:3])
    assert looks == [values, values]
    assert (seen(), old(), torch.backends.fp32_precision) == before


def test_what_was_inherited_still_is() -> None:
    torch.backends.fp32_precision = "tf32"
    full(backend.load(CONFIG, WEIGHTS), IDS[:3])
    torch.backends.fp32_precision = "ieee"
    assert seen()[:2] == ["ieee", "ieee"]
    torch.backends.fp32_precision = "none"
    assert seen()[:2] == ["none", "none"]


def test_forwards_that_overlap_put_back_what_was_there() -> None:
    """The first to come in is the first to go."""
    before, first_is_in, second_is_in, first_is_out = seen(), Event(), Event(), Event()

    def first() -> object:
        with switched(exact=False):
            first_is_in.set()
            assert second_is_in.wait(SECONDS)
            return seen()

    def second() -> object:
        assert first_is_in.wait(SECONDS)
        with switched(exact=False):
            second_is_in.set()
            assert first_is_out.wait(SECONDS)
            return seen()

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(first), pool.submit(second)
        assert one.result(SECONDS) == FAST
        first_is_out.set()
        assert other.result(SECONDS) == FAST
    assert seen() == before


def test_exact_and_fast_models_side_by_side_have_their_own() -> None:
    before = seen()
    models = [
        (watched(name, lambda looks=looks: looks.append(seen())), looks, values)
        for name, values in (("exact", EXACT), ("fast", FAST)) * 2
        for looks in [[]]
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda m: [full(m[0], IDS[:3]) for _ in range(20)], models))
    for _, looks, values in models:
        assert looks == [values] * 20
    assert seen() == before


def test_nobody_waits_for_those_who_came_later() -> None:
    """Forwards that overlap all the time do not keep one of another setting out."""
    came, go = Event(), Event()

    def exact() -> None:
        with switched(exact=True):
            came.set()
            assert go.wait(SECONDS)

    def order(name: str, *, exact: bool) -> None:
        with switched(exact=exact):
            entered.append(name)

    entered: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(exact)
        assert came.wait(SECONDS)
        other = pool.submit(order, "fast", exact=False)
        while not switched._door.locked():
            assert not other.done()
        later = pool.submit(order, "exact", exact=True)
        go.set()
        for future in (first, other, later):
            future.result(SECONDS)
    assert entered == ["fast", "exact"]


@COMPILER
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of what the compiler imports
def test_the_compiler_reads_the_old_switch() -> None:
    """Which may not differ from the new ones."""
    fast = backend.load(CONFIG, WEIGHTS, numerics="fast", compile="inductor")
    plain = backend.load(CONFIG, WEIGHTS, numerics="fast")
    torch.testing.assert_close(full(fast, IDS[:9]), full(plain, IDS[:9]), rtol=0.05, atol=0.05)
