"""Our side of the comparison: the command line as users run it, on stores and a catalog made for the benchmark."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.wheelset import changed, closure, link, smallest_group_member
from envbuilder import http
from envbuilder.images.layering import plan
from envbuilder.lock.drift import lock_input
from envbuilder.lock.files import write_lock
from envbuilder.lock.indexconfig import Indexes
from envbuilder.lock.model import Lock
from envbuilder.spec.catalog import Catalog
from envbuilder.spec.environment import read_environment
from envbuilder.store.store import Store
from envbuilder.system.lockfile import read_system_lock
from envbuilder.wheels.fetch import fetch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.measure import Measured, Runner
    from benchmarks.wheelset import Size
    from envbuilder.lock.model import Package
    from envbuilder.oci.model import Image
    from envbuilder.system.apt import DebianPackage

ROOT = Path(__file__).parents[1]
#: The image that is measured, and the one it stands on for the peers: system and interpreter, no packages.
NAME, BASE = "bench", "bench-base"
RECIPE = "default"
REGISTRY_NAME = "ours/bench"


@dataclass(frozen=True)
class Input:
    """What is built: the wheels by name in ``wheels``, a seed store that has them and the base, and two catalogs.

    ``changed`` is ``catalog`` with one small package changed, whose wheel lies in ``changed_wheel``.
    """

    size: Size
    packages: tuple[Package, ...]
    wheels: Path
    seed: Path
    catalog: Path
    changed: Path
    changed_wheel: Path
    neighbours: tuple[Package, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all wheels."""
        return sum(package.size for package in self.packages)


def prepare(size: Size, lock: Lock, source: Store, work: Path, runner: Runner) -> Input:
    """Make everything that is not measured; wheels that ``source`` does not have are fetched into it."""
    packages = closure(lock, size.packages)
    catalog, altered = work / "catalog", work / "changed"
    recipe = Catalog(ROOT).recipe(RECIPE)
    complete = write_environment(catalog, NAME, lock, packages)
    fetch(packages, source, Indexes(None, (), http.new_session()))
    seed = Store(store_in(work / "seed"))
    wheels, other = work / "wheels", work / "changed-wheel"
    for folder in (wheels, other):
        folder.mkdir()
    for package in packages:
        link(source.blob(package.digest), wheels / package.file)
        link(source.blob(package.digest), seed.blob(package.digest))
    small = smallest_group_member(packages, recipe.layering.alone)
    now = changed(small, wheels / small.file, other / small.file)
    link(other / small.file, seed.blob(now.digest))
    write_environment(altered, NAME, lock, tuple(now if p == small else p for p in packages))
    write_environment(catalog, BASE, lock, ())
    for package in _debs():
        # What the source store does not have, the base's build fetches.
        if source.has(package.digest):
            link(source.blob(package.digest), seed.blob(package.digest))
    runner.quietly(program(), "build", BASE, env=environment(work / "seed", catalog))
    stage = plan(complete, None, recipe.layering)[0]
    group = next(group for group in stage.groups if small in group.packages)
    return Input(size, packages, wheels, work / "seed", catalog, altered, other / small.file, group.packages)


def _debs() -> set[DebianPackage]:
    files = Catalog(ROOT).system_lock_files(RECIPE)
    return {package for file in files for package in read_system_lock(file).plan.packages}


def write_environment(folder: Path, name: str, lock: Lock, packages: Sequence[Package]) -> Lock:
    """Write an environment of exactly these packages, its lock and the default recipe to a catalog; return the lock."""
    for part in ("environments", "lockfiles", "images"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for file in (ROOT / "images" / f"{RECIPE}.toml", *Catalog(ROOT).system_lock_files(RECIPE)):
        shutil.copyfile(file, folder / file.relative_to(ROOT))
    requires = "".join(f'    "{package.name}=={package.version}",\n' for package in packages)
    file = folder / "environments" / f"{name}.toml"
    file.write_text(
        f'title = "{name}"\nreleased = 2026-01-01\nend-of-support = 2030-01-01\nstatus = "supported"\n'
        f'python = "{lock.target.python}"\nglibc = "{lock.target.glibc}"\nexclude-newer = {lock.input.exclude_newer}\n'
        f'[cuda]\nversion = "{lock.cuda}"\n[gpu]\naccelerators = ["cpu"]\n[packages]\nrequires = [\n{requires}]\n',
        encoding="utf-8",
    )
    made = Lock(name, lock_input(read_environment(file)), lock.target, lock.cuda, tuple(packages))
    write_lock(made, folder / "lockfiles" / f"{name}.lock.toml")
    return made


def program() -> Path:
    """Return the ``envbuilder`` of this Python."""
    return Path(sys.executable).with_name("envbuilder")


def store_in(cache: Path) -> Path:
    """Return where the store lies in a cache folder."""
    return cache / "envbuilder" / "store"


def environment(cache: Path, catalog: Path) -> dict[str, str]:
    """Return the variables that let ``envbuilder`` use a cache folder and a catalog of ours."""
    return {"XDG_CACHE_HOME": str(cache), "ENVBUILDER_CATALOG": str(catalog)}


def fresh_cache(given: Input, cache: Path) -> None:
    """Make a cache folder whose store has the wheels, the base's layers and no package layer: hard links, no bytes."""
    shutil.copytree(given.seed, cache, symlinks=True, copy_function=lambda a, b: link(Path(a), Path(b)))


def build(runner: Runner, cache: Path, catalog: Path) -> tuple[Measured, Image]:
    """Build; the measure's size is that of the package layers, the base's being known."""
    measured = runner.run([program(), "build", NAME], environment(cache, catalog))
    image = image_of(cache, NAME)
    base = {layer.digest for layer in image_of(cache, BASE).manifest.layers}
    made = sum(layer.size for layer in image.manifest.layers if layer.digest not in base)
    return replace(measured, size=made), image


def image_of(cache: Path, name: str) -> Image:
    """Return a store's image by name."""
    store = Store(store_in(cache))
    digest = store.find_image(name)
    if digest is None:
        raise LookupError(f"{store.root} has no image `{name}`")
    return store.image(digest)


def push(runner: Runner, cache: Path, name: str, address: str) -> Measured:
    """Push an image of the store."""
    words = [program(), "push", name, f"{address}/{REGISTRY_NAME}:{name}"]
    return runner.run(words, {"XDG_CACHE_HOME": str(cache)})


def pull(runner: Runner, cache: Path, address: str, *, unpack: bool = True) -> Measured:
    """Pull the image into a store that does not exist yet, and unpack it meanwhile."""
    words = [program(), "pull", f"{address}/{REGISTRY_NAME}:{NAME}", *([] if unpack else ["--no-unpack"])]
    return runner.run(words, {"XDG_CACHE_HOME": str(cache)})


def launch(runner: Runner, cache: Path, catalog: Path, *words: str) -> Measured:
    """Run a command in the image; the first time, its root is made of the unpacked layers."""
    return runner.run([program(), "launch", NAME, "--", *words], environment(cache, catalog))


def new_bytes(before: Image, after: Image) -> int:
    """Return the bytes that a registry with ``before`` lacks of ``after``: layers, configuration, manifest."""
    known = {layer.digest for layer in before.manifest.layers}
    layers = sum(layer.size for layer in after.manifest.layers if layer.digest not in known)
    return layers + after.manifest.config.size + after.descriptor.size
