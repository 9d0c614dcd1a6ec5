"""The least NVIDIA driver for a CUDA, as data.

Programs built for any minor of a CUDA major run on the first driver of that major (minor-version compatibility: no JIT
of PTX, no newer driver calls). Source: NVIDIA's CUDA compatibility guide and toolkit release notes, read 2026-11.
"""

from __future__ import annotations

FLOORS = {11: "450.80.02", 12: "525.60.13", 13: "580"}


def driver_floor(cuda: str) -> str | None:
    """Return the least Linux driver for a CUDA ``major.minor``; None for a major that the table does not know."""
    return FLOORS.get(int(cuda.partition(".")[0]))
