"""Pins: images and blobs that are never evicted, with the trees and the root unpacked from them.

Kept in ``pins.json`` as written by the user: a name, which stands for the image it points at whenever that is asked,
or a digest.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from envbuilder.atomic import atomic_file
from envbuilder.errors import InputError, did_you_mean
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import canonical_json
from envbuilder.store.store import StoreDamagedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from envbuilder.store.store import Store

_FILE = "pins.json"


def read_pins(store: Store) -> tuple[str, ...]:
    """Return the pins, sorted; raise StoreDamagedError when the file cannot be read."""
    path = store.root / _FILE
    try:
        pins = json.loads(path.read_bytes())["pins"]
        return tuple(sorted(str(pin) for pin in pins))
    except FileNotFoundError:
        return ()
    except (KeyError, TypeError, ValueError) as error:
        raise StoreDamagedError(path, str(error)) from error


def pinned(store: Store) -> set[Digest]:
    """Return the digests that the pins stand for now."""
    images = store.images()
    return {digest for pin in read_pins(store) if (digest := _digest(pin) or images.get(pin)) is not None}


def pin(store: Store, text: str) -> str:
    """Pin the image of a name, or what has a digest (``sha256:...``, ``name@sha256:...``); return the pin.

    Raises:
        InputError: the store has no such image or blob.

    """
    digest, images = _digest(text), store.images()
    if digest is None and text not in images:
        hint = did_you_mean(text, images) or "there are no images; `envbuilder build ENV` makes one"
        raise InputError(f"no image is named `{text}`", hint=hint)
    if digest is not None and not store.has(digest):
        raise InputError(f"{digest} is not in the store", hint="`envbuilder cache ls` lists the images")
    name = str(digest) if digest is not None else text
    _write(store, lambda pins: {*pins, name})
    return name


def unpin(store: Store, text: str) -> str:
    """Remove a pin and return it; raise InputError when there is none."""
    digest = _digest(text)
    name = str(digest) if digest is not None else text
    pins = read_pins(store)
    if name not in pins:
        raise InputError(f"`{name}` is not pinned", hint=did_you_mean(name, pins) or "nothing is pinned")
    _write(store, lambda pins: pins - {name})
    return name


def _write(store: Store, change: Callable[[set[str]], Iterable[str]]) -> None:
    with store.lock("pins"):
        pins = sorted(change(set(read_pins(store))))
        with atomic_file(store.root / _FILE) as file:
            file.write(canonical_json({"schemaVersion": 1, "pins": pins}) + b"\n")


def _digest(text: str) -> Digest | None:
    """Return the digest that a pin names, or None when it names an image by its name alone."""
    try:
        return Digest.parse(text.rpartition("@")[2])
    except ValueError:
        return None
