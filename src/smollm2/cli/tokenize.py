"""``smollm2 tokenize``: the token ids of a text."""

from __future__ import annotations

import json as json_
from typing import Annotated

import typer

from smollm2.cli import options
from smollm2.cli.loading import open_checkpoint
from smollm2.cli.terminal import Terminal
from smollm2.errors import TokenizerError


def tokenize(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="A text; - or a pipe reads stdin.")
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    allow_special: Annotated[
        bool, typer.Option("--allow-special", help="Read <|im_start|> and the like as one token.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Write the ids only, in one line.")] = False,
    offline: options.Offline = False,
    json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """Show the tokens of a text.

    Each token's id and piece; bytes that are no whole character are escaped.

    Example: smollm2 tokenize "Hello, world"
    """
    terminal = Terminal(no_color=no_color)
    text = options.read_text(text)
    tokenizer = open_checkpoint(model, terminal, offline=offline).tokenizer
    if tokenizer is None:
        raise TokenizerError(f"{model} has no tokenizer.json: add one, or take another model")
    token_ids = tokenizer.encode(text, allow_special=allow_special)
    pieces = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    roundtrips = tokenizer.can_roundtrip(text)
    if json:
        shown = [piece.decode("utf-8", "backslashreplace") for piece in pieces]
        terminal.json({"token_ids": token_ids, "pieces": shown, "roundtrips": roundtrips})
    elif ids:
        terminal.line(" ".join(map(str, token_ids)))
    else:
        quoted = map(_quoted, pieces)
        terminal.table(("ID", "PIECE"), list(zip(token_ids, quoted, strict=True)))
        if terminal.interactive:
            terminal.note("1 token" if len(token_ids) == 1 else f"{len(token_ids)} tokens")
    if not roundtrips:
        terminal.note("this text does not come back whole from its tokens")


def _quoted(piece: bytes) -> str:
    r"""Write a piece as a JSON string, in which bytes that are no character are ``\xff``."""
    text = json_.dumps(piece.decode("utf-8", "surrogateescape"), ensure_ascii=False)
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
