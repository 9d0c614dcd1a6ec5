"""Typed TOML getters. Every error names the file and the place (``packages.requires[3]``); unknown keys are errors.

Usage: wrap a parsed table, ask for each key once with the getter of its type, then call ``finish``.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from typing import TYPE_CHECKING, Any, TypeVar

from envbuilder.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")


class TomlError(InputError):
    """A TOML file does not say what it should: ``file``, ``place`` and the reason."""

    def __init__(self, file: Path, place: str, reason: str, *, hint: str | None = None) -> None:
        where = f"{file}: {place}" if place else str(file)
        super().__init__(f"{where}: {reason}", hint=hint)
        self.file = file
        self.place = place
        self.reason = reason


def load(file: Path) -> Table:
    """Read a TOML file.

    Raises:
        TomlError: it cannot be read, or is not TOML (the reason gives line and column).

    """
    try:
        return parse(file.read_text(encoding="utf-8"), file)
    except OSError as error:
        raise TomlError(file, "", f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TomlError(file, "", f"is not UTF-8: byte {error.start}") from error


def parse(text: str, file: Path) -> Table:
    """Return the table that a text is; ``file`` is where it came from, for errors.

    Raises:
        TomlError: it is not TOML.

    """
    try:
        return Table(tomllib.loads(text), file)
    except tomllib.TOMLDecodeError as error:
        raise TomlError(file, "", f"is not valid TOML: {error}") from error


class Table:
    """A TOML table with its file and its place in it. Getters raise ``TomlError``."""

    def __init__(self, values: dict[str, Any], file: Path, place: str = "") -> None:
        self._values = values
        self._asked: set[str] = set()
        self.file = file
        self.place = place

    def error(self, key: str, reason: str, *, hint: str | None = None) -> TomlError:
        """Return (not raise) an error about ``key`` of this table."""
        return TomlError(self.file, self._at(key), reason, hint=hint)

    def has(self, key: str) -> bool:
        """Return whether the key is there."""
        return key in self._values

    def keys(self) -> tuple[str, ...]:
        """Return all keys, for tables whose keys are names (``[build.psutil]``)."""
        return tuple(self._values)

    def string(self, key: str, default: str | None = None) -> str:
        """Return a string; without a default the key is required."""
        return self._get(key, str, "a string", default)

    def optional_string(self, key: str) -> str | None:
        """Return a string, or None when the key is absent."""
        self._asked.add(key)
        return self.string(key) if self.has(key) else None

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer."""
        return self._get(key, int, "an integer", default)

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        """Return a boolean."""
        return self._get(key, bool, "true or false", default)

    def date(self, key: str) -> dt.date:
        """Return a local date."""
        return self._get(key, dt.date, "a date such as 2025-08-13", None)

    def moment(self, key: str) -> dt.datetime:
        """Return an offset date-time."""
        value = self._get(key, dt.datetime, "a date-time such as 2025-12-01T00:00:00Z", None)
        if value.tzinfo is None:
            raise self.error(key, "needs an offset, such as the Z in 2025-12-01T00:00:00Z")
        return value

    def strings(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return an array of strings."""
        values = self._get(key, list, "an array of strings", None if default is None else list(default))
        for number, value in enumerate(values):
            if not isinstance(value, str):
                raise self.error(f"{key}[{number}]", f"must be a string, not {_describe(value)}")
        return tuple(values)

    def parsed(self, key: str, parse: Callable[[str], T], default: tuple[str, ...] | None = None) -> tuple[T, ...]:
        """Return an array of strings, each put through ``parse``, whose ValueError is the reason given."""
        found = []
        for number, text in enumerate(self.strings(key, default)):
            try:
                found.append(parse(text))
            except ValueError as error:
                raise self.error(f"{key}[{number}]", f"`{text}` is not valid: {error}") from error
        return tuple(found)

    def string_map(self, key: str) -> dict[str, str]:
        """Return a table of strings; empty when absent."""
        inner = self.table(key, optional=True)
        return {name: inner.string(name) for name in inner.keys()}  # noqa: SIM118 (not a dict)

    def table(self, key: str, *, optional: bool = False) -> Table:
        """Return a sub-table; an optional one that is absent is empty."""
        return Table(self._get(key, dict, "a table", {} if optional else None), self.file, self._at(key))

    def tables(self, key: str) -> tuple[Table, ...]:
        """Return an array of tables; empty when absent."""
        values = self._get(key, list, "an array of tables", [])
        for number, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.error(f"{key}[{number}]", f"must be a table, not {_describe(value)}")
        return tuple(Table(v, self.file, f"{self._at(key)}[{n}]") for n, v in enumerate(values))

    def finish(self) -> None:
        """Raise for the first key that no getter asked for, with the nearest known one."""
        for key in self._values:
            if key not in self._asked:
                raise self.error(key, "unknown key", hint=did_you_mean(key, self._asked))

    def _at(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def _get(self, key: str, kind: type[T], description: str, default: T | None) -> T:
        self._asked.add(key)
        if key not in self._values:
            if default is None:
                raise self.error(key, f"is missing; it must be {description}")
            return default
        value = self._values[key]
        # bool is an int and datetime is a date in Python, but not in TOML.
        if (
            not isinstance(value, kind)
            or (isinstance(value, bool) and kind is not bool)
            or (isinstance(value, dt.datetime) and kind is dt.date)
        ):
            raise self.error(key, f"must be {description}, not {_describe(value)}")
        return value


def _describe(value: object) -> str:
    names = {str: "a string", bool: "a boolean", int: "an integer", float: "a float", list: "an array", dict: "a table"}
    return names.get(type(value), f"a {type(value).__name__}")
