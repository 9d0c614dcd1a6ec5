"""The main job: a lock, a recipe and this machine's package sources -> an image in the store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envbuilder import parallel, report
from envbuilder.errors import HostError
from envbuilder.images.assemble import Frame, ImagePython, Made, Origin, assemble, metadata_entries, metadata_key
from envbuilder.images.layering import plan
from envbuilder.images.packages import KIND, PackageLayers, known_layer
from envbuilder.oci.blob import Compression
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import write_layer
from envbuilder.spec.recipe import ImageBase
from envbuilder.system.debian import SystemPlan, make_system
from envbuilder.system.interpreter import find_interpreter, interpreter_layer
from envbuilder.system.locked import make_locked_system
from envbuilder.wheels.bytecode import Compiler
from envbuilder.wheels.key import InstallPrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuilder.images.base import PulledBase
    from envbuilder.images.layering import Group, Stage
    from envbuilder.images.packages import SupplyMaker
    from envbuilder.lock.model import Lock
    from envbuilder.oci.model import Image, Layer
    from envbuilder.spec.environment import Environment
    from envbuilder.spec.recipe import Recipe
    from envbuilder.store.store import Store
    from envbuilder.system.apt import Host
    from envbuilder.system.interpreter import Interpreter
    from envbuilder.system.lockfile import SystemLock
    from envbuilder.system.pythons import OwnPython


@dataclass(frozen=True)
class Source:
    """What an image is built from: the environment, its lock, the lock of what it extends, its recipe, its extras.

    Without a lock of its own the base is resolved anew each day. ``base`` is the recipe's image when it was pulled
    already: see ``with_base``.
    """

    environment: Environment
    lock: Lock
    parent: Lock | None
    recipe: Recipe
    extras: tuple[Group, ...] = ()
    system: SystemLock | None = None
    base: PulledBase | None = None

    @property
    def name(self) -> str:
        """What the image is called: the environment's name, with its extras'."""
        return "+".join([self.environment.name, *(group.title.removeprefix("extra ") for group in self.extras)])


@dataclass(frozen=True)
class Parts:
    """What an image is composed of: the base, the interpreter, a layer for each group of packages.

    A base of Debian packages has one layer; one that was pulled brings its own. ``compiling`` is what compiled and
    built for it, None when nothing was made here.
    """

    system: SystemPlan | PulledBase
    system_layer: Layer | None
    python: ImagePython
    packages: tuple[Layer, ...]
    extras: tuple[Layer, ...]
    compiling: Interpreter | None = None


def build(source: Source, store: Store, supply: SupplyMaker, *, host: Host | None = None) -> Image:
    """Build an environment's image; everything it consists of is in the store afterwards.

    ``supply`` makes the supply of wheels, given the Python that source archives are built with. ``host`` is the
    machine whose apt is asked for the base, this one when None.

    Raises:
        EnvbuilderError: of the room in which something is wrong; what was made until then stays in the store.

    """
    return compose(source, make_parts(source, store, supply, host=host), store)


def make_parts(
    source: Source, store: Store, supply: SupplyMaker, *, host: Host | None = None, given: ImagePython | None = None
) -> Parts:
    """Make the layers of an image, or find them in the store. Arguments and errors are those of ``build``.

    ``given`` is the image's interpreter when it is known already, with its layer in the store.
    """
    recipe = source.recipe
    system, system_layer = _system(source, store, host)
    interpreter, compiling = interpreters(source, store, _own_python(source, system, system_layer, store))
    layer = None
    if given is None and interpreter.kind != "base":
        layer = _python_layer(interpreter, source, system, store)
    prefix = InstallPrefix(recipe.paths.environment, interpreter.minor)
    packages = PackageLayers(
        store, prefix, compiling.executable, compiling.version, supply(compiling.executable), compression_of(source)
    )
    return Parts(
        system,
        system_layer,
        given or ImagePython(interpreter.kind, interpreter.version, layer),
        tuple(packages.make([group for stage in stages_of(source) for group in stage.groups])),
        tuple(packages.make(source.extras)),
        compiling,
    )


def interpreters(source: Source, store: Store, own: OwnPython | None = None) -> tuple[Interpreter, Interpreter]:
    """Return the image's interpreter and the one that compiles and builds for it: the same, if it is on this machine.

    ``own`` is what is known of the base's.
    """
    minor = source.lock.target.python
    interpreter = find_interpreter(minor, source.recipe.interpreter, store, own=own)
    # The base's own interpreter is in the image alone; another of its minor compiles and builds for it.
    is_here = interpreter.kind != "base"
    return interpreter, interpreter if is_here else find_interpreter(minor, ("host", "managed"), store)


def stages_of(source: Source) -> tuple[Stage, ...]:
    """Return the plan of the image's layers with packages, without extras."""
    return plan(source.lock, source.parent, source.recipe.layering)


def compression_of(source: Source) -> Compression:
    """Return how layers are compressed."""
    return Compression(source.recipe.layering.compression)


