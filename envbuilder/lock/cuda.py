"""Which CUDA a torch really carries, read from its own metadata, never from a table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Packages that torch pins to the CUDA it was built with: nvidia-cuda-runtime-cu12==12.6.77 (up to CUDA 12),
#: nvidia-cuda-runtime==13.0.96 and cuda-toolkit[...]==13.0.2 (from CUDA 13, whose names carry no suffix).
_CARRIERS = re.compile(r"nvidia-cuda-runtime(-cu\d+)?|cuda-toolkit")
_LOCAL = re.compile(r"cu(\d+)(\d)")


def cuda_of(version: str, requires: Iterable[str]) -> str | None:
    """Return the CUDA ``major.minor`` of a torch from its version and Requires-Dist; None for a CPU build.

    A local version (``2.7.1+cu118``, as on PyTorch's own index) states it; otherwise the pinned CUDA runtime does.
    """
    local = Version(version).local
    if local is not None:
        match = _LOCAL.fullmatch(local)
        return f"{match[1]}.{match[2]}" if match else None
    for text in requires:
        requirement = Requirement(text)
        if _CARRIERS.fullmatch(canonicalize_name(requirement.name)):
            for specifier in requirement.specifier:
                if specifier.operator == "==":
                    return ".".join(specifier.version.split(".")[:2])
    return None
