"""The PyTorch backend: the rules of all backends, and NumPy's numbers."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from smollm2.backends import numpy as numpy_backend  # noqa: E402 - torch may be missing
from smollm2.backends.rotary import rotary_tables  # noqa: E402
from smollm2.backends.torch import (  # noqa: E402
    TorchBackend,
    TorchModel,
    ops as ops_module,
)
from smollm2.backends.torch.cache import TorchCache  # noqa: E402
from smollm2.backends.torch.ops import TorchOps, attention  # noqa: E402
from smollm2.batch import Batch, Span  # noqa: E402
from smollm2.cache import Layout  # noqa: E402
from smollm2.causal_lm import CausalLM  # noqa: E402
from smollm2.errors import CacheError, InputError  # noqa: E402
from smollm2.model import forward  # noqa: E402
from smollm2.quantize import Quantized  # noqa: E402
from smollm2.sampling import Choice, Sampler, SamplingParams  # noqa: E402
from tests.backend_rules import (  # noqa: E402
    CONFIG,
    IDS,
    WEIGHTS,
    TableRules,
    full,
    in_parts,
    over_pages,
    spans,
)
from tests.entry_rules import EntryRules  # noqa: E402
from tests.tiny import random_weights, tiny_config  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

backend = TorchBackend()
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]

TOLERANCE = {"float32": 2e-5, "float16": 0.03, "bfloat16": 0.25}
"""How far logits of about ±3 may be from NumPy's; the root mean square, an eighth of that."""


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return backend.load(CONFIG, WEIGHTS)


class TestRules(TableRules):
    """What every backend keeps to."""


class TestEntries(EntryRules):
    """What the entries of every backend keep to."""


def close(got: NDArray[Any], expected: NDArray[Any], dtype: str = "float32") -> None:
    difference = np.abs(got - expected)
    assert got.dtype == np.float32
    assert difference.max(initial=0) < TOLERANCE[dtype]
    assert np.sqrt((difference**2).mean()) < TOLERANCE[dtype] / 8


# Against NumPy


CONFIGS = {
    "grouped heads": tiny_config(),
    "one kv head": tiny_config(num_key_value_heads=1),
    "as many kv heads": tiny_config(num_key_value_heads=4),
    "untied": tiny_config(tie_word_embeddings=False),
    "own head size": tiny_config(head_dim=24),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*TOLERANCE])
@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_are_numpys(name: str, dtype: str, device: str) -> None:
    """Without a cache, in chunks with one, and rows of several lengths decoding side by side."""
    config = CONFIGS[name]
    weights = random_weights(config, seed=5)
    reference = numpy_backend.backend.load(config, weights)
    model = backend.load(config, weights, dtype=dtype, device=device)
    close(full(model, IDS), full(reference, IDS), dtype)
    cache = model.new_cache(1, 200)
    close(in_parts(model, cache, IDS[:90], [5, 1, 70, 14]), full(reference, IDS[:90]), dtype)
    close(_rows(model), _rows(reference), dtype)
    close(model.hidden(_packed()), reference.hidden(_packed()), dtype)


def _packed() -> Batch:
    return Batch.build([Span(0, 0, IDS[:40], "all"), Span(0, 3, IDS[40:47], "all")])


