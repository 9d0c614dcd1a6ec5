"""Whether entry points may become scripts. pypa/installer trusts them: it would loop on interpolation, or write ``../x``."""

from __future__ import annotations

import configparser
import re

_SECTIONS = ("console_scripts", "gui_scripts")
_LONGEST_NAME = 255  # bytes; Linux's NAME_MAX
# The entry points specification; that it names objects that exist is not looked at.
_OBJECT = re.compile(r"[\w.]+\s*:\s*[\w.]+\s*(\[[^%\n]*\])?\s*")


def refusal(text: str) -> str | None:
    """Return why the scripts of an ``entry_points.txt`` cannot be written, or None when they can.

    Values are taken literally here. installer interpolates them, where a few lines can stand for more than any memory
    holds; without ``%`` in any of them, which no object reference has, there is nothing to interpolate.
    """
    parser = configparser.RawConfigParser(delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    try:
        parser.read_string(text)
    except configparser.Error as error:
        return f"is malformed: {str(error).splitlines()[0]}"
    for section in _SECTIONS:
        for name, value in parser.items(section) if parser.has_section(section) else ():
            if not _is_file_name(name):
                return f"has the entry point {name!r}, which is not the name of a file"
            if not _OBJECT.fullmatch(value):
                return f"has the entry point {name!r}, which is not `module:object`"
    return None


def _is_file_name(name: str) -> bool:
    plain = name.isprintable() and "/" not in name and "\\" not in name
    return plain and name not in {"", ".", ".."} and len(name.encode()) <= _LONGEST_NAME
