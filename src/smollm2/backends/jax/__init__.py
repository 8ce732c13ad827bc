"""The JAX backend: the shared text traced once a form, on CPUs, GPUs and TPUs."""

from __future__ import annotations

from smollm2.backends import Backend
from smollm2.backends.jax.loading import JaxBackend

backend: Backend = JaxBackend()
