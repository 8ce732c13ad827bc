"""The registry: names of models, where each comes from, and the local store they are pulled to."""

from smollm2.registry.models import PulledModel, local_path, pull, resolve, verify
from smollm2.registry.progress import LineProgress, Progress, SilentProgress
from smollm2.registry.sources import MODELS, ModelSource
from smollm2.registry.store import FileCheck, LocalModel, home, list_models

__all__ = [
    "MODELS",
    "FileCheck",
    "LineProgress",
    "LocalModel",
    "ModelSource",
    "Progress",
    "PulledModel",
    "SilentProgress",
    "home",
    "list_models",
    "local_path",
    "pull",
    "resolve",
    "verify",
]
