"""Which index is the default one: what the user has configured for us, for uv, or for pip, in this order.

No index is named here: uv and pip are asked, so that whatever they understand (files, environment variables, user
and system level) counts, and uv's built-in default is the last resort.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder import http, report
from envbuilder.errors import InputError, did_you_mean
from envbuilder.lock.index import Index
from envbuilder.run import ProgramFailedError, run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import requests

    from envbuilder.spec.environment import NamedIndex

#: The default index, when no option names it.
VARIABLE = "ENVBUILDER_INDEX_URL"
#: What pip goes by, the strongest first: the environment, ``pip install``'s own section, all commands' section.
_PIP_KEYS = (":env:.index-url", "install.index-url", "global.index-url")


@dataclass(frozen=True)
class IndexLocation:
    """An index's URL, credentials included, and where it was found, in words. ``str`` is fit to be shown."""

    url: str
    source: str

    def __str__(self) -> str:
        return f"{http.redact(self.url)} ({self.source})"


def configured_index(explicit: str | None = None) -> IndexLocation:
    """Return the default index: ``explicit``, $ENVBUILDER_INDEX_URL, uv's configuration, pip's, uv's built-in one.

    Starts uv twice and, when uv is not configured, pip once: up to half a second.

    Raises:
        InputError: uv or pip cannot make sense of their configuration, or ``explicit`` is no URL.

    """
    if explicit is not None:
        return IndexLocation(_checked(explicit, "the index given"), "as given")
    if ours := os.environ.get(VARIABLE):
        return IndexLocation(_checked(ours, f"${VARIABLE}"), f"${VARIABLE}")
    built_in = _ask_uv(configured=False)
    if (of_uv := _ask_uv(configured=True)) != built_in:
        return IndexLocation(of_uv, "uv's configuration")
    if (of_pip := _ask_pip()) is not None:
        return IndexLocation(of_pip, "pip's configuration")
    return IndexLocation(built_in, "uv's default")


def named_index(index: NamedIndex) -> IndexLocation:
    """Return an environment's ``[[index]]``, which $ENVBUILDER_INDEX_<NAME>_URL overrides (a mirror, credentials)."""
    variable = f"ENVBUILDER_INDEX_{re.sub(r'[^A-Z0-9]', '_', index.name.upper())}_URL"
    if ours := os.environ.get(variable):
        return IndexLocation(_checked(ours, f"${variable}"), f"${variable}")
    return IndexLocation(index.url, f"index `{index.name}`")


class Indexes:
    """The default index and an environment's named ones, found and opened when first asked for.

    Making one costs nothing: a build that has everything never learns which index it would have used.
    """

    def __init__(self, explicit: str | None, named: Iterable[NamedIndex], session: requests.Session) -> None:
        self._explicit = explicit
        self._named: Mapping[str, NamedIndex] = {index.name: index for index in named}
        self._guard = threading.Lock()
        self._opened: dict[str | None, Index] = {}
        self.session = session

    @cached_property
    def default(self) -> IndexLocation:
        """Where the default index is."""
        location = configured_index(self._explicit)
        report.detail(f"index: {location}")
        return location

    def of(self, name: str | None) -> Index:
        """Return the index of that name, None for the default one; InputError when the environment has no such."""
        with self._guard:
            if name not in self._opened:
                self._opened[name] = Index(self._locate(name).url, self.session)
            return self._opened[name]

    def _locate(self, name: str | None) -> IndexLocation:
        if name is None:
            return self.default
        if name not in self._named:
            raise InputError(f"the environment has no index named `{name}`", hint=did_you_mean(name, self._named))
        return named_index(self._named[name])


def _checked(url: str, what: str) -> str:
    if not re.match(r"(https?|file)://", url):
        raise InputError(f"{what} is not a URL that begins with https://, http:// or file://: `{http.redact(url)}`")
    return url


def _ask_uv(*, configured: bool) -> str:
    """Let uv say which index it uses, as configured, or built in."""
    environment = dict(os.environ)
    arguments = ["uv", "pip", "compile", "--quiet", "--no-header", "--emit-index-url", "--python", sys.executable]
    if not configured:
        environment = {
            name: value for name, value in environment.items() if not name.startswith("UV_") or name == "UV_CACHE_DIR"
        }
        arguments.append("--no-config")
    output = _output([*arguments, "-"], environment)
    match = re.search(r"^--(?:index-url|default-index)[ =](\S+)$", output, re.MULTILINE)
    if match is None:
        raise InputError(
            "uv does not say which package index it uses", hint=f"name one with --index-url or ${VARIABLE}"
        )
    return match[1]


def _ask_pip() -> str | None:
    output = _output([sys.executable, "-I", "-m", "pip", "config", "list"], dict(os.environ))
    settings = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    for key in _PIP_KEYS:
        if key in settings:
            return str(ast.literal_eval(settings[key]))
    return None


def _output(argv: list[str], environment: Mapping[str, str]) -> str:
    """Run uv or pip at the root of the file system, so that no project's configuration counts."""
    try:
        return run(argv, cwd=Path("/"), env=environment, stdin="").stdout
    except ProgramFailedError as error:
        raise InputError(
            f"which package index to use cannot be told: {error.message}",
            hint=f"correct that configuration, or name the index with --index-url or ${VARIABLE}",
        ) from error
