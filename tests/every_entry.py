"""Every entry once, with the same inputs, for the test that compares backends.

Run as ``python -m tests.every_entry BACKEND DTYPE FILE [RANK STORE]`` it writes to FILE what the
model of two shards gives: of torch in each of two processes that meet at STORE, of JAX with
XLA_FLAGS=--xla_force_host_platform_device_count=2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2 import entries
from smollm2.backends import get_backend
from smollm2.causal_lm import CausalLM
from tests.tiny import random_weights, tiny_config

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG, seed=3)
DRAWN = ("generate", "sample", "generate_until")
"""Entries that give ids."""

STEPS = 6
START = 12
"""Tokens that each row holds before ids are drawn."""

_IDS = np.random.default_rng(11).integers(3, CONFIG.vocab_size, (3, 40))
_ROWS = np.repeat(np.arange(3), [9, 5, 0])
_POSITIONS = np.concatenate([np.arange(9), np.arange(5)])


def every_entry(lm: CausalLM) -> dict[str, NDArray[Any]]:
    """What each entry gives, by its name."""
    return {**_plain(lm), **_side_by_side(lm), **_fixed(lm), **_paged(lm), **_drawn(lm)}


def prompts() -> NDArray[np.integer]:
    """What the rows hold before ids are drawn, [3, START]; the last of them is fed first."""
    return _IDS[:, :START]


def _plain(lm: CausalLM) -> dict[str, NDArray[Any]]:
    packed = _IDS[0, :14], _POSITIONS, _ROWS
    targets = _IDS[1, :14]
    return {
        "forward": entries.forward(lm, _IDS[:, :20]),
        "next_token": entries.next_token(lm, _IDS[:, :7]),
        "hidden_packed": entries.hidden_packed(lm, *packed),
        "log_probs_packed": entries.log_probs_packed(lm, *packed, targets),
        "loss_packed": np.array(
            entries.loss_packed(lm, *packed, targets, np.linspace(0, 1, 14, dtype=np.float32))
        ),
    }


def _side_by_side(lm: CausalLM) -> dict[str, NDArray[Any]]:
    cache = lm.new_cache(3, 64)
    return {
        "prefill": np.stack(
            [
                entries.prefill(lm, cache, _IDS[:, :10]),
                entries.prefill(lm, cache, _IDS[:, 10:13], 10),
            ]
        ),
        "decode": entries.decode(lm, cache, _IDS[:, 13:14], 13),
    }


def _fixed(lm: CausalLM) -> dict[str, NDArray[Any]]:
    slots, rows = lm.new_cache(3, 64), lm.new_cache(3, 64)
    last = [8, 13, -1]
    packed = entries.prefill_packed(lm, rows, _IDS[0, :14], _ROWS, _POSITIONS, _ROWS, last)
    late = _IDS[2, :6], [2] * 6, np.arange(6), [0] * 6, [-1, -1, 5]
    return {
        "prefill_slots": entries.prefill_slots(lm, slots, _IDS[:2, :12], [2, 0], [12, 4]),
        "prefill_packed": packed,
        "decode_rows": entries.decode_rows(lm, rows, _IDS[:, 20:21], [9, -1, -1]),
        "step_packed": entries.step_packed(lm, rows, *late, _IDS[:, 21:22], [10, 5, -1]),
    }


def _paged(lm: CausalLM) -> dict[str, NDArray[Any]]:
    cache = lm.new_paged_cache(6)
    table = np.array([[4, 2], [1, 0], [0, 0]])
    ids = np.resize(_IDS, 70)
    positions, rows = np.arange(70), np.zeros(70, int)
    slots = table[0, positions // 64] * 64 + positions % 64
    both = [entries.prefill_paged(lm, cache, ids, positions, rows, slots, [69, -1, -1], table)]
    both.append(entries.decode_paged(lm, cache, _IDS[:, :1], [70, -1, -1], table))
    late = _IDS[1, :5], np.arange(5), [1] * 5, 64 + np.arange(5), [-1, 4, -1]
    step = entries.step_paged(lm, cache, *late, _IDS[:, 1:2], [71, -1, -1], table)
    return {"prefill_paged": both[0], "decode_paged": both[1], "step_paged": step}


def _drawn(lm: CausalLM) -> dict[str, NDArray[Any]]:
    def filled() -> Any:
        cache = lm.new_cache(3, 64)
        entries.prefill(lm, cache, prompts()[:, :-1])
        return cache

    token, pos = prompts()[:, -1:], START - 1
    until, counts = entries.generate_until(lm, filled(), token, pos, range(48, 96), STEPS)
    ids = np.zeros((3, STEPS), np.int32)
    ids[:, : until.shape[1]] = until
    return {
        "generate": entries.generate(lm, filled(), token, pos, STEPS),
        "sample": entries.sample(lm, filled(), token, pos, 5, 0.9, STEPS),
        "generate_until": np.column_stack([counts, ids]),
    }


def main(name: str, dtype: str, file: str, *meeting: str) -> None:
    if meeting:
        import torch.distributed as dist

        rank, store = meeting
        dist.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=2)
    lm = get_backend(name).load(CONFIG, WEIGHTS, dtype=dtype, tensor_parallel=2)
    np.savez(Path(file), **every_entry(lm))
    if meeting:
        dist.barrier()  # nobody leaves while another still waits for it
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
