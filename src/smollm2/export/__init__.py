"""Export: writing a checkpoint in other formats."""

from smollm2.export.exported import Exported, KindSize, Progress, Tensor, check_free
from smollm2.export.gguf import GGUF_QUANTS, export_gguf
from smollm2.export.huggingface import DTYPES, MAX_SHARD_SIZE, check_folder, save_checkpoint
from smollm2.export.smol import export_smol, packed_size

__all__ = [
    "DTYPES",
    "GGUF_QUANTS",
    "MAX_SHARD_SIZE",
    "Exported",
    "KindSize",
    "Progress",
    "Tensor",
    "check_folder",
    "check_free",
    "export_gguf",
    "export_smol",
    "packed_size",
    "save_checkpoint",
]
