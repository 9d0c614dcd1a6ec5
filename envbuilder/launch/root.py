"""What must be known of an image's root folder before it is entered: its programs, its users, room for mounts.

A link in an image means a place in the image, so links are followed here by hand and never out of the root.
"""

from __future__ import annotations

import os
import posixpath
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder.errors import InputError
from envbuilder.launch.job import CommandNotFoundError, NotExecutableError, below

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from envbuilder.launch.job import Job

_MOST_LINKS = 40  # as the kernel


@dataclass(frozen=True)
class Root:
    """A root folder. ``folders`` lists those on the way to where something will be mounted, as ``listed`` found them.

    It maps a folder's path in the image to its names, each with the target when it is a symbolic link.
    """

    path: Path
    folders: Mapping[str, Mapping[str, str | None]]


def look(path: Path, targets: Iterable[str]) -> Root:
    """Read the folders that lead to ``targets`` (absolute, in plain form), as far as they exist in the image."""
    folders: dict[str, dict[str, str | None]] = {}
    for target in targets:
        for folder in ancestors(target):
            real = inside(path, folder)
            if folder in folders:
                continue
            if real.is_symlink() or not real.is_dir():
                break
            with os.scandir(real) as scan:
                folders[folder] = {e.name: str(Path(e.path).readlink()) if e.is_symlink() else None for e in scan}
    return Root(path, folders)


def ancestors(path: str) -> tuple[str, ...]:
    """Return ``/``, ..., ``path`` itself, from the top down."""
    parts = [part for part in path.split("/") if part]
    return tuple("/" + "/".join(parts[:count]) for count in range(len(parts) + 1))


def inside(root: Path, path: str) -> Path:
    """Return where a path of the image lies on the host, taken literally."""
    return root / path.lstrip("/")


def follow(root: Path, path: str) -> Path | None:
    """Return the file that a path of the image leads to, its links followed within the root; None when there is none."""
    pending, done, links = [part for part in path.split("/") if part], "/", 0
    while pending:
        part = pending.pop(0)
        if part in {".", ".."}:
            done = posixpath.normpath(f"{done}/{part}")
            continue
        here = inside(root, f"{done}/{part}")
        if here.is_symlink():
            links += 1
            if links > _MOST_LINKS:
                return None
            target = str(here.readlink())
            done = "/" if target.startswith("/") else done
            pending = [piece for piece in target.split("/") if piece] + pending
        elif here.exists():
            done = f"{done}/{part}"
        else:
            return None
    return inside(root, done)


def check_program(root: Path, name: str, search: str, job: Job) -> None:
    """Make sure that a job's program exists; ``search`` is its PATH.

    Raises:
        CommandNotFoundError: it is neither in the image nor in the work folder.
        NotExecutableError: it is there but is no executable file.

    """
    if "/" in name:
        candidates = [posixpath.normpath(posixpath.join(str(job.folder), name))]
    else:
        candidates = [posixpath.join(str(job.folder), folder, name) for folder in search.split(":")]
    found = False
    for candidate in candidates:
        real = Path(candidate) if below(candidate, str(job.folder)) else follow(root, candidate)
        if real is not None and real.is_file():
            found = True
            if real.stat().st_mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH):
                return
    if found:
        raise NotExecutableError(f"`{name}` in `{job.environment}` is not executable")
    where = "no such file" if "/" in name else f"not on its PATH, {search}"
    raise CommandNotFoundError(f"`{name}` is not in `{job.environment}`: {where}")


def user_ids(root: Path, user: str) -> tuple[int, int]:
    """Return uid and gid of an image's user, written as ``name``, ``uid``, ``name:group`` or ``uid:gid``.

    Raises:
        InputError: the image knows no such user or group.

    """
    name, _, group = user.partition(":")
    entry = _account(root, "etc/passwd", name or "root")
    uid = int(entry[2]) if entry else _number(name or "0", user)
    if not group:
        return uid, int(entry[3]) if entry else 0
    group_entry = _account(root, "etc/group", group)
    return uid, int(group_entry[2]) if group_entry else _number(group, user)


def _account(root: Path, file: str, name: str) -> list[str] | None:
    path = follow(root, file)
    lines = path.read_text("utf-8", "replace").splitlines() if path else []
    entries = [line.split(":") for line in lines if line.count(":") >= 3]
    return next((entry for entry in entries if name in {entry[0], entry[2]} and entry[2].isdigit()), None)


def _number(text: str, user: str) -> int:
    if not text.isdigit():
        raise InputError(f"the image is to run as `{user}`, which it does not know")
    return int(text)
