"""Entries: every way to call a model, each a builder of integers and a few lines around it.

All take a ``CausalLM`` of any backend, a cache where they use one, and integers as arrays or
nested lists; they return NumPy arrays. ``ENTRIES`` lists them with their inputs, for exports.

- without a cache: ``forward``, ``next_token``
- one sequence a row, all at once: ``prefill``, ``decode``; loops of it: ``generate``, ``sample``,
  ``generate_until``
- rows of their own: ``prefill_slots``, ``prefill_packed``, ``decode_rows``, ``step_packed``
- the same over pages: ``prefill_paged``, ``decode_paged``, ``step_paged``
- training and scoring: ``loss_packed``, ``log_probs_packed``, ``hidden_packed``
"""

from smollm2.entries.builders import Tokens
from smollm2.entries.cached import (
    decode,
    decode_paged,
    decode_rows,
    prefill,
    prefill_packed,
    prefill_paged,
    prefill_slots,
    step_packed,
    step_paged,
)
from smollm2.entries.guards import cache_length
from smollm2.entries.loops import generate, generate_until, sample
from smollm2.entries.plain import (
    forward,
    hidden_packed,
    log_probs_packed,
    loss_packed,
    next_token,
)
from smollm2.entries.table import ENTRIES, Entry, Input

__all__ = [
    "ENTRIES",
    "Entry",
    "Input",
    "Tokens",
    "cache_length",
    "decode",
    "decode_paged",
    "decode_rows",
    "forward",
    "generate",
    "generate_until",
    "hidden_packed",
    "log_probs_packed",
    "loss_packed",
    "next_token",
    "prefill",
    "prefill_packed",
    "prefill_paged",
    "prefill_slots",
    "sample",
    "step_packed",
    "step_paged",
]