def compose(source: Source, parts: Parts, store: Store) -> Image:
    """Return the image of these parts. Its metadata layers are made, and are in the store afterwards."""
    recipe, system, python = source.recipe, parts.system, parts.python
    base = None if isinstance(system, SystemPlan) else system
    made = []
    if isinstance(system, SystemPlan) and parts.system_layer is not None:
        title = f"{system.distribution} {system.suite}, {len(system.packages)} packages"
        made.append(Made(parts.system_layer, title))
    if python.layer is not None:
        made.append(Made(python.layer, f"Python {python.version}"))
    home = recipe.paths.python
    if python.kind == "base":
        home = "/usr" if base is None else base.python(source.lock.target.python).prefix or "/usr"
    # Extras lie on top, so that the environment's own layers stay as they are.
    extras = [Made(layer, group.title) for layer, group in zip(parts.extras, source.extras, strict=True)]
    made += _with_metadata(source, parts.packages, Frame(recipe.paths.environment, home), store)
    if base is not None:
        from envbuilder.images.base import check_depth  # noqa: PLC0415 (needs what unpacks layers)

        check_depth(base, len(made) + len(extras))
    origin = Origin(f"{system.distribution} {system.suite}", f"{python.kind} {python.version}", home, base)
    return assemble(source.environment, source.lock, recipe, origin, [*made, *extras])


def _system(source: Source, store: Store, host: Host | None) -> tuple[SystemPlan | PulledBase, Layer | None]:
    """Return the base, with its layer when it is ours, having made sure that its glibc is new enough for the wheels."""
    base, compression = source.recipe.base, compression_of(source)
    if isinstance(base, ImageBase):
        return pulled_base(source, base, store), None
    if source.system is None:
        system, layer = make_system(base, store, compression, host=host)
    else:
        renew = f"envbuilder lock {source.environment.name} --system"
        system, layer = make_locked_system(source.system, base, store, compression, renew=renew, host=host)
    check_glibc(source, system)
    return system, layer


def check_glibc(source: Source, system: SystemPlan) -> None:
    """Raise HostError when the base's glibc is older than the lock's wheels need."""
    needed = source.lock.target.glibc
    if system.glibc is not None and _numbers(system.glibc) < _numbers(needed):
        raise HostError(
            f"{system.distribution} {system.suite} has glibc {system.glibc}, but the lock's wheels need {needed}",
            hint="build on a newer release, or set `base.suite` in the recipe to one that this machine's sources offer",
        )


def with_base(source: Source, store: Store) -> Source:
    """Return the source with its base pulled, when that is an image, so that a tag means one image all along."""
    wanted = source.recipe.base
    return replace(source, base=pulled_base(source, wanted, store)) if isinstance(wanted, ImageBase) else source


def pulled_base(source: Source, wanted: ImageBase, store: Store) -> PulledBase:
    """Return the base that is an image, having made sure that it fits; say what it lacks."""
    if source.base is not None:
        return source.base
    from envbuilder.images.base import check_base, shortcomings  # noqa: PLC0415 (needs what unpacks layers)
    from envbuilder.images.basepull import pull_base  # noqa: PLC0415 (needs the registry's client)

    paths = source.recipe.paths
    base = pull_base(wanted.reference, source.lock.target.architecture, store)
    kinds = source.recipe.interpreter
    places = [paths.environment] if kinds == ("base",) else [paths.environment, paths.python]
    check_base(base, source.lock.target.glibc, places)
    for shortcoming in shortcomings(base, source.lock.target.python if kinds[0] == "base" else None):
        report.warning(f"{base.name} {shortcoming}")
    return base


def _own_python(
    source: Source, system: SystemPlan | PulledBase, layer: Layer | None, store: Store
) -> OwnPython | None:  # fmt: skip
    """Return what is known of the base's own Python; None when nobody asks for it."""
    if "base" not in source.recipe.interpreter:
        return None
    from envbuilder.images.base import DEFAULT_PATH, own_python  # noqa: PLC0415 (needs what unpacks layers)
    from envbuilder.images.survey import overlay, survey  # noqa: PLC0415 (as above)

    minor = source.lock.target.python
    if not isinstance(system, SystemPlan):
        return system.python(minor)
    tree = overlay(survey(store, [(layer.descriptor, layer.diff_id)] if layer is not None else []))
    return own_python(tree, DEFAULT_PATH, minor, f"the recipe's base ({system.distribution} {system.suite})")


def _python_layer(
    interpreter: Interpreter, source: Source, system: SystemPlan | PulledBase, store: Store
) -> Layer:  # fmt: skip
    prefix, compression = source.recipe.paths.python, compression_of(source)
    with Compiler(interpreter.executable, workers=parallel.cores()) as compiler:
        return interpreter_layer(interpreter, prefix, store, compiler, compression, glibc=system.glibc)


def _with_metadata(source: Source, layers: Sequence[Layer], frame: Frame, store: Store) -> list[Made]:
    """Return the layers of the image's stages, each stage closed by its metadata layer."""
    made, rest = [], iter(layers)
    for stage in stages_of(source):
        made += [Made(next(rest), group.title) for group in stage.groups]
        metadata = _metadata_layer(stage, frame, compression_of(source), store)
        made.append(Made(metadata, f"{stage.lock.environment}: metadata"))
    return made


def _metadata_layer(stage: Stage, frame: Frame, compression: Compression, store: Store) -> Layer:
    entries = metadata_entries(stage.lock, frame)
    key = metadata_key(entries, compression)
    known = known_layer(store, key)
    # It is small: so a damaged one is found and made again here, without a `cache verify`.
    if known is not None and Digest.of_file(store.blob(known.digest)) == known.digest:
        return known
    with store.writer() as blob:
        layer = write_layer(entries, blob.file, compression)
        blob.commit(layer.digest)
    store.remember(KIND, key, layer.to_json())
    report.detail(f"layer {layer.digest} ({layer.size} bytes): {stage.lock.environment}: metadata")
    return layer


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
