"""Options that several commands share, and what they mean together."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smollm2.cli.usage import UsageError
from smollm2.errors import InputError

if TYPE_CHECKING:
    from smollm2.sampling import SamplingParams

DEFAULT_MODEL = "smollm2-135m-instruct"

Model = Annotated[
    str, typer.Option("-m", "--model", metavar="MODEL", help="Name, folder, .gguf or .smol file.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option("-n", "--max-tokens", metavar="N", help="Stop after N tokens.  [default: 256]"),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "-t", "--temperature", metavar="T", help="0 takes the likeliest token.  [default: 0]"
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "-r", "--repetition-penalty", metavar="R", help="Above 1 repeats less.  [default: 1]"
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("-s", "--seed", metavar="SEED", help="Repeat an answer.  [default: random]"),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Likeliest tokens that make up P.  [default: 1]"),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", metavar="K", help="The K likeliest tokens only; 0 for all."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help=r"End before TEXT (\n is a newline); repeatable."),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="What computes: native, numpy, torch or jax.  [default: native, if it is here]",
    ),
]
Quant = Annotated[
    str | None,
    typer.Option("--quant", metavar="KIND", help="Kind of weights: q8, q4, q4m, bf16, f32, q16."),
]
HiddenQuant = Annotated[str | None, typer.Option("--quant", hidden=True)]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, help="Threads that compute.")
]
KV = Annotated[
    str | None,
    typer.Option("--kv", metavar="KIND", help="Kind of keys and values: int16, f32, int8."),
]
Device = Annotated[str | None, typer.Option("--device", hidden=True)]
DType = Annotated[str | None, typer.Option("--dtype", hidden=True)]
Compile = Annotated[str | None, typer.Option("--compile", hidden=True)]
Numerics = Annotated[str | None, typer.Option("--numerics", hidden=True)]
Offline = Annotated[
    bool, typer.Option("--offline", help="Never use the network; also SMOLLM2_OFFLINE=1.")
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colour; also NO_COLOR=1.")]

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Which model to load."""

    model: Model = DEFAULT_MODEL
    offline: Offline = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """What computes it, as far as it is said; the last four are of torch and jax."""

    backend: Backend = None
    threads: Threads = None
    kv: KV = None
    device: Device = None
    dtype: DType = None
    compile: Compile = None
    numerics: Numerics = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen, and how many."""

    max_tokens: MaxTokens = None
    temperature: Temperature = None
    repetition_penalty: RepetitionPenalty = None
    seed: Seed = None
    top_p: TopP = None
    top_k: TopK = None
    stop: Stop = None

    def params(self) -> SamplingParams:
        """Check them; what is None was not given. Raises ``UsageError`` for a wrong value."""
        from smollm2.sampling import SamplingParams

        given = {name: value for name, value in asdict(self).items() if value is not None}
        given["stop"] = [unescape(text) for text in self.stop or ()]
        try:
            return SamplingParams.of(**given)
        except InputError as error:
            raise UsageError(str(error)) from None


def unescape(text: str) -> str:
    r"""``\n``, ``\t``, ``\r`` and ``\\`` as the characters they stand for."""
    return re.sub(r"\\([ntr\\])", lambda match: _ESCAPES[match[1]], text)


def read_text(text: str | None) -> str:
    """Take the text that was given, or where it is ``-`` or missing all of stdin.

    A newline at the end of stdin is left out.

    Raises ``UsageError`` where there is nothing to read, and ``InputError`` for what is not UTF-8.
    """
    if text is not None and text != "-":
        return text
    if sys.stdin is None or (text is None and sys.stdin.isatty()):
        raise UsageError("there is no text: give it as an argument, or through a pipe")
    try:
        read = sys.stdin.read()
    except UnicodeDecodeError:
        raise InputError("stdin is not UTF-8 text") from None
    return read.removesuffix("\n").removesuffix("\r")


def read_file(path: Path) -> str:
    """The text of a file. Raises ``InputError`` where it is not UTF-8, and ``OSError``."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None
