"""Which modules the distributions of an environment offer for import, read from their RECORDs."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path, PurePosixPath

from tests.contents.records import read_records

_EXTENSION = (".abi3.so", ".so")


def offered(site: Path) -> dict[str, set[str]]:
    """Return module names, each with the distributions (as their .dist-info folders are named) that offer it.

    Of each distribution these are the modules and packages at the top of site-packages. A namespace stands for what it
    holds: a folder without ``__init__.py`` at any depth, and a package at the top in whose ``__init__.py`` nothing
    happens, since importing that would show nothing.
    """
    found: dict[str, set[str]] = {}
    for row in read_records(site):
        name = _module(PurePosixPath(row.path), site)
        if name is not None:
            found.setdefault(name, set()).add(row.owner)
    return found


def _module(path: PurePosixPath, site: Path) -> str | None:
    """Return the offered module that a file stands for, if any."""
    stem = _stem(path.name)
    *folders, _ = path.parts
    if stem is None or not all(part.isidentifier() for part in folders):
        return None
    for depth in range(1, len(folders) + 1):
        init = site.joinpath(*folders[:depth], "__init__.py")
        if not init.exists():
            continue
        is_itself = depth == len(folders) and stem == "__init__"
        if depth > 1 or is_itself or not _is_idle(init):
            return ".".join(folders[:depth])
    if stem in {"__init__", "__main__"} or not stem.isidentifier():
        return None
    return ".".join([*folders, stem])


def _stem(name: str) -> str | None:
    """Return a module's name from its file's: ``_cffi`` for ``_cffi.cpython-312-x86_64-linux-gnu.so``."""
    if name.endswith(".py"):
        return name.removesuffix(".py")
    return name.partition(".")[0] if name.endswith(_EXTENSION) else None


@cache
def _is_idle(init: Path) -> bool:
    """Return whether a package's ``__init__.py`` does nothing but extend its ``__path__``."""
    return all(_does_nothing(node) for node in ast.parse(init.read_bytes()).body)


def _does_nothing(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name(id="__path__")]) | ast.Try():
            return "__path__" in ast.unparse(node)
        case ast.ImportFrom(module="pkgutil" | "__future__"):
            return True
        case _:
            return False
