"""CompiledOps: the table of operations with layers that ``torch.compile`` has fused.

A layer is compiled, not the model: all layers are alike, so that one program serves them all.
Attention stays out of it, because of its shapes, which follow the lengths of sequences; what is
left depends on the number of tokens alone. So there are four programs: the layer before and after
attention, each for one token and for any other number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from smollm2.backends.torch.ops import TorchOps
from smollm2.backends.torch.plan import Plan
from smollm2.config import Config
from smollm2.weights import Block

F = TypeVar("F", bound=Callable[..., Any])


def _not_compiled(function: F) -> F:
    compiler: Any = torch.compiler  # its decorators have no types
    called: F = compiler.disable(function)
    return called


class CompiledOps(TorchOps):
    """The table; compiling happens at the first batch of one token, and of more."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._block: Callable[..., Tensor] | None = None

    def __getstate__(self) -> dict[str, object]:
        """What a copy begins with: the programs themselves are the process's, and found again."""
        return {**self.__dict__, "_block": None}

    @_not_compiled
    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, plan: Plan) -> Tensor:
        """Attention, at which a program ends and the next begins."""
        return _of_any_length(super().attend(query, key, value, layer, plan))

    def blocks(
        self,
        x: Tensor,
        blocks: Sequence[Block[Tensor]],
        plan: Plan,
        block: Callable[[Tensor, Block[Tensor], int, Plan], Tensor],
    ) -> Tensor:
        """One layer after the other; each is told that it is the first, to be the same program."""
        if self._block is None:  # the text makes the same one each time, of these operations
            self._block = torch.compile(block)
        x, cos, sin = (_of_any_length(tensor) for tensor in (x, plan.cos, plan.sin))
        for layer, weights in enumerate(blocks):
            stored = plan.stored and plan.stored[layer : layer + 1]
            compiled = self.recomputed(self._block, layer)
            x = compiled(x, weights, 0, replace(plan, cos=cos, sin=sin, stored=stored))
        return x


def _of_any_length(x: Tensor) -> Tensor:
    """Tell the compiler that the number of tokens may change, unless it is one."""
    if len(x) > 1:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return x
