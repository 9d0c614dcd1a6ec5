"""Images of the store by name, for the commands that use what was built or pulled before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envbuilder.oci.model import Image
    from envbuilder.store.store import Store


def stored_image(store: Store, name: str) -> Image:
    """Return the image that a name points at.

    Raises:
        InputError: there is none; the hint says how to build it, or gives the nearest name.

    """
    digest = store.find_image(name)
    if digest is not None:
        return store.image(digest)
    # Not before: a launch of an image that is there has no use for them.
    from envbuilder.errors import InputError, did_you_mean
    from envbuilder.spec.catalog import find_catalog

    # An image with extras is named `<environment>+<extra>`.
    environment, *extras = name.split("+")
    known = find_catalog(Path.cwd()).names()
    if environment in known:
        words = " ".join([f"envbuilder build {environment}", *(f"--extra {extra}" for extra in extras)])
        raise InputError(f"there is no image of `{name}` on this machine", hint=f"build it: `{words}`")
    raise InputError(
        f"no image on this machine and no environment is named `{name}`",
        hint=did_you_mean(name, {*known, *store.images()}),
    )
