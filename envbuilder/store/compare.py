"""Compare an unpacked tree with the layer that it was made of, byte for byte."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from envbuilder import parallel
from envbuilder.oci.model import LAYER_GZIP, Descriptor
from envbuilder.oci.toc import LANDMARK, NAME
from envbuilder.oci.untar import DIRECTORY, FILE, HARDLINK, SYMLINK
from envbuilder.store.unpack import IMPLIED, open_layer, tree_of

if TYPE_CHECKING:
    from pathlib import Path

    from envbuilder.oci.digest import Digest
    from envbuilder.oci.untar import TarStream
    from envbuilder.store.store import Store


def compare_tree(store: Store, layer: Digest) -> str | None:
    """Compare a tree with its layer, file by file; return in what they differ, or None. Modes and owners are not compared.

    Raises:
        UnpackError, NotInStoreError: the layer cannot be read.

    """
    described = Descriptor(LAYER_GZIP, layer, store.blob(layer).stat().st_size)
    tree = tree_of(store, described)
    with open_layer(store, described) as stream:
        expected = _expected(stream)
    # A table of contents and its landmark are left out of a tree, if they are what they seem.
    for name in (NAME, LANDMARK):
        if name in expected and not os.path.lexists(tree / name):
            del expected[name]
    for path in sorted(_names(tree).difference(expected)):
        if not path.endswith(IMPLIED) and not (tree / path).is_dir():
            return f"`{path}` is not in the layer"
    for path, content in sorted(expected.items()):
        parallel.checkpoint()
        if (actual := _content(tree / path)) != content:
            return f"`{path}` is missing" if actual is None else f"`{path}` is not what the layer has"
    return None


def _expected(stream: TarStream) -> dict[str, str]:
    """Return what a layer says of each of its paths: the hash of a file, the target of a link, that it is a folder."""
    found: dict[str, str] = {}
    for member in stream.members():
        parallel.checkpoint()
        path = "/".join(part for part in member.name.split("/") if part not in {"", "."})
        if not path:
            continue
        if member.kind != DIRECTORY:  # replaces what an earlier member put there
            for other in [other for other in found if other.startswith(f"{path}/")] if found.get(path) == "/" else ():
                del found[other]
        if member.kind == FILE:
            hashed = hashlib.sha256()
            for piece in stream.content():
                hashed.update(piece)
            found[path] = hashed.hexdigest()
        elif member.kind == DIRECTORY:
            found[path] = "/"
        elif member.kind == SYMLINK:
            found[path] = f"-> {member.link}"
        elif member.kind == HARDLINK:
            source = "/".join(part for part in member.link.split("/") if part not in {"", "."})
            found[path] = found.get(source, "")
    stream.finish()
    return found


def _content(path: Path) -> str | None:
    """Return the same of a file of the tree; None when it is absent."""
    if path.is_symlink():
        return f"-> {path.readlink()}"
    try:
        if path.is_dir():
            return "/"
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _names(tree: Path) -> set[str]:
    top = len(str(tree)) + 1
    return {f"{folder}/{name}"[top:] for folder, _, names in os.walk(tree) for name in names}
