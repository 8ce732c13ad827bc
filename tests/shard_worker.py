"""One of two processes that share a model: computes everything, and writes what came out.

python -m tests.shard_worker RANK FOLDER
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from smollm2.backends.torch import TorchModel, backend
from smollm2.backends.torch.shards import mesh_of
from smollm2.batch import Batch, Span
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.generate import SmolLM2
from smollm2.sampling import Choice, Sampler, SamplingParams
from tests.tiny import random_weights, tiny_config

CONFIGS = {"tied": tiny_config(), "untied": tiny_config(tie_word_embeddings=False)}
WIDE = tiny_config(num_key_value_heads=4)
IDS = np.random.default_rng(7).integers(0, 96, 40).tolist()
POSITIONS = np.concatenate([np.arange(25), np.arange(15)])
SEGMENTS = np.repeat([0, 1], [25, 15])
TARGETS = np.array([*IDS[1:], -100])
FACTORS = np.linspace(0.1, 2, 40, dtype=np.float32) * (TARGETS != -100)


def load(name: str, **options: Any) -> TorchModel:
    return backend.load(CONFIGS[name], random_weights(CONFIGS[name], seed=3), **options)


def answers(model: TorchModel) -> dict[str, Any]:
    """Logits without a cache and with one, greedy ids, log-probabilities."""
    cache = model.new_cache(2, 64)
    made = []
    for spans in ([Span(0, 0, IDS[:20]), Span(1, 0, IDS[20:29])], [Span(1, 9, IDS[29:30])]):
        batch = Batch.build(spans, page_table=cache.page_table, page_size=cache.page_size)
        made.append(model.forward(batch, cache))
    greedy, token = [], int(made[-1][-1].argmax())
    for position in range(10, 16):
        span = Span(1, position, [token])
        batch = Batch.build([span], page_table=cache.page_table, page_size=cache.page_size)
        token = int(model.forward(batch, cache)[0].argmax())
        greedy.append(token)
    whole = Batch.build([Span(0, 0, IDS, "all")])
    return {
        "forward": model.forward(whole),
        "cached": np.concatenate(made),
        "greedy": greedy,
        "hidden": model.hidden(whole),
        "log_probs": model.log_probs(whole, TARGETS.astype(np.int32)),
        "cache_bytes": cache.nbytes,
    }


def drawn(model: TorchModel) -> list[Any]:
    """What is drawn without a seed: ids, the seeds that they are said to come from, a choice."""
    writer, batch = SmolLM2(model), Batch.build([Span(0, 0, IDS[:5])])
    made: list[Any] = []
    options: Any = {"max_tokens": 9, "temperature": 2.0, "ignore_eos": True}
    for logprobs in (None, 1):
        stream = writer.stream(IDS[:5], logprobs=logprobs, **options)
        made += [stream.finish().token_ids, stream.request.params.seed]
    hot = SamplingParams(temperature=9.0)
    return [*made, *(model.choose(batch, [Choice(Sampler(hot), 5)]) for _ in range(9))]


def trained(model: TorchModel, folder: Path) -> dict[str, Any]:
    """Loss, gradients, and the weights after a step, all of them whole."""
    module = model.as_module()
    loss = module.loss_packed(np.array(IDS), POSITIONS, SEGMENTS, TARGETS, FACTORS)
    loss.backward()
    rows = module(torch.tensor(IDS).view(2, 20), labels=torch.tensor(IDS).view(2, 20))
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    gradients = {name: whole(value.grad) for name, value in module.named_parameters()}
    torch.optim.AdamW(module.parameters(), lr=1e-2).step()
    module.save_pretrained(folder)
    return {
        "loss": loss.detach(),
        "row_loss": rows.loss.detach(),
        "norm": whole(norm),
        "gradients": gradients,
        "stepped": {name: whole(value) for name, value in module.named_parameters()},
    }


def whole(value: Any) -> Any:
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def collectives(model: TorchModel) -> dict[str, dict[str, int]]:
    """How often the processes talk to each other, by what is done and the name of the call."""
    module = model.as_module()
    ids = torch.tensor([IDS])
    counts = {}
    for name in ("loss", "logits"):
        with CommDebugMode() as forward:
            made = module(ids, labels=ids if name == "loss" else None)
        result = made["loss"] if name == "loss" else made["logits"].sum()
        with CommDebugMode() as backward:
            result.backward()
        for way, mode in ((name, forward), (f"{name}_backward", backward)):
            counts[way] = {str(call): n for call, n in mode.get_comm_counts().items() if n}
    return counts


def error(config: Config = CONFIGS["tied"], **options: Any) -> str:
    try:
        backend.load(config, random_weights(config), **options)
    except InputError as problem:
        return str(problem)
    return ""


def error_of_mesh(mesh: DeviceMesh) -> str:
    try:
        mesh_of(WIDE, mesh, "cuda")
    except InputError as problem:
        return str(problem)
    return ""


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    before = error(tensor_parallel=2)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=100),
    )
    result: dict[str, Any] = {}
    for name in CONFIGS:
        model = load(name, tensor_parallel=2)
        result[name] = {
            **answers(model),
            "drawn": drawn(model),
            "collectives": collectives(model),
            "weight_bytes": sum(part.to_local().nbytes for _, part in model.weights.items()),
            **trained(model, folder / name),
        }
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    by_mesh = load("tied", tensor_parallel=mesh["model"])
    result["mesh"] = by_mesh.forward(Batch.build([Span(0, 0, IDS, "all")]))
    half = load("tied", tensor_parallel=2, dtype="bfloat16")
    result["bfloat16"] = half.forward(Batch.build([Span(0, 0, IDS, "all")]))
    result["errors"] = {
        "none": before,
        "mesh": error(tensor_parallel=mesh),
        "divides": error(tensor_parallel=3),
        "kind": error(tensor_parallel="2"),
        "device": error_of_mesh(mesh["model"]),
        "size": error(WIDE, tensor_parallel=4),
    }
    torch.save(result, folder / f"{rank}.pt")
    dist.barrier()  # nobody leaves while another still waits for it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
