"""TorchOps: the table of operations, filled with what torch has best for each.

With no cache every result can be differentiated with respect to the weights. Nothing but
``attend`` writes, and only into a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody calls it so
from torch import Tensor
from torch.utils import checkpoint

from smollm2.backends.torch.losses import log_probs
from smollm2.backends.torch.plan import Part, Plan
from smollm2.config import Config
from smollm2.weights import Attention, Block, Mlp


def _onednn_product() -> Callable[[Tensor, Tensor], Tensor] | None:
    """The product of oneDNN, in float32 up to twice as fast as BLAS; None where it is not as known.

    It has no public name, so that a later torch may have another: it is tried.
    """

    def product(x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return result

    numbers = torch.arange(12, dtype=torch.float32, device="cpu")  # exact in any precision
    x, weight = numbers[:6].view(2, 3), numbers.view(4, 3)
    try:
        with torch.inference_mode():
            same = torch.equal(product(x, weight), (x[:, None] * weight).sum(-1))
    except (AttributeError, RuntimeError, TypeError):
        return None
    return product if same else None


_ONEDNN_PRODUCT = _onednn_product()

_checkpoint: Callable[..., Any] = checkpoint.checkpoint  # which has no types


class TorchOps:
    """The table. Norms are float32 inside, whatever the dtype; rotations are that of the angles.

    ``recompute_every``: of every so many layers the first keeps nothing for the backward pass but
    what came in, and is computed once more in it (0: all layers keep all).
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.recompute_every = 0

    @property
    def kv_heads(self) -> int:
        """Heads whose keys and values are stored."""
        return self._config.num_key_value_heads

    @property
    def writes(self) -> bool:
        """Whether this process writes what all have."""
        return True

    def whole(self, weight: Tensor) -> Tensor:
        """All of a weight."""
        return weight

    def agree(self, numbers: list[int]) -> list[int]:
        """The numbers that all processes go on with."""
        return numbers

    def embed(self, table: Tensor, plan: Plan) -> Tensor:
        """Rows of the embedding, [T, C]."""
        return F.embedding(plan.ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm over the last axis."""
        return F.rms_norm(x, x.shape[-1:], weight, self._config.rms_norm_eps)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x · weightᵀ`` [n, out]: the one place where activations meet a matrix [out, in].

        What is not ``F.linear`` is faster on a CPU, for inference only, and knows no autocast.
        """
        if x.is_cpu and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
            if torch.compiler.is_compiling():
                if len(x) == 1:  # a loop that the compiler writes, with what comes before and after
                    return (weight.float() * x.float()).sum(-1).to(x.dtype)[None]
            elif _ONEDNN_PRODUCT is not None and x.dtype == torch.float32:
                return _ONEDNN_PRODUCT(x, weight)
        return F.linear(x, weight)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Matrix product with a weight [out, in]."""
        return self.product(x, weight)

    def qkv(self, x: Tensor, attention: Attention[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Three products, split into heads."""
        shape = (len(x), -1, self._config.head_dim)
        return (
            self.product(x, attention.query).view(shape),
            self.product(x, attention.key).view(shape),
            self.product(x, attention.value).view(shape),
        )

    def rope(self, x: Tensor, plan: Plan) -> Tensor:
        """Rotary embedding in the half-split form: halves (a, b) of a head rotate as pairs."""
        swapped = x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x * plan.cos, swapped, plan.sin).to(x.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, plan: Plan) -> Tensor:
        """Causal attention of each part over its stored (or own) keys and values."""
        if plan.stored is None:
            keys, values = key[None], value[None]
        else:
            keys, values = plan.stored[layer]
            keys.flatten(0, 1).index_copy_(0, plan.slots, key)
            values.flatten(0, 1).index_copy_(0, plan.slots, value)
        results = [_attend_part(query, keys, values, part) for part in plan.parts]
        result = results[0] if len(results) == 1 else torch.cat(results)
        return result if plan.places is None else result[plan.places]

    def swiglu(self, x: Tensor, mlp: Mlp[Tensor]) -> Tensor:
        """Gated MLP."""
        return self.product(F.silu(self.product(x, mlp.gate)) * self.product(x, mlp.up), mlp.down)

    def blocks(
        self,
        x: Tensor,
        blocks: Sequence[Block[Tensor]],
        plan: Plan,
        block: Callable[[Tensor, Block[Tensor], int, Plan], Tensor],
    ) -> Tensor:
        """One layer after the other."""
        for layer, weights in enumerate(blocks):
            x = self.recomputed(block, layer)(x, weights, layer, plan)
        return x

    def recomputed(self, block: Callable[..., Tensor], layer: int) -> Callable[..., Tensor]:
        """``block``, with activation checkpointing where this layer is to have it."""
        every = self.recompute_every
        if every == 0 or layer % every > 0 or not torch.is_grad_enabled():
            return block
        return partial(_checkpoint, block, use_reentrant=False, preserve_rng_state=False)

    def wanted(self, x: Tensor, plan: Plan) -> Tensor:
        """Rows whose logits are wanted."""
        return x[plan.wanted]

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Logits, [W, V] float32."""
        return self.product(x, weight).float()

    def log_probs(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Log-probability of each target [W], float32, without the logits of all at a time."""
        return log_probs(x, weight, targets)


def _attend_part(query: Tensor, keys: Tensor, values: Tensor, part: Part) -> Tensor:
    """Attention of the queries of ``query`` [T, H, D] that are in a part, [N·Q, H·D].

    ``keys`` and ``values`` [pages, room, K, D]; query heads share kv heads in consecutive groups.
    """
    queries = query if part.queries is None else query[part.queries]
    rectangle = queries.view(part.form.count, part.form.queries, *query.shape[1:])
    result = attention(
        rectangle.transpose(1, 2),
        _seen(part, keys),
        _seen(part, values),
        mask=part.mask,
        causal=part.form.causal,
        shares_heads=query.is_cpu or (part.mask is None and query.dtype != torch.float32),
    )
    return result.transpose(1, 2).flatten(0, 1).flatten(1)


def _seen(part: Part, stored: Tensor) -> Tensor:
    """What a part sees of the stored keys or values, [N, K, S, D]; not copied if it lies so."""
    form = part.form
    if form.page is not None:
        seen = stored[form.page : form.page + form.count, : form.keys]
    else:
        seen = stored.flatten(0, 1)[part.keys].view(form.count, form.keys, *stored.shape[2:])
    return seen.transpose(1, 2)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    shares_heads: bool,
) -> Tensor:
    """Attention of query [N, H, Q, D] over key and value [N, K, S, D], where H is a multiple of K.

    ``shares_heads``: torch's best kernel lets query heads share kv heads. On a GPU that is one of
    several kernels, and those for masks and for float32 do not: there, one query's heads become
    queries of its kv head, and of more queries the keys and values are repeated.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    if shares_heads or heads == kv_heads:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=heads != kv_heads
        )
    if query.shape[2] == 1:
        merged = query.reshape(len(query), kv_heads, -1, query.shape[-1])
        result = F.scaled_dot_product_attention(merged, key, value, attn_mask=mask)
        return result.reshape(query.shape)
    key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
