"""Export: writing a checkpoint in other formats."""

from smollm2.export.smol import Exported, KindSize, check_free, export_smol, packed_size

__all__ = ["Exported", "KindSize", "check_free", "export_smol", "packed_size"]
