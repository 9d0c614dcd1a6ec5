"""The accelerators that environments are made for, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One kind of host: how many GPUs of which model, memory of each in GB, and their architecture (``sm_86``)."""

    name: str
    gpus: int
    model: str
    memory_gb: int
    architecture: str | None


#: NVIDIA's data sheets: A10 is compute capability 8.6 with 24 GB, H100 is 9.0 with 80 GB.
ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("cpu", 0, "", 0, None),
        Accelerator("1xA10", 1, "A10", 24, "sm_86"),
        Accelerator("1xH100", 1, "H100", 80, "sm_90"),
        Accelerator("8xH100", 8, "H100", 80, "sm_90"),
    )
}
