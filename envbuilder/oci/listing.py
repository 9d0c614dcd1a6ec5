"""A layer as text, a line for each member, to diff when a digest moves."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from envbuilder.oci.untar import DIRECTORY, FILE, HARDLINK, SYMLINK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envbuilder.oci.untar import TarStream

_LETTERS = {FILE: "-", DIRECTORY: "d", SYMLINK: "l", HARDLINK: "h"}


def listing(stream: TarStream) -> Iterator[str]:
    """Yield ``kind mode uid:gid size sha256 path [-> target]`` for each member of a tar, in the order of the tar.

    The digest is that of a regular file's bytes, ``-`` for what has none. Control characters and backslashes in names
    are escaped, so that a name is one line.
    """
    for member in stream.members():
        digest = "-"
        if member.kind == FILE:
            sha256 = hashlib.sha256()
            for piece in stream.content():
                sha256.update(piece)
            digest = sha256.hexdigest()
        target = f" -> {_escaped(member.link)}" if member.link else ""
        letter = _LETTERS.get(member.kind, "?")
        owner = f"{member.uid}:{member.gid}"
        yield f"{letter}{member.mode:04o} {owner} {member.size} {digest} {_escaped(member.name)}{target}"


def _escaped(name: str) -> str:
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in name)
