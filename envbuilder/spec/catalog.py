"""Where environments, recipes and locks lie, and how they are found by name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder.errors import InputError, did_you_mean
from envbuilder.spec.environment import read_environment
from envbuilder.spec.recipe import read_recipe

if TYPE_CHECKING:
    from envbuilder.spec.environment import Environment
    from envbuilder.spec.recipe import Recipe

VARIABLE = "ENVBUILDER_CATALOG"


class UnknownEnvironmentError(InputError):
    """No environment has this name."""


@dataclass(frozen=True)
class Catalog:
    """A folder with ``environments/``, ``images/`` and ``lockfiles/``."""

    root: Path

    def names(self) -> tuple[str, ...]:
        """Return the names of all environments, sorted."""
        return tuple(sorted(path.stem for path in (self.root / "environments").glob("*.toml")))

    def environment(self, name: str) -> Environment:
        """Return an environment.

        Raises:
            UnknownEnvironmentError: there is none of this name; the hint gives the nearest.
            TomlError: its file is wrong, or it extends one that does not exist or that extends another.

        """
        if name not in self.names():
            folder = self.root / "environments"
            raise UnknownEnvironmentError(
                f"no environment is named `{name}` in {folder}", hint=did_you_mean(name, self.names())
            )
        return read_environment(self.root / "environments" / f"{name}.toml")

    def parent(self, environment: Environment) -> Environment | None:
        """Return the environment that this one extends, or None."""
        if environment.extends is None:
            return None
        if environment.extends == environment.name:
            raise InputError(f"{environment.file}: extends: an environment cannot extend itself")
        parent = self.environment(environment.extends)
        if parent.extends is not None:
            raise InputError(
                f"{environment.file}: extends: `{parent.name}` itself extends `{parent.extends}`",
                hint="an environment may extend one that extends nothing",
            )
        return parent

    def recipe(self, name: str) -> Recipe:
        """Return the recipe of an environment: its own, or the default one."""
        own = self.root / "images" / f"{name}.toml"
        return read_recipe(own if own.exists() else self.root / "images" / "default.toml")

    def lock_file(self, name: str) -> Path:
        """Return where an environment's lock lies or would lie."""
        return self.root / "lockfiles" / f"{name}.lock.toml"

    def system_lock_file(self, recipe: str, suite: str) -> Path:
        """Return where the lock of a recipe's base on a suite lies or would lie."""
        return self.root / "lockfiles" / f"{recipe}.{suite}.system.toml"

    def system_lock_files(self, recipe: str) -> tuple[Path, ...]:
        """Return the locks of a recipe's base that there are, one for each suite, sorted."""
        return tuple(sorted((self.root / "lockfiles").glob(f"{recipe}.*.system.toml")))


def find_catalog(start: Path) -> Catalog:
    """Find the catalog: $ENVBUILDER_CATALOG, the nearest folder from ``start`` upwards, or the one that is shipped.

    Raises:
        InputError: $ENVBUILDER_CATALOG names a folder without environments.

    """
    if named := os.environ.get(VARIABLE):
        if not (Path(named) / "environments").is_dir():
            raise InputError(f"${VARIABLE} is {named}, which has no folder `environments`")
        return Catalog(Path(named))
    for folder in (start, *start.parents):
        if (folder / "environments").is_dir() and (folder / "lockfiles").is_dir():
            return Catalog(folder)
    package = Path(__file__).parents[1]
    shipped = package / "catalog"
    return Catalog(shipped if shipped.is_dir() else package.parent)
