"""``smollm2 chat``: talk with a model."""

from __future__ import annotations

from typing import Annotated

import typer

from smollm2.cli import options
from smollm2.cli.conversation import Conversation
from smollm2.cli.grouping import HIDDEN, grouped
from smollm2.cli.loading import load_model
from smollm2.cli.terminal import Terminal
from smollm2.cli.usage import UsageError


@grouped
def chat(
    *,
    loading: options.Loading,
    computing: Annotated[options.Computing, HIDDEN],
    quant: options.HiddenQuant = None,
    system: Annotated[
        str | None,
        typer.Option(
            "--system",
            metavar="TEXT",
            help="System prompt; '' for an empty one.",
        ),
    ] = None,
    no_system: Annotated[
        bool, typer.Option("--no-system", help="No system prompt at all.")
    ] = False,
    sampling: options.Sampling,
    drop_oldest: Annotated[
        bool,
        typer.Option("--drop-oldest", help="Forget old turns when the context is full."),
    ] = False,
    no_color: options.NoColor = False,
) -> None:
    """Talk with a model. Each line of a pipe is a turn.

    What computes is told as in bench: --backend, --quant, --threads, --kv; of torch and jax,
    --device, --dtype, --compile, --numerics.

    Example: smollm2 chat --system "You answer in one sentence."
    """
    terminal = Terminal(no_color=no_color)
    if no_system and system is not None:
        raise UsageError("--system and --no-system exclude each other: give one of them")
    params = sampling.params()
    loaded = load_model(loading, computing, terminal, quant=quant)
    session = loaded.chat(False if no_system else system, params=params, drop_oldest=drop_oldest)
    Conversation(session, terminal).run(loading.model)
