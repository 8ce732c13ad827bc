"""Config: the numbers of a Llama-type model, read from config.json or GGUF metadata and checked.

Everything that would change the maths and is not supported is an error, so a config that was
read can be computed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from smollm2.errors import ConfigError
from smollm2.files import read_json
from smollm2.supported import NEUTRAL, check_supported, check_supported_gguf, check_value
from smollm2.weights import state_names

_MAX_SIZE = 2**24
_MAX_LAYERS = 1000
_SMALLEST, _LARGEST = 1.17549435e-38, 3.40282346e38  # normal numbers of float32

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""The fields that are counts."""

_REQUIRED = (
    "model_type",
    *(key for key in SIZES if key not in ("num_key_value_heads", "head_dim")),
)

_DTYPES = ("float32", "bfloat16", "float16")

_FIXED: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}
"""What ``to_dict`` always writes, since nothing else is supported."""

_ARCHITECTURES = ["LlamaForCausalLM"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The architecture's numbers, under Hugging Face's names. Raises ``ConfigError``.

    - ``vocab_size`` V, ``hidden_size`` C, ``intermediate_size`` F, ``num_hidden_layers`` L,
      ``num_attention_heads`` H, ``num_key_value_heads`` K (divides H), ``head_dim`` D (even)
    - ``max_position_embeddings``: the context length in tokens
    - ``rms_norm_eps``, ``rope_theta``: finite and above 0
    - ``tie_word_embeddings``: whether the head is the token embedding
    - ``bos_token_id``, ``eos_token_ids``, ``pad_token_id``: inside the vocabulary
    - ``dtype``: what the file says of its weights: "float32", "bfloat16", "float16" or None
    - ``extra``: keys that do not change the maths, kept to be written back
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in SIZES:
            cap = _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
            _check_integer(name, getattr(self, name), 1, cap)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd: RoPE turns pairs of values")
        for name in ("rms_norm_eps", "rope_theta"):
            object.__setattr__(self, name, _positive_number(name, getattr(self, name)))
        if not isinstance(self.tie_word_embeddings, bool):
            raise ConfigError(
                f"tie_word_embeddings is {self.tie_word_embeddings!r:.80}: it must be true or false"
            )
        for name, token_id in self._token_ids():
            _check_integer(name, token_id, 0, self.vocab_size - 1)
        object.__setattr__(self, "eos_token_ids", tuple(dict.fromkeys(self.eos_token_ids)))
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ConfigError(
                f"dtype is {self.dtype!r:.80}: it must be one of {', '.join(_DTYPES)}"
            )
        for key in self.extra:
            if key in _OWN_KEYS:
                raise ConfigError(f"{key} is a field of Config and cannot be among the extra keys")
        check_supported(self.extra)
        object.__setattr__(self, "extra", dict(self.extra))

    def _token_ids(self) -> list[tuple[str, int]]:
        ids = [("eos_token_id", token_id) for token_id in self.eos_token_ids]
        for name, token_id in (("bos", self.bos_token_id), ("pad", self.pad_token_id)):
            if token_id is not None:
                ids.append((f"{name}_token_id", token_id))
        return ids

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name → shape of every tensor in file order, the tied head not listed."""
        hidden, mlp = self.hidden_size, self.intermediate_size
        query = self.num_attention_heads * self.head_dim
        key = self.num_key_value_heads * self.head_dim
        by_part: dict[str, tuple[int, ...]] = {
            "embed_tokens": (self.vocab_size, hidden),
            "input_layernorm": (hidden,),
            "q_proj": (query, hidden),
            "k_proj": (key, hidden),
            "v_proj": (key, hidden),
            "o_proj": (hidden, query),
            "post_attention_layernorm": (hidden,),
            "gate_proj": (mlp, hidden),
            "up_proj": (mlp, hidden),
            "down_proj": (hidden, mlp),
            "norm": (hidden,),
            "lm_head": (self.vocab_size, hidden),
        }
        names = state_names(self.num_hidden_layers, tied=self.tie_word_embeddings)
        return {name: by_part[name.split(".")[-2]] for name in names}

    @property
    def parameter_count(self) -> int:
        """How many values the tensors hold, the tied one counted once."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @classmethod
    def from_file(cls, path: Path) -> Config:
        """Read a config.json. Raises ``FormatError`` for broken JSON and ``ConfigError``."""
        values = read_json(path)
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Read config.json's object as transformers 4 or 5 writes it.

        Sizes and ``model_type`` are required. What else is absent takes the default that
        transformers documents for ``LlamaConfig``: ``num_key_value_heads`` as many as
        ``num_attention_heads``, ``head_dim`` = ``hidden_size / num_attention_heads``,
        ``hidden_act`` silu, ``rms_norm_eps`` 1e-6, ``rope_theta`` 10000, untied, no biases,
        ``bos_token_id`` 1, ``eos_token_id`` 2, no ``pad_token_id``.
        """
        missing = [key for key in _REQUIRED if key not in values]
        if missing:
            raise ConfigError(f"{', '.join(missing)} missing")
        check_supported(values)
        rest = {key: value for key, value in values.items() if key not in _OWN_KEYS}
        known = {key: values[key] for key in _FIELDS if key in values}
        if known.get("num_key_value_heads") is None:
            known["num_key_value_heads"] = values["num_attention_heads"]
        if known.get("head_dim") is None:
            known["head_dim"] = _default_head_dim(
                values["hidden_size"], values["num_attention_heads"]
            )
        known["rope_theta"] = _rope_theta(values)
        known["dtype"] = _dtype(values)
        known["bos_token_id"] = values.get("bos_token_id", 1)
        known["eos_token_ids"] = _eos_token_ids(values.get("eos_token_id", 2))
        if rest.get("architectures") == _ARCHITECTURES:
            del rest["architectures"]
        return cls(**known, extra=rest)

    def to_dict(self) -> dict[str, Any]:
        """config.json's object, for transformers 4 and 5.

        5 reads ``rope_parameters``; 4 reads ``rope_theta`` and would take its default without it.
        """
        eos: Any = list(self.eos_token_ids)
        written = {
            "architectures": list(_ARCHITECTURES),
            **_FIXED,
            **{name: getattr(self, name) for name in _FIELDS},
            "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            **self.extra,
        }
        return dict(sorted(written.items()))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensor_names: Collection[str]) -> Config:
        """Read the ``llama.*`` and ``tokenizer.ggml.*`` keys of a GGUF file.

        The head is tied where the file has no tensor ``output.weight``. Keys:
        https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
        """
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture != "llama":
            raise ConfigError(
                f"general.architecture is {architecture!r}: only 'llama' is supported"
            )
        check_supported_gguf(metadata)
        hidden = _gguf_value(metadata, "embedding_length")
        heads = _gguf_value(metadata, "attention.head_count")
        if "llama.attention.key_length" in metadata:
            head_dim = _gguf_value(metadata, "attention.key_length")
        else:
            head_dim = _default_head_dim(hidden, heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            check_value(f"llama.{key}", _gguf_value(metadata, key, head_dim), (head_dim,))
        ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return cls(
            vocab_size=_gguf_vocab_size(metadata),
            hidden_size=hidden,
            intermediate_size=_gguf_value(metadata, "feed_forward_length"),
            num_hidden_layers=_gguf_value(metadata, "block_count"),
            num_attention_heads=heads,
            num_key_value_heads=_gguf_value(metadata, "attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=_gguf_value(metadata, "context_length"),
            rms_norm_eps=shortest(_gguf_value(metadata, "attention.layer_norm_rms_epsilon")),
            rope_theta=shortest(_gguf_value(metadata, "rope.freq_base", 10000.0)),
            tie_word_embeddings="output.weight" not in tensor_names,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_eos_token_ids([end for end in ends if end is not None]),
            pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
        )


_FIELDS = tuple(f.name for f in fields(Config) if f.name not in ("eos_token_ids", "extra"))
_OWN_KEYS = frozenset(
    (*_FIELDS, *_FIXED, "eos_token_id", "rope_parameters", "rope_scaling", "torch_dtype")
)


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int:
        raise ConfigError(f"{name} is {value!r:.80}: it must be an integer")
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}: it must lie between {low} and {high}")


def _positive_number(name: str, value: Any) -> float:
    if type(value) in (int, float) and _SMALLEST <= value <= _LARGEST:
        return float(value)
    raise ConfigError(
        f"{name} is {value!r:.80}: it must be a number from {_SMALLEST:.3g} to {_LARGEST:.3g}, "
        "the range of float32"
    )


def _default_head_dim(hidden: Any, heads: Any) -> int:
    _check_integer("hidden_size", hidden, 1, _MAX_SIZE)
    _check_integer("num_attention_heads", heads, 1, _MAX_SIZE)
    if hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}: give head_dim"
        )
    size: int = hidden // heads
    return size


def _rope_theta(values: Mapping[str, Any]) -> Any:
    """Read RoPE's base from wherever it is given; all places must agree."""
    found = [values["rope_theta"]] if "rope_theta" in values else []
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ConfigError(f"{key} is {rope!r:.80}: it must be an object or null")
        for name, value in rope.items():
            if name == "rope_theta":
                found.append(value)
            elif name in ("rope_type", "type"):
                check_value(f"{key}.{name}", value, ("default",))
            else:
                check_value(f"{key}.{name}", value, NEUTRAL.get(name, (None,)))
    if not found:
        return 10000.0
    if any(theta != found[0] for theta in found):
        raise ConfigError(f"rope_theta is given as {' and as '.join(map(repr, found))}")
    return found[0]


def _dtype(values: Mapping[str, Any]) -> Any:
    found = {key: values[key] for key in ("dtype", "torch_dtype") if values.get(key) is not None}
    names = list(found.values())
    if len(names) == 2 and names[0] != names[1]:
        raise ConfigError(f"dtype is {names[0]!r} but torch_dtype is {names[1]!r}")
    return names[0] if names else None


def _eos_token_ids(value: Any) -> tuple[Any, ...]:
    """Read one id, a list of them or null; ``Config`` checks them."""
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def _gguf_value(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    value = metadata.get(f"llama.{key}", default)
    if value is None:
        raise ConfigError(f"llama.{key} is missing")
    if isinstance(value, list | np.ndarray):
        raise ConfigError(f"llama.{key} has one value a layer, which is not supported")
    return value


def _gguf_vocab_size(metadata: Mapping[str, Any]) -> Any:
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else None
    size = _gguf_value(metadata, "vocab_size", count)
    if count is not None and size != count:
        raise ConfigError(f"llama.vocab_size is {size!r} but the file lists {count} tokens")
    return size


def shortest(value: Any) -> Any:
    """Give back the decimal that was stored as float32: 9.999999747e-06 was 1e-05."""
    if type(value) is not float:
        return value
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value
