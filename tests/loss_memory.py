"""Peak memory of a loss and its gradients for the shapes of 135M: ours, or of all logits at once.

    python -m tests.loss_memory packed|logits LAYERS

Prints the loss, then how many bytes the process grew by at most.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from random_model import SIZES

from smollm2.backends.torch.module import SmolLM2Module
from smollm2.backends.torch.ops import TorchOps
from smollm2.weights import Weights

TOKENS, LENGTH = 4096, 256


def peak() -> int:
    """The largest resident set of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def random_module(layers: int) -> SmolLM2Module:
    config = replace(SIZES["135M"], num_hidden_layers=layers)
    source = torch.Generator().manual_seed(0)

    def make(name: str) -> torch.Tensor:
        shape = config.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.randn(shape, generator=source) / shape[1] ** 0.5

    return SmolLM2Module(
        config, Weights.build(make, num_layers=layers, tied=True), TorchOps(config)
    )


def main() -> None:
    module = random_module(int(sys.argv[2]))
    tokens = torch.randint(0, 49152, (TOKENS,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).repeat(TOKENS // LENGTH)
    segments = torch.arange(TOKENS // LENGTH).repeat_interleave(LENGTH)
    targets = tokens.roll(-1)
    before = peak()
    if sys.argv[1] == "packed":
        loss = module.loss_packed(tokens, positions, segments, targets, torch.ones(TOKENS))
    else:
        shape = (TOKENS // LENGTH, LENGTH)
        logits = module(tokens.view(shape))["logits"].view(TOKENS, -1)
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    loss.backward()
    sys.stdout.write(f"{loss.item()} {peak() - before}\n")


if __name__ == "__main__":
    main()
