"""Whether entry points may become scripts. pypa/installer trusts them: it would loop on interpolation, or write ``../x``."""

from __future__ import annotations

import configparser
import re

from envbuilder.errors import EnvbuilderError

_SECTIONS = ("console_scripts", "gui_scripts")
_LONGEST_NAME = 255  # bytes; Linux's NAME_MAX
# The entry points specification; that it names objects that exist is not looked at.
_OBJECT = re.compile(r"[\w.]+\s*:\s*[\w.]+\s*(\[[^%\n]*\])?\s*")


class EntryPointError(EnvbuilderError):
    """Entry points that cannot become scripts; the message follows the name of the file."""


def script_names(text: str) -> list[str]:
    """Return the names of the scripts that an ``entry_points.txt`` asks for.

    Values are taken literally here. installer interpolates them, where a few lines can stand for more than any memory
    holds; without ``%`` in any of them, which no object reference has, there is nothing to interpolate.

    Raises:
        EntryPointError: it is malformed, names a script twice or by what is no file's name, or refers to no object.

    """
    parser = configparser.RawConfigParser(delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise EntryPointError(f"is malformed: {str(error).splitlines()[0]}") from error
    points = [point for section in _SECTIONS if parser.has_section(section) for point in parser.items(section)]
    seen: set[str] = set()
    for name, value in points:
        if not _is_file_name(name):
            raise EntryPointError(f"has the entry point {name!r}, which is not the name of a file")
        if name in seen:
            raise EntryPointError(f"has the entry point {name!r} twice")
        if not _OBJECT.fullmatch(value):
            raise EntryPointError(f"has the entry point {name!r}, which is not `module:object`")
        seen.add(name)
    return sorted(seen)


def _is_file_name(name: str) -> bool:
    plain = name.isprintable() and "/" not in name and "\\" not in name
    return plain and name not in {"", ".", ".."} and len(name.encode()) <= _LONGEST_NAME
