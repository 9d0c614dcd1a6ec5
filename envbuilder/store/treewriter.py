# ruff: noqa: PTH101, PTH102, PTH108, PTH211
"""Write the members of a layer below a folder, whatever they are called.

A layer comes from anywhere, so its member names are hostile until proven otherwise: nothing is written through a
symbolic link or outside the folder. The folder is made empty and private and every directory in it is made here, so
that the set of directories made is a complete answer to "is the parent a real directory?", with no race.

Names stay strings (and the rules for paths are off): a layer has 100,000 members, and a Path costs more than the system
call it is for.

Owners, the setuid and setgid bits and times are kept as a container engine keeps them, the first two only when root
unpacks. Of directories the time is not kept.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from envbuilder import report
from envbuilder.atomic import remove_tree
from envbuilder.errors import EnvbuilderError
from envbuilder.oci.untar import DIRECTORY, FILE, HARDLINK, SPECIAL, SYMLINK

if TYPE_CHECKING:
    from collections.abc import Callable

    from envbuilder.oci.untar import Member, TarStream

T = TypeVar("T")

#: A whiteout, ``.wh.<name>``, removes ``name`` of the layers below; an opaque one removes all of the directory.
#: Other names with WHITEOUT twice are a storage driver's own and mean nothing here.
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
#: Stands in a directory that no member of the layer states: it takes mode and place of the one below.
IMPLIED = ".wh..wh.implied"

_CLIMBING = {WHITEOUT, WHITEOUT + ".", WHITEOUT + ".."}
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class UnpackError(EnvbuilderError):
    """A layer cannot be unpacked: it is damaged, or a member would land where it must not."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            hint="`envbuilder cache verify` moves the layer aside if it was damaged here; build or pull it again then",
        )


class TreeWriter:
    """Writes members below ``folder``, which must be empty and of this process alone."""

    def __init__(self, folder: Path) -> None:
        self._root = str(folder)
        self._directories = {""}
        self._implied: set[str] = set()
        self._is_root = os.geteuid() == 0
        # Without root, what the image's owner may not read would be closed to the caller as well.
        self._mask, self._file_bits, self._folder_bits = (0o7777, 0, 0) if self._is_root else (0o1777, 0o400, 0o700)

    def add(self, member: Member, stream: TarStream) -> None:
        """Write one member, and before it the parents that are missing. A later member replaces an earlier one.

        Raises:
            UnpackError: it would land outside the folder, below something that is no directory, or under a name that
                the file system does not take.

        """
        try:
            self._add(member, stream)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise UnpackError(f"`{member.name[:60]}...` is too long a name for this file system") from error

    def _add(self, member: Member, stream: TarStream) -> None:
        path = _inside(member.name, member)
        if not path:
            return  # "./", the root itself
        parent, _, name = path.rpartition("/")
        if name in _CLIMBING:
            raise UnpackError(f"`{member.name}` would remove a directory from inside")
        if member.kind in SPECIAL:
            report.detail(f"`{path}` is a {SPECIAL[member.kind]} and is left out")
            return
        if parent not in self._directories:
            self._imply(parent, member)
        if member.kind == FILE:
            self._add_file(path, member, stream)
        elif member.kind == DIRECTORY:
            self._add_directory(path, member)
        elif member.kind == SYMLINK:
            self._add_symlink(path, member)
        elif member.kind == HARDLINK:
            self._add_hardlink(path, member)
        else:
            raise UnpackError(f"`{member.name}` is of an unknown kind: {member.kind!r}")

    def _add_file(self, path: str, member: Member, stream: TarStream) -> None:
        handle = self._make(path, lambda target: os.open(target, _NEW_FILE, 0o600))
        try:
            for piece in stream.content():
                while piece:
                    piece = piece[os.write(handle, piece) :]  # noqa: PLW2901  (a write may be short)
            if self._is_root and (member.uid or member.gid):
                os.fchown(handle, member.uid, member.gid)  # before the mode: it clears setuid
            os.fchmod(handle, member.mode & self._mask | self._file_bits)
            os.utime(handle, ns=(member.mtime, member.mtime))
        finally:
            os.close(handle)

    def _add_directory(self, path: str, member: Member) -> None:
        target = f"{self._root}/{path}"
        if path not in self._directories:
            self._make(path, os.mkdir)
            self._directories.add(path)
        elif path in self._implied:
            self._implied.remove(path)
            os.unlink(f"{target}/{IMPLIED}")
        if self._is_root and (member.uid or member.gid):
            os.chown(target, member.uid, member.gid)
        os.chmod(target, member.mode & self._mask | self._folder_bits)

    def _add_symlink(self, path: str, member: Member) -> None:
        if not member.link:
            raise UnpackError(f"`{member.name}` is a symbolic link to nothing")
        self._make(path, lambda target: os.symlink(_without_nul(member.link, member), target))
        target = f"{self._root}/{path}"
        if self._is_root and (member.uid or member.gid):
            os.lchown(target, member.uid, member.gid)
        os.utime(target, ns=(member.mtime, member.mtime), follow_symlinks=False)

    def _add_hardlink(self, path: str, member: Member) -> None:
        source = _inside(member.link, member)
        existing = f"{self._root}/{source}"
        in_place = source.rpartition("/")[0] in self._directories and source not in self._directories
        if not in_place or source == path:
            raise UnpackError(f"`{member.name}` is a hard link to `{member.link}`, which is no file of this layer")
        try:
            self._make(path, lambda target: os.link(existing, target, follow_symlinks=False))
        except FileNotFoundError as error:
            raise UnpackError(
                f"`{member.name}` is a hard link to `{member.link}`, which did not come before it"
            ) from error

    def _imply(self, path: str, member: Member) -> None:
        """Make the directory ``path`` and those above it, which no member has stated so far."""
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            folder = "/".join(parts[:count])
            if folder in self._directories:
                continue
            try:
                os.mkdir(f"{self._root}/{folder}", 0o755)
            except FileExistsError as error:
                raise UnpackError(f"`{member.name}` lies below `{folder}`, which is not a directory") from error
            os.close(os.open(f"{self._root}/{folder}/{IMPLIED}", _NEW_FILE, 0o600))
            self._directories.add(folder)
            self._implied.add(folder)

    def _make(self, path: str, make: Callable[[str], T]) -> T:
        target = f"{self._root}/{path}"
        try:
            return make(target)
        except FileExistsError:
            self._remove(path)
            return make(target)

    def _remove(self, path: str) -> None:
        if path not in self._directories:
            os.unlink(f"{self._root}/{path}")
            return
        remove_tree(Path(self._root, path))
        gone = {d for d in self._directories if d == path or d.startswith(path + "/")}
        self._directories -= gone
        self._implied -= gone


def _inside(name: str, member: Member) -> str:
    """Return a path of the tar in its plain form, "" for the root; raise UnpackError when it leads outside."""
    parts = _without_nul(name, member).split("/")
    if name.startswith("/") or ".." in parts:
        raise UnpackError(f"`{name}` leads out of the image")
    return "/".join(part for part in parts if part not in {"", "."})


def _without_nul(name: str, member: Member) -> str:
    if "\0" in name:
        raise UnpackError(f"{member.name!r} holds a NUL")
    return name
