"""Find the host's NVIDIA driver: the device nodes, and the user-space files that must match the kernel module.

An image never holds these; whoever starts it brings them, as NVIDIA's container toolkit does for an engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from envbuilder.run import run

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Where the driver is put in the image, as NVIDIA's container images expect it.
FOLDER = "/usr/local/nvidia"
_NETWORK_DEVICES = {"infiniband", "gdrdrv"}
# Not compiled here: that would cost every launch on a host without GPUs.
_LIBRARIES = r"lib(cuda|cudadebugger|nvcuvid|nvoptix|nvidia-[a-z0-9-]+)\.so(\.[0-9]+)*"
_CACHE_LINE = r"\s+(?P<name>\S+) \((?P<kind>[^)]*)\) => (?P<path>/.*)"
_TOOLS = ("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced")


@dataclass(frozen=True)
class Driver:
    """What must be mounted: device nodes of the host, and files as (path on the host, path in the image)."""

    devices: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()


def device_nodes(names: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of the names in /dev that a GPU job needs: GPUs, InfiniBand, GPUDirect copy."""
    return tuple(f"/dev/{name}" for name in sorted(names) if name.startswith("nvidia") or name in _NETWORK_DEVICES)


def driver_libraries(cache: str) -> tuple[tuple[str, str], ...]:
    """Return the driver's 64-bit libraries in what ``ldconfig -p`` prints, with their places in the image.

    Of a name that is listed twice the first counts, as it does for the dynamic linker.
    """
    found: dict[str, str] = {}
    for line in cache.splitlines():
        entry = re.fullmatch(_CACHE_LINE, line)
        if entry and re.fullmatch(_LIBRARIES, entry["name"]) and "64" in entry["kind"]:
            found.setdefault(entry["name"], entry["path"])
    return tuple((path, f"{FOLDER}/lib64/{name}") for name, path in sorted(found.items()))


def find_driver(dev: Path = Path("/dev")) -> Driver:
    """Look for the driver on this host; without GPUs only what network devices there are is returned."""
    devices = device_nodes(path.name for path in dev.iterdir())
    if not any(PurePosixPath(device).name.startswith("nvidia") for device in devices):
        return Driver(devices)
    ldconfig = next((path for path in ("/sbin/ldconfig.real", "/sbin/ldconfig") if Path(path).exists()), "ldconfig")
    libraries = driver_libraries(run([ldconfig, "-p"]).stdout)
    tools = (Path("/usr/bin", name) for name in _TOOLS)
    programs = tuple((str(tool), f"{FOLDER}/bin/{tool.name}") for tool in tools if tool.exists())
    return Driver(devices, programs + libraries)