def _rows(model: CausalLM) -> NDArray[np.float32]:
    cache = model.new_cache(4, 64)
    lengths = (9, 33, 2, 33)
    prompts = [Span(row, 0, IDS[row : row + n]) for row, n in enumerate(lengths)]
    logits = [model.forward(spans(cache, *prompts), cache)]
    step = [Span(row, n, IDS[row : row + 1]) for row, n in enumerate(lengths)]
    logits.append(model.forward(spans(cache, *step), cache))
    equal = [Span(row, 34, IDS[row : row + 1]) for row in (1, 3)]
    logits.append(model.forward(spans(cache, *equal), cache))
    return np.concatenate(logits)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_in_any_order(device: str) -> None:
    model = backend.load(CONFIG, WEIGHTS, device=device)
    table = np.array([[5, 2, 9], [7, 1, 3]], np.int32)
    cache = model.new_paged_cache(10)
    parts = [Span(0, 0, IDS[:100], "all"), Span(1, 0, IDS[50:120], "all")]
    got = model.forward(Batch.build(parts, page_table=table, page_size=64), cache)
    step = [Span(0, 100, IDS[100:101]), Span(1, 70, IDS[120:121])]
    got = np.concatenate(
        [got, model.forward(Batch.build(step, page_table=table, page_size=64), cache)]
    )
    first, second = full(model, IDS[:101]), full(model, IDS[50:121])
    close(got, np.concatenate([first[:-1], second[:-1], first[-1:], second[-1:]]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_dtype_is_that_of_the_checkpoint(dtype: Any) -> None:
    model = backend.load(CONFIG, random_weights(CONFIG, dtype=dtype))
    assert str(model.dtype) == f"torch.{np.dtype(dtype).name}"
    exact = np.asarray(random_weights(CONFIG, dtype=dtype).token_embedding, np.float32)
    np.testing.assert_array_equal(model.weights.token_embedding.float().numpy(), exact)
    cache = model.new_cache(1, 64)
    model.forward(spans(cache, Span(0, 0, IDS[:3])), cache)
    assert cache.nbytes == 64 * model.traffic.token
    assert model.traffic.weights == CONFIG.parameter_count * np.dtype(dtype).itemsize


def test_quantized_and_mixed_checkpoints_are_float32() -> None:
    norms = random_weights(CONFIG).map(
        lambda _, w: w.astype(np.float16) if w.ndim == 2 else w.astype(np.float32)
    )
    assert backend.load(CONFIG, norms).dtype == torch.float16
    blocks = np.zeros((96, 2, 34), np.uint8)
    blocks[..., :2] = np.array([1], np.float16).view(np.uint8)
    blocks[..., 2:] = np.random.default_rng(0).integers(0, 128, (96, 2, 32))
    packed = Quantized("Q8_0", (96, 64), blocks.reshape(96, -1))
    mixed = WEIGHTS.map(lambda name, w: packed if "embed_tokens" in name else w)
    model = backend.load(CONFIG, mixed)
    assert model.dtype == torch.float32
    np.testing.assert_array_equal(model.weights.token_embedding.numpy(), packed.dequantize())


def test_memory_that_was_never_written_is_not_read(model: TorchModel) -> None:
    """Rows of two lengths decode side by side, while new memory is full of NaN."""
    cache = model.new_cache(2, 64)
    torch.use_deterministic_algorithms(True)  # which fills it
    try:
        model.forward(spans(cache, Span(0, 0, IDS[:9]), Span(1, 0, IDS[:3])), cache)
        logits = model.forward(spans(cache, Span(0, 9, IDS[9:10]), Span(1, 3, IDS[3:4])), cache)
    finally:
        torch.use_deterministic_algorithms(False)
    for row, count in enumerate((10, 4)):
        close(logits[row], full(model, IDS[:count])[-1])


def test_a_cache_beyond_all_memory_is_an_error() -> None:
    layout = Layout(2**24, 64, paged=True)
    dtype, device = torch.float32, torch.device("cpu")
    cache = TorchCache(layout, layers=1, heads=2**10, size=2**10, dtype=dtype, device=device)
    with pytest.raises(CacheError, match="no memory for a KV cache of 1073741824 tokens: take"):
        cache.prepare(over_pages([[1]], Span(0, 0, IDS[:2])))
    assert cache.nbytes == 0


def test_a_cache_made_in_inference_mode_is_as_good(model: TorchModel) -> None:
    """What torch made in it can be changed in it only."""
    cache = model.new_cache(1, 64)
    with torch.inference_mode():
        model.forward(spans(cache, Span(0, 0, IDS[:20])), cache)
    cache.reset()
    close(model.forward(spans(cache, Span(0, 0, IDS[:9])), cache)[0], full(model, IDS[:9])[-1])


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quant": "q8"},
            "the torch backend has no option quant, which is of native: leave it out",
        ),
        ({"threads": 2}, "no option threads"),
        ({"kv": "f32"}, "no option kv"),
        ({"mmap": True}, "no option mmap"),
        ({"dtype": "float64"}, "dtype is 'float64': choose from float32, bfloat16, float16"),
        ({"numerics": "sloppy"}, "numerics is 'sloppy': choose from exact, fast"),
        ({"compile": "max"}, "compile is 'max': choose from inductor, cudagraphs"),
        ({"compile": "cudagraphs"}, "for device='cuda', not 'cpu': use 'inductor'"),
        ({"device": "tpu"}, "device is 'tpu': choose from cpu, cuda, cuda:0 and mps"),
        ({"device": "cuda:x"}, "device is 'cuda:x': choose"),
        ({"device": "cpu:-1"}, "device is 'cpu:-1': choose"),
        ({"device": 0}, "device is 0: choose"),
        ({"device": "cpu:1"}, "device is 'cpu:1', but torch finds 1 here: cpu:0 is the first"),
        ({"device": "mps"}, "device is 'mps', but torch finds no such device here: use 'cpu'"),
        ({"tensor_parallel": True}, "tensor_parallel is True: give a number of processes"),
        ({"compile": "inductor", "tensor_parallel": 2}, "do not go together: leave one out"),
    ],
)
def test_refused_options(options: Any, message: str) -> None:
    if options.get("device") == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is one")
    with pytest.raises(InputError, match=message) as error:
        backend.load(CONFIG, WEIGHTS, **options)
    assert "\n" not in str(error.value)


