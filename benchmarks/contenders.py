"""Contenders: how each framework opens a checkpoint, reads a prompt and writes greedily."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

WARM_UPS = 3


@dataclass(frozen=True)
class Setting:
    """What all contenders are given."""

    folder: str
    device: str
    dtype: str
    threads: int
    iterations: int
    prompt: int
    decode: int


class Opened(Protocol):
    """A model that is ready."""

    def first(self, ids: list[int]) -> int:
        """Read a prompt; the token that follows."""

    def next(self, token: int) -> int:
        """Read one token more; the one that follows."""

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """Logits after the last id of a prompt, [V]."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to run the model: who opens it, and the package that this needs."""

    open: Callable[[Setting], Opened]
    package: str
    gpu_only: bool = False

    @property
    def file_name(self) -> str:
        """Where its logits are left."""
        return next(name for name, other in CONTENDERS.items() if other is self).replace(" ", "-")


class Transformers:
    """Hugging Face transformers, eagerly or compiled with a static cache."""

    def __init__(self, setting: Setting, *, compiled: bool = False) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

        torch.set_num_threads(setting.threads)
        self.torch = torch
        self.device = setting.device
        opened: Any = AutoModelForCausalLM.from_pretrained(
            setting.folder, dtype=getattr(torch, setting.dtype)
        )
        self.model = opened.to(setting.device).eval()
        self.position = 0
        room = setting.prompt + setting.decode
        self.step: Any = self.model
        self.new_cache: Callable[[], Any] = lambda: DynamicCache(config=self.model.config)
        if compiled:
            self.step = torch.compile(self.model, mode="reduce-overhead", fullgraph=True)
            static: Any = StaticCache(config=self.model.config, max_cache_len=room)

            def emptied() -> Any:
                static.reset()
                return static

            self.new_cache = emptied
        self.cache: Any = None

    def _feed(self, ids: list[int], step: Any) -> Any:
        torch = self.torch
        with torch.inference_mode():
            tokens = torch.tensor([ids], device=self.device)
            places = torch.arange(self.position, self.position + len(ids), device=self.device)
            output = step(
                tokens,
                cache=self.cache,
                position_ids=places[None],
                use_cache=True,
                logits_to_keep=1,
            )
        self.position += len(ids)
        return output.logits[0, -1]

    def first(self, ids: list[int]) -> int:
        """Read a prompt into an empty cache."""
        self.cache, self.position = self.new_cache(), 0
        return int(self._feed(ids, self.model).argmax())

    def next(self, token: int) -> int:
        """Read one token more."""
        return int(self._feed([token], self.step).argmax())

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """Logits after the prompt."""
        self.cache, self.position = self.new_cache(), 0
        logits: NDArray[np.float32] = self._feed(ids, self.model).float().cpu().numpy()
        return logits


class Ours:
    """This package, through the lane that ``generate`` runs on."""

    def __init__(self, setting: Setting, backend: str, **options: Any) -> None:
        import smollm2
        from smollm2.backends import get_backend
        from smollm2.sampling import Sampler, SamplingParams

        if backend == "torch":
            import torch

            torch.set_num_threads(setting.threads)
        checkpoint = smollm2.load_checkpoint(setting.folder)
        device = {"torch": setting.device, "jax": "gpu" if setting.device == "cuda" else "cpu"}
        if backend in device:
            options |= {"device": device[backend], "dtype": setting.dtype}
        self.lm = get_backend(backend).load(checkpoint.config, checkpoint.weights, **options)
        self.sampler = Sampler(SamplingParams())
        self.room = setting.prompt + setting.decode
        self.lane: Any = None

    def _open(self) -> None:
        from smollm2.lane import Lane

        if self.lane is not None:
            self.lane.close()
        self.lane = Lane(self.lm, self.room)

    def _choose(self, ids: list[int]) -> int:
        from smollm2.sampling import Choice

        position = len(self.lane.ids) + len(ids)
        token: int = self.lane.choose(ids, Choice(self.sampler, position))
        return token

    def first(self, ids: list[int]) -> int:
        """Read a prompt into an empty cache."""
        self._open()
        return self._choose(ids)

    def next(self, token: int) -> int:
        """Read one token more."""
        return self._choose([token])

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """Logits after the prompt."""
        self._open()
        logits: NDArray[np.float32] = self.lane.feed(ids)[0]
        return logits


CONTENDERS = {
    "transformers": Contender(Transformers, "transformers"),
    "transformers compiled": Contender(
        lambda setting: Transformers(setting, compiled=True), "transformers", gpu_only=True
    ),
    "torch": Contender(lambda setting: Ours(setting, "torch"), "torch"),
    "torch inductor": Contender(
        lambda setting: Ours(setting, "torch", compile="inductor"), "torch", gpu_only=True
    ),
    "torch cudagraphs": Contender(
        lambda setting: Ours(setting, "torch", compile="cudagraphs"), "torch", gpu_only=True
    ),
    "jax": Contender(lambda setting: Ours(setting, "jax"), "jax"),
    "jax xla": Contender(lambda setting: Ours(setting, "jax", compile="xla"), "jax"),
    "numpy": Contender(lambda setting: Ours(setting, "numpy"), "numpy"),
    "native f32": Contender(
        lambda setting: Ours(setting, "native", quant="f32", threads=setting.threads), "numpy"
    ),
}
"""Everybody, transformers first: the others are compared with it."""


def run(name: str, setting: Setting) -> dict[str, float]:
    """Measure one contender: tokens per second, and what it takes besides; times in seconds."""
    from smollm2.bench import peak_memory

    started = time.perf_counter()
    model = CONTENDERS[name].open(setting)
    loaded = time.perf_counter() - started
    ids: list[int] = np.random.default_rng(0).integers(100, 20_000, setting.prompt).tolist()
    turns = [_write(model, ids, setting.decode) for _ in range(WARM_UPS + setting.iterations)]
    firsts, rests = zip(*turns[WARM_UPS:], strict=True)
    path = Path(setting.folder) / f"{CONTENDERS[name].file_name}.npy"
    np.save(path, model.logits(ids))
    return {
        "prefill": setting.prompt / median(firsts),
        "ttft_ms": 1000 * median(firsts),
        "decode": (setting.decode - 1) / median(rests),
        "load_s": loaded,
        "peak_mib": (_device_peak(setting) or peak_memory() or 0) / 2**20,
    }


def _write(model: Opened, ids: list[int], count: int) -> tuple[float, float]:
    """Seconds to the first token, and from there to the last."""
    started = time.perf_counter()
    token = model.first(ids)
    first = time.perf_counter()
    for _ in range(count - 1):
        token = model.next(token)
    return first - started, time.perf_counter() - first


def _device_peak(setting: Setting) -> int | None:
    """Bytes of GPU memory at most, where torch allocated them."""
    if setting.device != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated() or None
