"""Build the small environment and name its image, in a process that is to meet with accidents.

``python -m tests.images.killable FOLDER STORE INDEX [unpack]``. FOLDER is what the fixture ``machine`` made. Prints "ready" when
all is imported, then the image's digest; an error of the tree ends it with its exit code.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from envbuilder.errors import EnvbuilderError
from envbuilder.store.roots import root_tree
from envbuilder.store.store import Store
from tests.images.rebuild import rebuild

import_module("envbuilder.images.convert")  # what a build imports on the way
import_module("envbuilder.wheels.fetch")

if TYPE_CHECKING:
    from envbuilder.oci.model import Image


def main(folder: Path, store: Store, index: str, *more: str) -> None:
    image = rebuild(folder, store, index)
    store.put_image(image, "small")
    if more == ("unpack",):
        unpack(image, store)
    sys.stdout.write(f"{image.digest}\n")


def unpack(image: Image, store: Store) -> None:
    packages = f"opt/env/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    module = root_tree(store, image) / packages / "app.py"
    if "app runs" not in module.read_text():
        message = f"{module} is not whole"
        raise AssertionError(message)


if __name__ == "__main__":
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    try:
        main(Path(sys.argv[1]), Store(Path(sys.argv[2])), *sys.argv[3:])
    except EnvbuilderError as error:
        sys.exit(f"{type(error).__name__}: {error.message}; {error.hint}")