def test_none_is_the_default(model: TorchModel) -> None:
    options: Any = dict.fromkeys(("device", "dtype", "compile", "numerics", "tensor_parallel"))
    plain = backend.load(CONFIG, WEIGHTS, **options)
    assert (plain.device, plain.dtype, plain.exact) == (model.device, model.dtype, model.exact)
    assert type(plain.ops) is type(model.ops)
    np.testing.assert_array_equal(full(plain, IDS[:9]), full(model, IDS[:9]))
    for name in ("device", "dtype", "numerics"):
        with pytest.raises(InputError, match=f"{name} is ''"):
            backend.load(CONFIG, WEIGHTS, **{name: ""})


def test_a_gpu_that_is_not_here() -> None:
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(InputError, match=f"device is '{absent}', but torch finds"):
        backend.load(CONFIG, WEIGHTS, device=absent)


# Numerics


def test_exact_norms_and_rotations_are_float32() -> None:
    """What rounds to bfloat16 once is nearer to the truth than what does so at each step."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) * 9)
    weight = torch.from_numpy(WEIGHTS.final_norm).bfloat16()
    exact = TorchOps(CONFIG).rms_norm(x.bfloat16(), weight)
    true = TorchOps(CONFIG).rms_norm(x.bfloat16().float(), weight.float())
    assert exact.dtype == torch.bfloat16
    torch.testing.assert_close(exact, true.bfloat16(), rtol=0, atol=0)

    model = backend.load(CONFIG, WEIGHTS, dtype="bfloat16")
    plan = model.plan(Batch.build([Span(0, 90, IDS[:64])]))
    heads = x.bfloat16().view(64, 4, 16)
    turned = TorchOps(CONFIG).rope(heads, plan)
    torch.testing.assert_close(turned, TorchOps(CONFIG).rope(heads.float(), plan).bfloat16())
    assert plan.cos.dtype == torch.float32


@pytest.mark.parametrize("dtype", [*TOLERANCE])
def test_fast_is_near_exact(dtype: str) -> None:
    fast = backend.load(CONFIG, WEIGHTS, dtype=dtype, numerics="fast")
    reference = numpy_backend.backend.load(CONFIG, WEIGHTS)
    close(full(fast, IDS), full(reference, IDS), "bfloat16")


def test_the_products_of_inference_and_of_training_agree() -> None:
    rng = np.random.default_rng(0)
    x, weight = (torch.from_numpy(rng.standard_normal((n, 576), np.float32)) for n in (3, 200))
    exact = x.double() @ weight.double().T
    product = TorchOps(CONFIG).product
    with torch.inference_mode():
        torch.testing.assert_close(product(x, weight).double(), exact, rtol=1e-5, atol=1e-4)
        assert product(x[:0], weight).shape == (0, 200)
    torch.testing.assert_close(product(x, weight).double(), exact, rtol=1e-5, atol=1e-4)


def test_inference_under_autocast_rounds_as_training_does(model: TorchModel) -> None:
    x = torch.from_numpy(WEIGHTS.token_embedding[:5])
    product, weight = TorchOps(CONFIG).product, model.weights.blocks[0].mlp.up
    with torch.autocast("cpu", torch.bfloat16):
        trained = product(x, weight)
        with torch.no_grad():
            assert torch.equal(product(x, weight), trained)
    assert trained.dtype == torch.bfloat16


def test_autocast_is_of_modules_only(model: TorchModel) -> None:
    """What a model computes, and keeps in a cache, is in its own dtype."""
    cache = model.new_cache(1, 64)
    with torch.autocast("cpu", torch.bfloat16):
        got = in_parts(model, cache, IDS[:9], [8, 1])
        assert model.as_module()(torch.tensor([IDS[:9]])).logits.isfinite().all()
    close(got, full(model, IDS[:9]))


def test_a_torch_whose_product_is_another_does_without_it(monkeypatch: Any) -> None:
    """Absent, with other arguments, or with other numbers."""

    def refuses(*_: Any) -> Any:
        raise RuntimeError("expected at most 5 argument(s) but received 6 argument(s)")

    assert ops_module._onednn_product() is not None or not torch.backends.mkldnn.is_available()
    for product in (refuses, lambda x, *_: x.sum(), lambda x, weight, *_: 2 * x @ weight.T):
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops, "mkldnn", SimpleNamespace(_linear_pointwise=product))
            assert ops_module._onednn_product() is None
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert ops_module._onednn_product() is None
    monkeypatch.setattr(ops_module, "_ONEDNN_PRODUCT", None)
    reference = numpy_backend.backend.load(CONFIG, WEIGHTS)
    close(full(backend.load(CONFIG, WEIGHTS), IDS[:9]), full(reference, IDS[:9]))


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_kernels_that_do_not_share_heads(queries: int, masked: bool) -> None:
    """What a GPU gets: heads as queries, or keys repeated."""
    rng = np.random.default_rng(1)
    query = torch.from_numpy(rng.standard_normal((2, 6, queries, 16), np.float32))
    key, value = torch.from_numpy(rng.standard_normal((2, 2, 2, 7, 16), np.float32))
    mask = torch.from_numpy(rng.random((2, 1, queries, 7)) < 0.7) if masked else None
    if mask is not None:
        mask[..., 0] = True
    results = [
        attention(query, key, value, mask=mask, causal=False, shares_heads=shares)
        for shares in (True, False)
    ]
    torch.testing.assert_close(*results)


def test_the_compiler_is_imported_by_those_who_ask_for_it() -> None:
    """It takes as long to import as torch itself."""
    imports = "import sys, smollm2.backends.torch; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", imports], check=True)


# Differentiation


def test_every_weight_gets_a_gradient_without_a_cache() -> None:
    """Packed segments of unequal and equal lengths: gathers, masks and plain causal attention."""
    model = backend.load(CONFIG, WEIGHTS)
    leaves = [weight.requires_grad_() for _, weight in model.weights.items()]
    lengths = (5, 9, 5, 1)
    batch = Batch.build([Span(0, 0, IDS[n : n + n], "all") for n in lengths])
    logits = forward(model.weights, model.ops, model.plan(batch))
    gradients = torch.autograd.grad(logits.square().mean(), leaves)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    # Against finite differences, in one direction for each weight.
    for (name, weight), gradient in zip(model.weights.items(), gradients, strict=True):
        direction = torch.sign(gradient) / gradient.numel() ** 0.5
        values = []
        for step in (3e-3, -3e-3):
            with torch.no_grad():
                weight += step * direction
                moved = forward(model.weights, model.ops, model.plan(batch))
                values.append(moved.double().square().mean().item())
                weight -= step * direction
        slope = (gradient * direction).sum().item()
        assert (values[0] - values[1]) / 6e-3 == pytest.approx(slope, rel=0.03), name


# The life of a model


def test_a_closed_model_says_so() -> None:
    model = backend.load(CONFIG, WEIGHTS)
    model.close()
    model.close()
    with pytest.raises(InputError, match="the model is closed: load it again"):
        full(model, IDS[:1])


def test_angles_grow_once_for_all_threads(monkeypatch: Any) -> None:
    """Whoever made few of them, and took longer, does not take back what another made."""
    config = tiny_config(max_position_embeddings=4096)
    model = backend.load(config, random_weights(config))
    many = Event()

    def made(config: Any, positions: Any) -> Any:
        if len(positions) < 2000:
            few.set()
            many.wait(0.5)
        return rotary_tables(config, positions)

    few = Event()
    monkeypatch.setattr("smollm2.backends.torch.plan.rotary_tables", made)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(full, model, IDS[:3])
        assert few.wait(30)
        model.plan(Batch.build([Span(0, 3000, IDS[:3])]))
        many.set()
        first.result()
    monkeypatch.setattr("smollm2.backends.torch.plan.rotary_tables", None)
    assert model.plan(Batch.build([Span(0, 3000, IDS[:3])])).cos.shape == (3, 1, config.head_dim)


def test_what_is_loaded_in_inference_mode_can_be_trained() -> None:
    ids = torch.tensor([IDS[:5]])
    with torch.inference_mode():
        module = backend.load(CONFIG, WEIGHTS).as_module()
        assert module(ids).logits.isfinite().all()
    module(ids, labels=ids).loss.backward()
    assert module.get_parameter("model.norm.weight").grad.abs().sum() > 0


def test_a_module_that_was_used_can_be_copied(model: TorchModel) -> None:
    module = model.as_module()
    logits = module(torch.tensor([IDS[:5]])).logits
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for other in copies:
        assert torch.equal(other(torch.tensor([IDS[:5]])).logits, logits)


def test_a_model_has_weights_of_its_own() -> None:
    """Files that are mapped, and arrays that a caller changes, are not in it."""
    arrays = random_weights(CONFIG)
    arrays.token_embedding.flags.writeable = False
    model = backend.load(CONFIG, arrays)
    before = full(model, IDS[:9])
    for _, array in arrays.items():
        array.flags.writeable = True
        array[:] = 0
    np.testing.assert_array_equal(full(model, IDS[:9]), before)


@pytest.mark.parametrize("device", DEVICES)
def test_choosing_is_that_of_numpy(device: str) -> None:
    model = backend.load(CONFIG, WEIGHTS, device=device)
    options: list[Any] = [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.2}]
    choices = [Choice(Sampler(SamplingParams(**o)), 40, IDS[:9], IDS[9:]) for o in options]
    batch = Batch.build([Span(0, 0, IDS[n : n + 40]) for n in range(3)])
    expected = [c.of(row) for c, row in zip(choices, full_rows(batch), strict=True)]
    assert model.choose(batch, choices) == expected


def full_rows(batch: Batch) -> NDArray[np.float32]:
    return numpy_backend.backend.load(CONFIG, WEIGHTS).forward(batch)
