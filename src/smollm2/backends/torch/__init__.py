"""The PyTorch backend: the table of operations filled with torch's own, on a CPU or a GPU."""

from smollm2.backends.torch.loading import TorchBackend, backend
from smollm2.backends.torch.model import TorchModel

__all__ = ["TorchBackend", "TorchModel", "backend"]
