"""``smollm2 show``: what a model is made of."""

from __future__ import annotations

from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smollm2.cli import options
from smollm2.cli.loading import format_of, open_checkpoint, size_text
from smollm2.cli.terminal import Terminal
from smollm2.errors import SmolLM2Error, TemplateError

if TYPE_CHECKING:
    from pathlib import Path

    from smollm2.checkpoint import Checkpoint
    from smollm2.tokenizer import Tokenizer

_FEW = 8
"""Token ids that are shown in one line."""


def show(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name, folder, .gguf or .smol file.")
    ] = options.DEFAULT_MODEL,
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors instead.")] = False,
    template: Annotated[
        bool, typer.Option("--template", help="Write the chat template instead.")
    ] = False,
    offline: options.Offline = False,
    json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """Show what a model is made of.

    Its config, size, real bits per weight, tokenizer, stop ids and tensors.

    Example: smollm2 show smollm2-135m-instruct --tensors
    """
    terminal = Terminal(no_color=no_color)
    checkpoint = open_checkpoint(model, terminal, offline=offline)
    if template:
        if checkpoint.template is None:
            raise TemplateError(f"{model} has no chat template")
        terminal.text(checkpoint.template.source)
        terminal.end_line()
    elif tensors:
        _show_tensors(checkpoint, terminal, as_json=json)
    elif json:
        terminal.json(_described(model, checkpoint))
    else:
        terminal.facts(_facts(model, checkpoint))


def _show_tensors(checkpoint: Checkpoint, terminal: Terminal, *, as_json: bool) -> None:
    header = ("name", "kind", "shape", "bytes")
    rows = _tensors(checkpoint)
    if as_json:
        terminal.json([dict(zip(header, row, strict=True)) for row in rows])
    else:
        terminal.table(
            [title.upper() for title in header],
            [(name, kind, "x".join(map(str, shape)), nbytes) for name, kind, shape, nbytes in rows],
        )


def _described(model: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe a checkpoint for ``--json``."""
    tokenizer = checkpoint.tokenizer
    return {
        "model": model,
        "path": str(checkpoint.path),
        "format": format_of(checkpoint.path),
        "source": _source_of(checkpoint.path),
        "size_on_disk": _size_on_disk(checkpoint.path),
        "parameters": checkpoint.config.parameter_count,
        "bits_per_weight": _bits_per_weight(checkpoint),
        "config": checkpoint.config.to_dict(),
        "tokenizer": None
        if tokenizer is None
        else {
            "vocab_size": tokenizer.vocab_size,
            "special_tokens": dict(tokenizer.special_tokens),
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "pad_id": tokenizer.pad_id,
        },
        "has_template": checkpoint.template is not None,
        "stop_ids": _stop_ids(checkpoint),
    }


def _facts(model: str, checkpoint: Checkpoint) -> list[tuple[str, object]]:
    """Describe a checkpoint for people."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    bits = _bits_per_weight(checkpoint)
    kinds = ", ".join(f"{kind} {value:.2f}" for kind, value in bits.items() if kind != "all")
    facts: list[tuple[str, object]] = [
        ("model", model),
        ("path", checkpoint.path),
        ("format", format_of(checkpoint.path)),
        ("source", _source_of(checkpoint.path)),
        ("size on disk", size_text(_size_on_disk(checkpoint.path))),
        ("parameters", f"{config.parameter_count:,}"),
        ("bits per weight", f"{bits['all']:.2f} ({kinds})"),
        ("context length", f"{config.max_position_embeddings} tokens"),
        ("layers", config.num_hidden_layers),
        ("hidden size", f"{config.hidden_size}, mlp {config.intermediate_size}"),
        (
            "heads",
            f"{config.num_attention_heads} query, {config.num_key_value_heads} kv, "
            f"{config.head_dim} wide",
        ),
        ("rope theta", f"{config.rope_theta:g}"),
        ("norm epsilon", f"{config.rms_norm_eps:g}"),
        ("head", "tied to the embedding" if config.tie_word_embeddings else "of its own"),
        ("vocabulary", f"{config.vocab_size} tokens"),
    ]
    if tokenizer is None:
        facts.append(("tokenizer", "none"))
    else:
        facts += [
            ("special tokens", _token_texts(list(tokenizer.special_tokens.values()), tokenizer)),
            ("bos, eos, pad", f"{tokenizer.bos_id}, {tokenizer.eos_id}, {tokenizer.pad_id}"),
        ]
    facts += [
        ("stop ids", _token_texts(_stop_ids(checkpoint), tokenizer)),
        ("chat template", "none" if checkpoint.template is None else "see --template"),
    ]
    return facts


def _tensors(checkpoint: Checkpoint) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Name, kind, shape and bytes of each tensor, in file order."""
    from smollm2.checkpoint import state_of

    state = state_of(checkpoint.weights)
    return [
        (spec.name, spec.kind, spec.shape, state[spec.name].nbytes) for spec in state.descriptor
    ]


def _bits_per_weight(checkpoint: Checkpoint) -> dict[str, float]:
    """Bits stored for each weight, scales included: of each kind, and of ``all``."""
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for _, kind, shape, nbytes in _tensors(checkpoint):
        for key in (kind, "all"):
            counts[key] = counts.get(key, 0) + prod(shape)
            sizes[key] = sizes.get(key, 0) + nbytes
    return {key: 8 * sizes[key] / counts[key] for key in counts}


def _source_of(path: Path) -> str:
    """Where a model of the store was pulled from; ``local`` for any other, or where none is."""
    from smollm2.registry import list_models

    with suppress(SmolLM2Error, OSError):
        for model in list_models():
            if model.path == path:
                return f"{model.source}, revision {model.revision}"
    return "local"


def _size_on_disk(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _stop_ids(checkpoint: Checkpoint) -> list[int]:
    from smollm2.stopping import stop_ids

    return sorted(
        stop_ids(
            checkpoint.config,
            checkpoint.generation_config,
            checkpoint.tokenizer,
            checkpoint.template,
        )
    )


def _token_texts(ids: list[int], tokenizer: Tokenizer | None) -> str:
    """Ids with their texts; of many, the first and how many more."""
    shown = [
        str(i)
        if tokenizer is None or i >= tokenizer.vocab_size
        else f"{i} {tokenizer.token_bytes(i).decode('utf-8', 'replace')}"
        for i in ids[:_FEW]
    ]
    more = f" and {len(ids) - _FEW} more" if len(ids) > _FEW else ""
    return ", ".join(shown) + more if shown else "none"
