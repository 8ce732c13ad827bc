"""Sampling: how logits become the next token, in one definition that every backend repeats.

The order, in which 1 and 6 to 9 are as in transformers:

1. repetition penalty, over the tokens of prompt and output
2. presence penalty and 3. frequency penalty, over the tokens of the output
4. logit bias
5. allowed ids: all other tokens are out
6. temperature 0: the largest score, first of ties, and done; else divide by the temperature
7. top-k, 8. top-p, 9. min-p (``smollm2.sampling.processors``)
10. one draw, by the seed and the position of the token being chosen (``smollm2.sampling.draw``)

Stop ids are exempt from 1 to 3: an answer whose end is penalized rambles on. The defaults are
greedy and change nothing. Logprobs (``smollm2.sampling.logprobs``) are those before all of this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import NumericsError
from smollm2.sampling.draw import UNLIKELY, draw
from smollm2.sampling.logprobs import check_logits
from smollm2.sampling.params import SamplingParams
from smollm2.sampling.processors import (
    cutoff,
    penalize_presence,
    penalize_repetition,
    tally,
    temper,
)


class Sampler:
    """Chooses tokens by ``params``. A choice depends on the arguments of ``choose`` alone.

    ``stop_ids`` are the model's; they and ``params.stop_ids`` are exempt from penalties. Where
    ``params`` has no seed one is chosen: it is in ``.params.seed``.
    """

    def __init__(self, params: SamplingParams, stop_ids: Collection[int] = ()) -> None:
        self.params = params.with_seed()
        self._exempt = _unique({*stop_ids, *params.stop_ids})
        self._allowed = None if params.allowed_ids is None else _unique(params.allowed_ids)
        self._bias_ids = np.array([*params.logit_bias], dtype=np.intp)
        self._bias = np.array([*params.logit_bias.values()], dtype=np.float32)
        self._checked_vocab_size = 0

    def choose(
        self,
        logits: NDArray[np.float32],
        *,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        position: int,
    ) -> int:
        """Return the next token's id by its logits [V] float32, which stay as they are.

        ``position`` is the absolute position of the token being chosen.

        Raises ``NumericsError`` where the logits hold NaN or +inf or leave no token to choose,
        ``InputError`` where an option names a token that they do not have.
        """
        best = int(logits.argmax())
        check_logits(logits[best], position)
        if len(logits) != self._checked_vocab_size:
            self.params.check_ids(len(logits))
            self._checked_vocab_size = len(logits)
        scores = self._process(logits, prompt_ids, output_ids)
        if scores is not logits:
            best = int(scores.argmax())
            if not np.isfinite(scores[best]):
                raise NumericsError(
                    f"no token can be chosen at position {position}: the logits of all "
                    "allowed_ids are -inf"
                )
        chosen = best if self.params.temperature == 0 else self._draw(scores, position)
        return chosen if self._allowed is None else int(self._allowed[chosen])

    def _process(
        self, logits: NDArray[np.float32], prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> NDArray[np.float32]:
        """Do steps 1 to 5. Returns ``logits`` itself where there is nothing to do."""
        params, vocab_size = self.params, len(logits)
        scores = logits
        if params.repetition_penalty != 1:
            scores = logits.copy()
            tokens, counts = tally([*prompt_ids, *output_ids], self._exempt, vocab_size)
            powers = counts if params.repetition_counts else 1
            penalize_repetition(scores, tokens, powers, params.repetition_penalty)
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            scores = logits.copy() if scores is logits else scores
            tokens, counts = tally(output_ids, self._exempt, vocab_size)
            penalize_presence(
                scores, tokens, counts, params.presence_penalty, params.frequency_penalty
            )
        if params.logit_bias:
            scores = logits.copy() if scores is logits else scores
            scores[self._bias_ids] += self._bias
        return scores if self._allowed is None else scores[self._allowed]

    def _draw(self, scores: NDArray[np.float32], position: int) -> int:
        """Do steps 6 to 10. Returns an index into ``scores``."""
        params = self.params
        scores = temper(scores, params.temperature)
        limit = cutoff(scores, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        kept = np.flatnonzero(scores >= max(limit, UNLIKELY))
        ids = kept if self._allowed is None else self._allowed[kept]
        return int(kept[draw(scores[kept], ids, params.seed or 0, position)])


@dataclass(frozen=True, slots=True)
class Choice:
    """A token to be chosen: by whom, after which tokens, at which absolute position."""

    sampler: Sampler
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()

    def of(self, logits: NDArray[np.float32]) -> int:
        """The id that the sampler chooses by ``logits`` [V]."""
        return self.sampler.choose(
            logits,
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            position=self.position,
        )


def _unique(ids: Collection[int]) -> NDArray[np.intp]:
    return np.array(sorted({*ids}), dtype=np.intp)
