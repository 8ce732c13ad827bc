"""SmolLM2: a loaded model with its tokenizer, and the ways to make it write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex, Unpack

import numpy as np

from smollm2 import prepared, registry
from smollm2.backends import BackendOptions, default_backend, get_backend
from smollm2.bindings import Given
from smollm2.causal_lm import CausalLM
from smollm2.chat import ChatSession
from smollm2.checkpoint import Checkpoint, load_checkpoint
from smollm2.config import Config
from smollm2.errors import ContextLengthError, InputError, TokenizerError
from smollm2.kinds import default_quant, rounded_to
from smollm2.lane import Lane
from smollm2.request import DEFAULT_MAX_TOKENS, Request
from smollm2.results import Generation, Piece, Score
from smollm2.sampling import SamplingOptions, SamplingParams, log_softmax
from smollm2.stopping import stop_ids
from smollm2.streaming import Stream
from smollm2.template import ChatTemplate, Message, System
from smollm2.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""


def load(
    name: str | Path = "smollm2-135m-instruct",
    *,
    backend: str | None = None,
    strict: bool = True,
    bindings: Given | None = None,
    offline: bool | None = None,
    progress: registry.Progress | None = None,
    **options: Unpack[BackendOptions],
) -> SmolLM2:
    """Load a model by name, folder or file, and get it ready to write.

    ``name`` is a registered name (``"smollm2-135m-instruct"``), ``"org/name"`` on the hub, a
    folder with a Hugging Face checkpoint, or a ``.gguf`` or ``.smol`` file. A name that is not on
    this machine yet is pulled first, unless ``offline``; ``progress`` is told of it (by default a
    terminal shows it). ``strict=False`` tolerates tensors that the model does not have, and
    mixed dtypes; ``bindings`` say which of them is which weight, as for ``load_checkpoint``.

    ``backend`` computes: ``"native"`` with the kernels of this CPU, ``"numpy"`` in float32,
    ``"torch"`` and ``"jax"`` on what these have; by default native, or NumPy with a warning where
    the extension is missing. An option that a backend does not have is an ``InputError``.

    Native: ``quant``: kind of the weights, ``"q8"``, ``"q4"``, ``"q4m"``, ``"bf16"``, ``"f32"`` or
    ``"q16"``; what is rounded to 8 or 4 bits is fitted to a text first, which takes seconds at each
    load and once if exported; by default as the file is, or q8 for a dense one, and what has a name
    is mapped as it was prepared when it was pulled. ``threads``: by default the physical cores.
    ``kv``: kind of stored keys and values, ``"int16"``, ``"f32"`` or ``"int8"``. ``mmap=False``:
    copy the weights of a .smol file into memory of this process; faster where the system maps files
    in small pages, but processes no longer share them.

    torch and jax: ``device``: ``"cpu"``, ``"cuda"`` (torch), ``"gpu"`` (jax), …; ``dtype``:
    ``"float32"``, ``"bfloat16"`` or ``"float16"``, by default that of all the checkpoint's
    matrices, or float32; ``compile``:
    ``"inductor"`` or ``"cudagraphs"`` (torch), ``"xla"`` (jax), each slow at the first prompt;
    ``numerics``: ``"exact"``, products in the full precision of the dtype, or ``"fast"``, as the
    device likes best; ``tensor_parallel``: a mesh of devices, or how many, that share the weights.
    ``model.lm`` is then a ``TorchModel`` or ``JaxModel``, with ``as_module`` or ``as_nnx`` to train
    it.

    Raises ``ModelNotFoundError``, ``DownloadError``, ``FormatError``, ``ConfigError``,
    ``CheckpointError`` or, for a backend that is not here, ``MissingDependencyError``.
    """
    backend = default_backend() if backend is None else backend
    chosen = get_backend(backend)
    progress = progress or registry.LineProgress()
    if backend == "native" and options.get("quant") is None and bindings is None:
        checkpoint = prepared.open_model(name, strict=strict, offline=offline, progress=progress)
    else:
        path = registry.resolve(name, offline=offline, progress=progress)
        checkpoint = load_checkpoint(path, strict=strict, bindings=bindings)
    weights = checkpoint.weights
    quant = options.get("quant") or default_quant(weight for _, weight in weights.items())
    if backend == "native" and rounded_to(dict(weights.items()), quant):
        # Not imported by what opens a file that is ready: it computes with NumPy.
        from smollm2.smoothing import easier_to_round

        weights = easier_to_round(checkpoint, quant, say=progress.note)
    lm = chosen.load(checkpoint.config, weights, **options)
    return SmolLM2.from_checkpoint(checkpoint, lm)


class SmolLM2:
    """A model that writes: ``generate``, ``stream``, ``chat`` and ``score``.

    Calls may run in several threads at once: each has its own KV cache.
    """

    def __init__(
        self,
        lm: CausalLM,
        *,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        generation_config: Mapping[str, Any] | None = None,
        path: Path | None = None,
    ) -> None:
        self.path = path
        self.template = template
        self._lm: CausalLM | None = lm
        self._tokenizer = tokenizer
        self.stop_ids: frozenset[int] = stop_ids(
            lm.config, generation_config or {}, tokenizer, template
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, lm: CausalLM) -> SmolLM2:
        """A model that a backend made of ``checkpoint``, with the checkpoint's tokenizer."""
        return cls(
            lm,
            tokenizer=checkpoint.tokenizer,
            template=checkpoint.template,
            generation_config=checkpoint.generation_config,
            path=checkpoint.path,
        )

    @property
    def lm(self) -> CausalLM:
        """What the backend made of the weights: ``new_cache`` and ``forward``."""
        if self._lm is None:
            raise InputError("the model is closed: load it again")
        return self._lm

    @property
    def config(self) -> Config:
        """The architecture's numbers."""
        return self.lm.config

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back. Raises ``TokenizerError`` where the checkpoint has none."""
        if self._tokenizer is None:
            raise TokenizerError("this checkpoint has no tokenizer.json: give prompts as ids")
        return self._tokenizer

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        echo: bool = False,
        show_special: bool = False,
        allow_special: bool = False,
        on_piece: Callable[[Piece], object] | None = None,
        cancel: Callable[[], bool] | None = None,
        rng: np.random.Generator | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """Continue a prompt, given as text or as token ids; see ``stream`` for the options."""
        return self.stream(
            prompt,
            params,
            echo=echo,
            show_special=show_special,
            allow_special=allow_special,
            on_piece=on_piece,
            cancel=cancel,
            rng=rng,
            **options,
        ).finish()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        echo: bool = False,
        show_special: bool = False,
        allow_special: bool = False,
        on_piece: Callable[[Piece], object] | None = None,
        cancel: Callable[[], bool] | None = None,
        rng: np.random.Generator | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Continue a prompt piece by piece.

        ``params`` or ``options`` say how: ``max_tokens`` (256), ``temperature`` (0, greedy),
        ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``, ``stop``, ``seed``, ``logprobs``
        and the other fields of ``SamplingParams``. With
        ``echo`` the prompt is part of the text, with ``show_special`` so are generated control
        tokens; ``allow_special`` reads ``<|im_start|>`` and the
        like in a prompt as control tokens instead of plain text. ``on_piece`` sees every piece,
        the prompt's included; ``cancel()`` is asked before each forward pass, in this thread;
        ``Stream.cancel()`` may be called from any. Where no seed is given one is drawn, from
        ``rng`` if that is given.

        Raises ``InputError`` for a wrong option or an empty prompt, and ``ContextLengthError``
        where prompt and ``max_tokens`` exceed the context length; before anything is computed.
        """
        chosen = SamplingParams.of(params, **options)
        ids = self.encode(prompt, allow_special=allow_special)
        request = self.request(
            ids, chosen, prompt=prompt if isinstance(prompt, str) else None, rng=rng
        )
        lane = Lane(self.lm, capacity=min(len(ids) + request.max_tokens, self._context))
        return Stream(
            request,
            lane,
            self._tokenizer,
            echo=echo,
            show_special=show_special,
            on_piece=on_piece,
            cancel=cancel,
            on_finish=lambda _: lane.close(),
        )

    def request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        rng: np.random.Generator | None = None,
    ) -> Request:
        """Check a prompt against the context length; settle its seed, length and stop ids."""
        params.check_ids(self.config.vocab_size)
        room = self._context - len(ids)
        wanted = params.max_tokens
        if room < (1 if wanted is None else wanted):
            raise ContextLengthError(len(ids), 1 if wanted is None else wanted, self._context)
        special = {} if self._tokenizer is None else self._tokenizer.special_tokens
        named = [special[text] for text in params.stop if text in special]
        stops = frozenset([*params.stop_ids, *named])
        return Request(
            prompt=prompt,
            prompt_ids=tuple(ids),
            params=self._seeded(params, rng),
            max_tokens=min(DEFAULT_MAX_TOKENS, room) if wanted is None else wanted,
            stop_ids=stops if params.ignore_eos else stops | self.stop_ids,
        )

    def _seeded(self, params: SamplingParams, rng: np.random.Generator | None) -> SamplingParams:
        """With a seed, the same in all processes that share the model."""
        if params.seed is not None:
            return params
        (seed,) = self.lm.agree([params.with_seed(rng).seed or 0])
        return replace(params, seed=seed)

    def encode(self, prompt: Prompt, *, allow_special: bool = False) -> list[int]:
        """Token ids of a prompt. Raises ``InputError`` where there are none, or wrong ones."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, allow_special=allow_special)
        elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes | Mapping):
            ids = [_token_id(i) for i in prompt]
        else:
            raise InputError(f"a prompt is text or token ids, not {prompt!r}")
        if not ids:
            why = "none of its bytes is in the vocabulary" if prompt else "it needs a token"
            raise InputError(f"the prompt is empty: {why}")
        for i in ids:
            if not 0 <= i < self.config.vocab_size:
                raise InputError(f"token id {i} is not in a vocabulary of {self.config.vocab_size}")
        return ids

    def score(self, text: Prompt, *, allow_special: bool = False) -> Score:
        """Log-probability of each token of a text after those before it.

        Logits of only a few positions are held at a time, whatever the length.
        Raises ``ContextLengthError`` where the text exceeds the context length.
        """
        ids = self.encode(text, allow_special=allow_special)
        if len(ids) > self._context:
            raise ContextLengthError(len(ids), 0, self._context)
        lane = Lane(self.lm, capacity=len(ids))
        logprobs: list[float | None] = [None]
        for logits in lane.all_logits(ids[:-1]):
            targets = ids[len(logprobs) : len(logprobs) + len(logits)]
            logprobs.extend(log_softmax(logits)[np.arange(len(targets)), targets].tolist())
        lane.close()
        return Score(tuple(ids), tuple(logprobs))

    def chat(
        self,
        system: System = None,
        *,
        messages: Iterable[Message] = (),
        params: SamplingParams | None = None,
        template: ChatTemplate | None = None,
        drop_oldest: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> ChatSession:
        """Start a conversation, or go on with ``messages``; see ``ChatSession``.

        ``system`` is the system prompt; ``None`` means the one that the chat template has by
        itself, ``""`` an empty one, ``False`` none at all.
        """
        return ChatSession(
            self,
            system,
            messages=messages,
            params=SamplingParams.of(params, **options),
            template=template,
            drop_oldest=drop_oldest,
        )

    def __repr__(self) -> str:
        name = self.path.name if self.path else "no path"
        if self._lm is None:
            return f"SmolLM2({name!r}, closed)"
        size, context = self.config.parameter_count / 1e6, self._context
        return f"SmolLM2({name!r}, {size:.1f}M parameters, context length {context})"

    def close(self) -> None:
        """Let go of the weights; closing again is fine, any other use is an ``InputError``."""
        if self._lm is not None:
            self._lm.close()
        self._lm = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _context(self) -> int:
        return self.config.max_position_embeddings


def _token_id(value: SupportsIndex) -> int:
    """An integer of any library, and nothing that would have to be rounded or parsed."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"{value!r} is not a token id: give integers, and messages to chat()")
    return index(value)
