"""Where a wheel's members go, and which names they may have; pure functions, no wheel is opened here.

A place is a path below the prefix of a virtual environment, with ``python3.*`` for the minor, which is not known yet:
two members that land in one file are found whichever schemes they are in.
"""

from __future__ import annotations

import posixpath
import re
import stat
from typing import Final

_LONGEST_NAME: Final = 255  # bytes; Linux's NAME_MAX
_LONGEST_PATH: Final = 4096 - 256  # bytes; Linux's PATH_MAX, less room for the prefix
_DEEPEST: Final = 100  # folders
_BYTECODE: Final = ".cpython-312.pyc"  # names of bytecode must not be too long either
_SITE: Final = "lib/python3.*/site-packages"
_SCHEMES: Final = {
    "purelib": _SITE,
    "platlib": _SITE,
    "headers": "include/site/python3.*",
    "scripts": "bin",
    "data": "",
}
_DRIVE: Final = re.compile(r"[A-Za-z]:")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MINOR: Final = re.compile(r"(lib|include/site)/python3\.\d+(?=/|$)")
#: Folders that every image has, whatever the wheel.
FOLDERS: Final = frozenset({"", "bin", "lib", "lib/python3.*", _SITE})


def place(name: str, data_dir: str, distribution: str) -> str | None:
    """Return where a member goes; None when it does not say: beside the folders of ``.data``, or with its name.

    Folders keep their slash; those that hold nothing go nowhere, so theirs need not be right.
    """
    top, _, rest = name.partition("/")
    if top != data_dir:
        return f"{_SITE}/{name}"
    scheme, _, path = rest.partition("/")
    if scheme not in _SCHEMES or not path:
        return f"{_SITE}/{name}" if name.endswith("/") else None
    folder = _SCHEMES[scheme] + (f"/{distribution}" if scheme == "headers" else "")
    return _MINOR.sub(r"\1/python3.*", f"{folder}/{path}".lstrip("/"))


def script(name: str) -> str:
    """Return where the script of an entry point goes."""
    return f"{_SCHEMES['scripts']}/{name}"


def name_refusal(name: str) -> str | None:
    """Return why a member may not have a name (a folder's without its slash), or None when it may.

    Names that differ in case alone are fine: images are Linux. So are spaces and dots at the end.
    """
    parts = name.split("/")
    if ".." in parts or name.startswith("/") or "\\" in name or _DRIVE.match(name):
        return "leaves the installation prefix"
    if _CONTROL.search(name):
        return "has a control character in its name"
    if "" in parts or "." in parts:
        return "has a name that is not a plain path"
    if len(parts) > _DEEPEST or len(name.encode()) > _LONGEST_PATH:
        return "has a path that is too long"
    bytecode = name.removesuffix(".py") + _BYTECODE if name.endswith(".py") else name
    if len(bytecode) > _LONGEST_NAME // 4 and any(len(part.encode()) > _LONGEST_NAME for part in bytecode.split("/")):
        return "has a name that is too long"
    return None


def type_refusal(name: str, mode: int) -> str | None:
    """Return why a member may not be of its type, or None. ``mode`` is stat's; archives made on Windows have 0."""
    if stat.S_ISLNK(mode):
        return "is a symbolic link"
    if name.endswith("/"):
        return None
    if stat.S_IFMT(mode) not in {0, stat.S_IFREG}:
        return "is neither a file nor a folder"
    if posixpath.basename(name) == "__pycache__":
        return "has the name of the folder that bytecode is written to"
    return None
