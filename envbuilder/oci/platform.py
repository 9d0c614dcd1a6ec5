"""Which of an index's images runs on this machine."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from envbuilder.errors import InputError
from envbuilder.oci.model import Platform

if TYPE_CHECKING:
    from envbuilder.oci.model import Descriptor, Index

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
#: Variants that every processor of an architecture runs, the likeliest first; "" where the index states none.
_VARIANTS = {"amd64": ("", "v1"), "arm64": ("v8", "")}


class NoSuchPlatformError(InputError):
    """An index has no image for a platform."""


def this_platform() -> Platform:
    """Return what images of Linux for this machine's processor say they run on, without a variant."""
    machine = platform.machine()
    return Platform("linux", _ARCHITECTURES.get(machine, machine))


def choose(index: Index, wanted: Platform, name: str) -> Descriptor:
    """Return the index's entry for ``wanted``; the first of several, as other tools do. ``name`` says in an error whose.

    A variant that is wanted must be had; without one, any processor of the architecture must be able to run it.

    Raises:
        NoSuchPlatformError: there is none.

    """
    fitting = [d for d in index.manifests if d.platform is not None and _rank(d.platform, wanted) is not None]
    if fitting:
        return min(fitting, key=lambda d: _rank(d.platform or wanted, wanted) or 0)
    # Attestations stand in indexes as images for the platform `unknown/unknown`.
    there = sorted({str(d.platform) for d in index.manifests if d.platform is not None and d.platform.os != "unknown"})
    raise NoSuchPlatformError(
        f"{name} has no image for {wanted}",
        hint=f"it has images for: {', '.join(there) or 'no platform that it names'}",
    )


def _rank(offered: Platform, wanted: Platform) -> int | None:
    """Return how well a platform fits, 0 best, None for not at all."""
    if (offered.os, offered.architecture) != (wanted.os, wanted.architecture):
        return None
    variants = (wanted.variant,) if wanted.variant else _VARIANTS.get(wanted.architecture, ("",))
    return variants.index(offered.variant) if offered.variant in variants else None
