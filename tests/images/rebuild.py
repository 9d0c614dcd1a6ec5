"""Build the small environment in a process of its own: ``python -m tests.images.rebuild FOLDER STORE INDEX``.

FOLDER is what the fixture ``machine`` made. Prints the image's digest, then each layer with its files, so that a
digest that moved can be told from the output of two runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder import http
from envbuilder.images.build import Source, build
from envbuilder.lock.files import read_lock
from envbuilder.lock.indexconfig import Indexes
from envbuilder.oci.listing import listing
from envbuilder.spec.environment import read_environment
from envbuilder.spec.recipe import read_recipe
from envbuilder.store.store import Store
from envbuilder.store.unpack import open_layer
from envbuilder.system.apt import Host
from envbuilder.wheels.supply import LockedWheels

if TYPE_CHECKING:
    from envbuilder.oci.model import Image


def rebuild(folder: Path, store: Store, index: str) -> Image:
    environment = read_environment(folder / "small.toml")
    lock = read_lock(folder / "small.lock.toml")
    source = Source(environment, lock, None, read_recipe(folder / "recipe.toml"))

    def indexes() -> Indexes:
        return Indexes(index, (), http.new_session(retries=0))

    return build(
        source,
        store,
        lambda python: LockedWheels(store, indexes, python, environment, lock.input.exclude_newer),
        host=Host(folder / "etc", folder / "os-release"),
    )


def main(folder: Path, store: Store, index: str) -> None:
    image = rebuild(folder, store, index)
    lines = [str(image.digest)]
    for number, layer in enumerate(image.manifest.layers):
        lines.append(f"layer {number} {layer.digest}")
        with open_layer(store, layer) as stream:
            lines += (f"layer {number} {line}" for line in listing(stream))
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Store(Path(sys.argv[2])), sys.argv[3])
