"""``smollm2 bench``: how fast a model reads and writes, beside what the machine can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smollm2.cli import options
from smollm2.cli.grouping import grouped
from smollm2.cli.loading import fetched, load_model, size_text
from smollm2.cli.terminal import Terminal
from smollm2.cli.usage import UsageError
from smollm2.errors import InputError

if TYPE_CHECKING:
    from smollm2.bench import Case, Limits, Speed

_HEADER = (
    "WORK",
    "TOKENS",
    "DEPTH",
    "BATCH",
    "TOKENS/S",
    "GB/S",
    "OF LIMIT",
    "GMAC/S",
    "OF LIMIT",
)
_UNKNOWN = "–"

Counts = list[str] | None
Prompt = Annotated[int, typer.Option("--prompt", metavar="N", help="Tokens to read.")]
Decode = Annotated[int, typer.Option("--decode", metavar="N", help="Tokens to write.")]
Depth = Annotated[
    Counts,
    typer.Option("--depth", metavar="N,N…", help="Tokens each row holds before.  [default: 0]"),
]
Batch = Annotated[
    Counts, typer.Option("--batch", metavar="N,N…", help="Rows of decode.  [default: 1]")
]
Repeats = Annotated[
    int, typer.Option("--repeats", metavar="N", help="Runs, of which the best counts.")
]


@grouped
def bench(
    *,
    loading: options.Loading,
    computing: options.Computing,
    quant: options.Quant = None,
    prompt: Prompt = 512,
    decode: Decode = 128,
    depth: Depth = None,
    batch: Batch = None,
    repeats: Repeats = 3,
    json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """Measure how fast a model reads and writes: prefill and decode.

    Bytes read and 8-bit products a second stand beside what the machine reaches at most, in the
    same run. Several depths and batches are combined. Nothing is sampled.

    --quant, --threads and --kv are of native. With --backend torch or jax there are --device: cpu,
    cuda (torch) or gpu (jax); --dtype: float32, bfloat16 or float16; --numerics: exact or fast;
    --compile: inductor or cudagraphs (torch), xla (jax).

    Example: smollm2 bench --depth 0,4096 --batch 1,8
    """
    from smollm2.backends import default_backend
    from smollm2.bench import Workload, measure, peak_memory, probe, read_first_prompt

    terminal = Terminal(no_color=no_color)
    backend = default_backend() if computing.backend is None else computing.backend
    try:
        works = [
            Workload(prompt=prompt, decode=decode, depth=each, batch=rows, repeats=repeats)
            for each, rows in product(_counts("depth", depth, 0), _counts("batch", batch, 1))
        ]
    except InputError as error:
        raise UsageError(str(error)) from None
    name = fetched(loading, terminal, prepare=backend == "native" and quant is None)
    started = perf_counter()
    loaded = load_model(loading, replace(computing, backend=backend), terminal, quant=quant)
    lm = loaded.lm
    read_first_prompt(lm)
    first_token = perf_counter() - started
    with terminal.status() as say:
        cases = measure(lm, works, say)
    peak = peak_memory()  # before the probe takes its own
    report = _Report(
        engine=f"smollm2 {backend}",
        model=name,
        threads=lm.threads,
        first_token=first_token,
        peak=peak,
        limits=probe(lm.threads),
    )
    if json:
        for case in cases:
            terminal.json(report.record(case))
    else:
        terminal.facts(report.facts())
        terminal.line()
        terminal.table(_HEADER, report.rows(cases), numbers=len(_HEADER) - 1)


def _counts(name: str, given: Counts, default: int) -> list[int]:
    """Numbers of an option that may be repeated and may have commas, each once."""
    texts = [text for part in given or () for text in part.split(",")]
    try:
        return list(dict.fromkeys(map(int, texts))) or [default]
    except ValueError:
        raise UsageError(f"--{name} takes numbers with commas between them") from None


@dataclass(frozen=True, slots=True)
class _Report:
    """What was measured beside the cases, and how all of it is written."""

    engine: str
    model: str
    threads: int | None
    first_token: float
    peak: int | None
    limits: Limits | None

    def record(self, case: Case) -> dict[str, Any]:
        """Describe a case for ``--json``, with the keys of other engines' benchmarks first."""
        work, limits = case.work, self.limits
        return {
            "engine": self.engine,
            "model": self.model,
            "threads": self.threads,
            "batch": work.batch,
            "depth": work.depth,
            "prefill": round(case.prefill.rate, 3),
            "decode": round(case.decode.rate, 3),
            "prompt": work.prompt,
            "first_token_s": round(self.first_token, 4),
            "peak_mb": None if self.peak is None else round(self.peak / 1e6, 1),
            "read_gb_s": limits and round(limits.read_gb_s, 2),
            "dot_gmac_s": limits and round(limits.dot_gmac_s, 1),
            "prefill_of_dot": self._share(case.prefill.dot_gmac_s, "dot_gmac_s"),
            "decode_of_read": self._share(case.decode.read_gb_s, "read_gb_s"),
            "decode_of_dot": self._share(case.decode.dot_gmac_s, "dot_gmac_s"),
        }

    def facts(self) -> Iterator[tuple[str, str]]:
        """What holds for all cases."""
        threads = "" if self.threads is None else f", {self.threads} threads"
        yield "model", self.model
        yield "engine", f"{self.engine}{threads}"
        yield "first token", f"{self.first_token:.3f} s after loading begins"
        yield "peak memory", _UNKNOWN if self.peak is None else size_text(self.peak)
        if self.limits is None:
            yield "machine", "its limits are not known without the native engine"
        else:
            yield (
                "machine",
                f"reads {self.limits.read_gb_s:.1f} GB/s, "
                f"multiplies {self.limits.dot_gmac_s:.0f} GMAC/s in 8 bit",
            )

    def rows(self, cases: Sequence[Case]) -> Iterator[tuple[object, ...]]:
        """The table: the prefill that all cases share, then decode of each."""
        work = cases[0].work
        yield ("prefill", work.prompt, 0, 1, *self._cells(cases[0].prefill))
        for case in cases:
            work = case.work
            yield ("decode", work.decode, work.depth, work.batch, *self._cells(case.decode))

    def _cells(self, speed: Speed) -> Iterator[str]:
        yield f"{speed.rate:.1f}"
        for name in ("read_gb_s", "dot_gmac_s"):
            used = getattr(speed, name)
            share = self._share(used, name)
            yield f"{used:.1f}"
            yield _UNKNOWN if share is None else f"{share:.0%}"

    def _share(self, used: float, name: str) -> float | None:
        limit = getattr(self.limits, name, 0)
        return round(used / limit, 4) if limit else None
