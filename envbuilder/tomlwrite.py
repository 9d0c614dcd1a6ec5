"""Write TOML that is the same bytes on every machine: strings, arrays, inline tables, each in one fixed form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def string(text: str) -> str:
    """Return a basic string."""
    # A JSON string is a TOML basic string, but for the delete character, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def array(values: Sequence[str]) -> str:
    """Return an array of strings, one on a line."""
    if not values:
        return "[]"
    return "[\n" + "".join(f"    {string(value)},\n" for value in values) + "]"


def inline(pairs: Sequence[tuple[str, str]]) -> str:
    """Return an inline table of strings."""
    inner = ", ".join(f"{string(name)} = {string(value)}" for name, value in pairs)
    return f"{{ {inner} }}" if inner else "{}"
