"""The main job: a lock, a recipe and this machine's package sources -> an image in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder import parallel, report
from envbuilder.errors import HostError, InputError
from envbuilder.images.assemble import Frame, Made, Origin, assemble, metadata_entries
from envbuilder.images.layering import plan
from envbuilder.images.packages import PackageLayers
from envbuilder.oci.blob import Compression
from envbuilder.oci.layer import write_layer
from envbuilder.spec.recipe import DebianBase
from envbuilder.system.debian import make_system
from envbuilder.system.interpreter import find_interpreter, interpreter_layer
from envbuilder.system.locked import make_locked_system
from envbuilder.wheels.bytecode import Compiler
from envbuilder.wheels.key import InstallPrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuilder.images.layering import Group, Stage
    from envbuilder.images.packages import SupplyMaker
    from envbuilder.lock.model import Lock
    from envbuilder.oci.model import Image, Layer
    from envbuilder.spec.environment import Environment
    from envbuilder.spec.recipe import Recipe
    from envbuilder.store.store import Store
    from envbuilder.system.apt import Host
    from envbuilder.system.debian import SystemPlan
    from envbuilder.system.interpreter import Interpreter
    from envbuilder.system.lockfile import SystemLock


@dataclass(frozen=True)
class Source:
    """What an image is built from: the environment, its lock, the lock of what it extends, its recipe, its extras.

    Without a lock of its own the base is resolved anew each day.
    """

    environment: Environment
    lock: Lock
    parent: Lock | None
    recipe: Recipe
    extras: tuple[Group, ...] = ()
    system: SystemLock | None = None

    @property
    def name(self) -> str:
        """What the image is called: the environment's name, with its extras'."""
        return "+".join([self.environment.name, *(group.title.removeprefix("extra ") for group in self.extras)])


def build(source: Source, store: Store, supply: SupplyMaker, *, host: Host | None = None) -> Image:
    """Build an environment's image; everything it consists of is in the store afterwards.

    ``supply`` makes the supply of wheels, given the Python that source archives are built with. ``host`` is the
    machine whose apt is asked for the base, this one when None.

    Raises:
        EnvbuilderError: of the room in which something is wrong; what was made until then stays in the store.

    """
    recipe, minor = source.recipe, source.lock.target.python
    stages = plan(source.lock, source.parent, recipe.layering)
    system, system_layer = _system(source, store, host)
    interpreter = find_interpreter(minor, recipe.interpreter, store)
    made = [Made(system_layer, f"{system.distribution} {system.suite}, {len(system.packages)} packages")]
    # The base's own interpreter is in the image alone; another of its minor compiles and builds for it.
    python = find_interpreter(minor, ("host", "managed"), store) if interpreter.kind == "base" else interpreter
    if interpreter.kind != "base":
        made.append(Made(_python_layer(interpreter, recipe, system, store), f"Python {interpreter.version}"))
    prefix = InstallPrefix(recipe.paths.environment, minor)
    compression = Compression(recipe.layering.compression)
    packages = PackageLayers(store, prefix, python.executable, python.version, supply(python.executable), compression)
    layers = packages.make([group for stage in stages for group in stage.groups])
    home = "/usr" if interpreter.kind == "base" else recipe.paths.python
    # Extras lie on top, so that the environment's own layers stay as they are.
    extras = [Made(*pair) for pair in zip(packages.make(source.extras), (g.title for g in source.extras), strict=True)]
    made += _with_metadata(stages, layers, Frame(recipe.paths.environment, home), store)
    origin = Origin(f"{system.distribution} {system.suite}", f"{interpreter.kind} {interpreter.version}")
    return assemble(source.environment, source.lock, recipe, origin, [*made, *extras])


def _system(source: Source, store: Store, host: Host | None) -> tuple[SystemPlan, Layer]:
    """Return the base's plan and layer, having made sure that its glibc is new enough for the wheels."""
    base = source.recipe.base
    if not isinstance(base, DebianBase):
        raise InputError(
            f"{source.recipe.file}: base.image: images as a base cannot be pulled yet",
            hint="use a base of Debian packages: `debian = [...]`",
        )
    if source.system is None:
        system, layer = make_system(base, store, host=host)
    else:
        renew = f"envbuilder lock {source.environment.name} --system"
        system, layer = make_locked_system(source.system, base, store, renew=renew, host=host)
    needed = source.lock.target.glibc
    if system.glibc is not None and _numbers(system.glibc) < _numbers(needed):
        raise HostError(
            f"{system.distribution} {system.suite} has glibc {system.glibc}, but the lock's wheels need {needed}",
            hint="build on a newer release, or set `base.suite` in the recipe to one that this machine's sources offer",
        )
    return system, layer


def _python_layer(interpreter: Interpreter, recipe: Recipe, system: SystemPlan, store: Store) -> Layer:
    with Compiler(interpreter.executable, workers=parallel.cores()) as compiler:
        return interpreter_layer(interpreter, recipe.paths.python, store, compiler, glibc=system.glibc)


def _with_metadata(stages: Sequence[Stage], layers: Sequence[Layer], frame: Frame, store: Store) -> list[Made]:
    """Return the stages' layers, each stage closed by its metadata layer."""
    made, rest = [], iter(layers)
    for stage in stages:
        made += [Made(next(rest), group.title) for group in stage.groups]
        made.append(Made(_metadata_layer(stage, frame, store), f"{stage.lock.environment}: metadata"))
    return made


def _metadata_layer(stage: Stage, frame: Frame, store: Store) -> Layer:
    with store.writer() as blob:
        layer = write_layer(metadata_entries(stage.lock, frame), blob.file)
        blob.commit(layer.digest)
    report.detail(f"layer {layer.digest} ({layer.size} bytes): {stage.lock.environment}: metadata")
    return layer


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
