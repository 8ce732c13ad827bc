"""What one and two devices of JAX compute, for tests: run with a file to write it to, as .npz.

XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two devices of a CPU.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from smollm2.backends.jax import losses
from smollm2.backends.jax.inputs import inputs_of, joined
from smollm2.backends.jax.layers import unstacked
from smollm2.backends.jax.loading import JaxBackend
from smollm2.backends.jax.model import JaxModel, run
from smollm2.batch import Batch, Span
from smollm2.config import Config
from smollm2.sampling import Choice, Sampler, SamplingParams
from tests.tiny import random_weights, tiny_config
from tests.training import packed

CONFIG = tiny_config(tie_word_embeddings=False)
TIED = tiny_config()
IDS = [int(i) for i in np.random.default_rng(7).integers(0, 96, 30)]
STEPS = 12
PAGES = np.array([[3, 1]], np.int32)


def results(config: Config, **options: Any) -> dict[str, Any]:
    model = JaxBackend().load(config, random_weights(config, seed=3), **options)
    batch = packed([9, 250], vocabulary=96)
    places = jax.tree.map(lambda array: array.sharding, model.weights)
    loss = jax.jit(
        jax.value_and_grad(partial(losses.loss_packed, ops=model.ops)),
        out_shardings=(None, places),
    )
    compiled = loss.lower(model.weights, *batch.arrays).compile()
    value, stacks = compiled(model.weights, *batch.arrays)
    gradients = unstacked(stacks)
    found = {
        **decoded(model),
        "loss": np.asarray(value),
        "loss_text": compiled.as_text(),
        **{f"grad:{name}": np.asarray(array) for name, array in gradients.items()},
        "split": [name for name, array in stacks.items() if _is_split(array)],
    }
    if not config.tie_word_embeddings:
        sequence = Batch.build([Span(0, 0, IDS, "all")])
        found["logits"] = model.forward(sequence)
        found["log_probs"] = model.log_probs(sequence, np.array([*IDS[1:], -100], np.int32))
        found["paged"] = paged(model)
        found["sampled"] = np.array(sampled(model))
    return found


def decoded(model: JaxModel) -> dict[str, Any]:
    """Greedy ids, the logits that they were chosen by, and the compiled step."""
    cache = model.new_cache(2, 64)

    def batch(start: int, ids: list[int]) -> Batch:
        span = Span(1, start, ids)
        return Batch.build([span], page_table=cache.page_table, page_size=cache.page_size)

    chosen, rows = [], [model.forward(batch(0, IDS), cache)[0]]
    for step in range(STEPS):
        chosen.append(int(rows[-1].argmax()))
        rows.append(model.forward(batch(len(IDS) + step, chosen[-1:]), cache)[0])
    ints, form = joined(inputs_of(batch(len(IDS) + STEPS, [5]), num_pages=2))
    step_of = run.lower(
        model.weights, ints, cache.storage, ops=model.ops, form=form, output="logits"
    )
    module = model.as_nnx()
    again = JaxModel(module.ops, module.weights)
    stored = again.new_cache(2, 64)
    return {
        "as_nnx": again.forward(batch(0, IDS), stored)[0],
        "as_nnx_split": _is_split(stored.storage[0].keys),
        "prompt": rows[0],
        "ids": np.array(chosen),
        "decode": np.stack(rows),
        "decode_text": step_of.compile().as_text(),
        "cache_split": _is_split(cache.storage[0].keys),
    }


def sampled(model: JaxModel) -> list[int]:
    """Ids that are chosen where the logits are: greedily, drawn, and drawn from the best."""
    spans = [Span(row, 0, IDS[row : row + 10]) for row in range(3)]
    rows = [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.5, "top_k": 5}]
    params = [SamplingParams(seed=7, **each) for each in rows]
    return model.choose(Batch.build(spans), [Choice(Sampler(each), 10) for each in params])


def paged(model: JaxModel) -> Any:
    cache = model.new_paged_cache(4)
    for start, part in ((0, IDS * 2), (60, IDS[:20])):
        span = Span(0, start, part, "all")
        batch = Batch.build([span], page_table=PAGES, page_size=cache.page_size)
        logits = model.forward(batch, cache)
    return logits


def _is_split(array: jax.Array) -> bool:
    return len(array.sharding.device_set) == 2 and not array.sharding.is_fully_replicated


def main(path: str) -> None:
    mesh = jax.make_mesh((1, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    runs = {
        "one": results(CONFIG),
        "two": results(CONFIG, tensor_parallel=2),
        "tied": results(TIED, compile="xla"),
        "mesh": results(TIED, compile="xla", tensor_parallel=mesh),
    }
    single = JaxBackend().load(CONFIG, random_weights(CONFIG, seed=3), tensor_parallel=1)
    runs["single"] = decoded(single)
    np.savez(path, **{f"{run}/{k}": v for run, found in runs.items() for k, v in found.items()})


if __name__ == "__main__":
    main(sys.argv[1])
