"""Stats: what is said about an answer when it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smollm2.results import Generation


def stats_parts(result: Generation, *, with_reason: bool = False) -> list[str]:
    """Counts, rates and the wait; then the seed where it made a difference, and why it ended."""
    ending = [f"seed {result.stats.seed}"] if result.params.temperature > 0 else []
    if with_reason:
        ending.append(result.finish_reason)
    return [result.stats.summary(), *([" · ".join(ending)] if ending else [])]
