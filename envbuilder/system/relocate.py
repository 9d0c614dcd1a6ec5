"""Move an installed Python to another prefix: pure functions from a file's bytes to the bytes it has in the image.

The interpreter finds its prefix from where its program lies (PEP 405's landmark, ``lib/python3.12/os.py``); what has to
be rewritten is what other programs read: build variables, pkg-config files, scripts.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from envbuilder.errors import EnvbuilderError

if TYPE_CHECKING:
    from collections.abc import Mapping

Variables: TypeAlias = "Mapping[str, str | int]"

#: Prefixes that many programs are configured with: text that names them need not mean this Python, and tells nothing
#: of the machine.
GENERIC = frozenset({"/usr", "/usr/local", "/install", "/opt"})
#: Build variables whose first word is a program. The image's is meant, not the one that built this Python.
PROGRAMS = {
    "AR": "ar", "BLDSHARED": "gcc", "CC": "gcc", "CPP": "gcc", "CXX": "g++", "LDCXXSHARED": "g++", "LDSHARED": "gcc",
    "LINKCC": "gcc", "RANLIB": "ranlib",
}  # fmt: skip
_TEXT_LIMIT = 4 << 20
_END = r"(?![\w-]|\.\w)"  # of a path component: /opt/py3.12 is not what /opt/py3.12.1 means


class RelocationError(EnvbuilderError):
    """An installed Python is not as one expects it to be, and cannot be moved."""


@dataclass(frozen=True)
class Move:
    """Old prefixes (the real one, and the one configured when they differ) and the new one, all absolute."""

    old: tuple[str, ...]
    new: str

    @property
    def private(self) -> tuple[str, ...]:
        """The old prefixes that nothing else is likely to mean, the longest first."""
        return tuple(sorted((path for path in self.old if path not in GENERIC), key=len, reverse=True))

    def text(self, text: str) -> str:
        """Return the text with every old prefix, as whole path components, replaced."""
        for path in sorted(self.old, key=len, reverse=True):
            # `/usr/local` in `-L/usr/local/lib` is meant, in `/opt/usr/local` it is not.
            before = r"(?:(?<![\w/.-])|(?<=-[LI]))" if path in GENERIC else ""
            text = re.sub(before + re.escape(path) + _END, lambda _: self.new, text)
        return text


def rewrite(path: str, data: bytes, move: Move) -> bytes:
    """Return a file's bytes for the new prefix; ``path`` is relative to the prefix.

    Build variables are rewritten variable by variable, other configuration as text. Elsewhere only a prefix that
    names this machine is replaced: the standard library's sources speak of ``/usr/local`` in comments.
    """
    name = path.rpartition("/")[2]
    if name.startswith("_sysconfigdata") and name.endswith(".py"):
        return format_variables(relocate_variables(parse_variables(data, path), move)).encode()
    if len(data) > _TEXT_LIMIT or b"\0" in data:
        return data
    if _is_configuration(path):
        return move.text(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")
    for old in move.private:
        data = re.sub(re.escape(old.encode()) + _END.encode(), lambda _: move.new.encode(), data)
    return data


def blot_out(data: bytes, move: Move) -> bytes:
    """Return a program's bytes with the folder of the old prefix, where it is compiled in, written over.

    ``/home/anna/pythons/3.12.1`` becomes ``/opt/python////////3.12.1``, a path that is not there. That
    is harmless: the interpreter falls back to it only when no standard library lies beside its program. The last
    component and the length stay, since linkers let strings share their ends: ``3.12.1`` may be the version's own.
    A folder shorter than the new prefix stays as it is.
    """
    for old in move.private:
        folder, _, last = old.rpartition("/")
        if len(folder) >= len(move.new):
            new = f"{move.new.ljust(len(folder), '/')}/{last}".encode()
            data = re.sub(re.escape(old.encode()) + _END.encode(), lambda _, new=new: new, data)  # type: ignore[misc]
    return data


def parse_variables(data: bytes, path: str) -> Variables:
    """Read ``_sysconfigdata*.py``; raise RelocationError when it is not one assignment of a dict of literals."""
    try:
        for statement in ast.parse(data).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "build_time_vars":
                return dict(ast.literal_eval(statement.value))
    except (SyntaxError, ValueError, TypeError) as error:
        raise RelocationError(f"{path}: cannot be read: {error}") from error
    raise RelocationError(f"{path}: sets no build_time_vars")


def relocate_variables(variables: Variables, move: Move) -> Variables:
    """Return build variables as they hold in the image: its prefix, its compiler."""
    moved: dict[str, str | int] = {}
    for name, value in variables.items():
        if isinstance(value, str):
            text = move.text(value)
            first, space, rest = text.partition(" ")
            moved[name] = PROGRAMS[name] + space + rest if name in PROGRAMS and first else text
        else:
            moved[name] = value
    return moved


def format_variables(variables: Variables) -> str:
    """Return build variables as a module, sorted, one a line."""
    lines = "".join(f"    {name!r}: {value!r},\n" for name, value in sorted(variables.items()))
    return (
        "# Build variables of this Python, as they hold where it was moved to.\nbuild_time_vars = {\n" + lines + "}\n"
    )


def _is_configuration(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder == "bin" or name.endswith(".pc") or "/config-" in f"{folder}/"
