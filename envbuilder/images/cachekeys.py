"""What a build asks a cache, and what it answers afterwards: pure functions of locks, recipe and who made the image.

The keys are those by which the store remembers too (``SystemPlan.layer_key``, ``wheels.key.layer_key``,
``wheels.built.build_key``). Two answers are not functions of their key alone, but say what one machine had: which
interpreter the image has and what compiled it (``python``), and which files an extra resolved to (``extra``). Whoever
takes such an answer builds the image of the machine that gave it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder.images.assemble import ImagePython
from envbuilder.images.cacheentry import EXTRA, PYTHON, WHEEL, Entry, NotAnEntryError, Question, layer_entry
from envbuilder.images.extras import extra_url
from envbuilder.images.layering import Group
from envbuilder.lock.model import Package
from envbuilder.oci import layer as layer_module
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import Descriptor, canonical_json
from envbuilder.system import interpreter as interpreter_module
from envbuilder.wheels import bytecode
from envbuilder.wheels.built import BuiltWheel, Tools, build_key
from envbuilder.wheels.key import WheelFile, layer_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from envbuilder.lock.model import Lock
    from envbuilder.oci.blob import Compression
    from envbuilder.spec.environment import Extra
    from envbuilder.spec.recipe import Recipe
    from envbuilder.system.debian import SystemPlan
    from envbuilder.wheels.key import InstallPrefix

LAYER, BUILT = "layer", "wheel"
_KIND, _VERSION, _COMPILER, _TOOLS_PYTHON, _TOOLS_CC = "interpreter", "version", "compiler", "built-by", "built-with"
_FILE = "file"
_PACKAGES = "packages"


@dataclass(frozen=True)
class Maker:
    """What an image was made by: ``version`` (3.12.1) of the Python that compiled, and the tools that built wheels."""

    version: str
    tools: Tools


# -- questions ----------------------------------------------------------------------------------------------------


def system_question(plan: SystemPlan, compression: Compression) -> Question:
    """Ask for the layer of the base's packages."""
    title = f"{plan.distribution} {plan.suite}, {len(plan.packages)} packages"
    return Question(LAYER, plan.key(compression), title)


def python_question(recipe: Recipe, lock: Lock, base: str, compression: Compression) -> Question:
    """Ask which interpreter the image has on this base (its layer's key, or its digest), and for its layer."""
    revisions = [interpreter_module.REVISION, layer_module.revision(compression), bytecode.REVISION]
    asked = [lock.target.python, lock.target.architecture, list(recipe.interpreter), recipe.paths.python]
    content = canonical_json([asked, revisions, base]).decode()
    return Question(PYTHON, content, f"Python {lock.target.python}")


def built_question(package: Package, exclude_newer: str, tools: Tools) -> Question:
    """Ask for the wheel of a package that is built from source."""
    return Question(BUILT, build_key(package, exclude_newer, tools), f"{package.name} {package.version}, built")


def group_question(
    group: Group, wheels: Mapping[str, WheelFile], prefix: InstallPrefix, version: str, compression: Compression
) -> Question:
    """Ask for the layer of a group of packages."""
    files = [wheels[package.name] for package in group.packages]
    return Question(LAYER, layer_key(files, prefix, version, compression), group.title)


def extra_question(extra: Extra, lock: Lock) -> Question:
    """Ask what an extra resolves to beside this lock."""
    has = [f"{package.name} {package.version}" for package in lock.packages]
    target = [lock.target.python, lock.target.architecture, lock.target.glibc, lock.cuda]
    content = canonical_json([list(extra.requires), extra_url(extra, lock), extra.sha256, target, has]).decode()
    return Question(EXTRA, content, f"extra {extra.name}")


# -- answers ------------------------------------------------------------------------------------------------------


def python_entry(question: Question, python: ImagePython, maker: Maker) -> Entry:
    """Answer which interpreter an image has, and what compiled and built for it."""
    facts = {
        _KIND: python.kind, _VERSION: python.version, _COMPILER: maker.version,
        _TOOLS_PYTHON: maker.tools.python, _TOOLS_CC: maker.tools.compiler,
    }  # fmt: skip
    if python.layer is None:
        return Entry(question.kind, question.key, None, facts)
    return layer_entry(question, python.layer, **facts)


def read_python(entry: Entry) -> tuple[ImagePython, Maker]:
    """Read what ``python_entry`` says; raise NotAnEntryError when it says something else."""
    facts = entry.facts
    try:
        maker = Maker(facts[_COMPILER], Tools(facts[_TOOLS_PYTHON], facts[_TOOLS_CC]))
        layer = entry.layer if entry.blob is not None else None
        return ImagePython(facts[_KIND], facts[_VERSION], layer), maker
    except KeyError as error:
        raise NotAnEntryError(f"{entry.question_tag} does not describe an interpreter: {error!r}") from error


def built_entry(question: Question, wheel: BuiltWheel) -> Entry:
    """Answer with a wheel that was built."""
    return Entry(question.kind, question.key, Descriptor(WHEEL, wheel.digest, wheel.size), {_FILE: wheel.file})


def read_built(entry: Entry) -> BuiltWheel:
    """Read what ``built_entry`` says; raise NotAnEntryError when it says something else."""
    if entry.blob is None or _FILE not in entry.facts:
        raise NotAnEntryError(f"{entry.question_tag} does not describe a wheel")
    return BuiltWheel(entry.facts[_FILE], entry.blob.digest, entry.blob.size)


def extra_entry(question: Question, group: Group) -> Entry:
    """Answer with the files that an extra resolved to."""
    rows = [[p.name, p.version, p.file, p.digest.hex, p.size] for p in group.packages]
    return Entry(question.kind, question.key, None, {_PACKAGES: canonical_json(rows).decode()})


def read_extra(question: Question, entry: Entry) -> Group:
    """Read what ``extra_entry`` says; raise NotAnEntryError when it says something else."""
    try:
        packages = [
            Package(str(name), str(version), str(file), Digest.parse(f"sha256:{hexed}"), int(size), ())
            for name, version, file, hexed, size in json.loads(entry.facts[_PACKAGES])
        ]
        return Group(question.title, tuple(packages))
    except (KeyError, TypeError, ValueError) as error:
        raise NotAnEntryError(f"{entry.question_tag} does not describe an extra: {error!r}") from error


def wheel_files(packages: Sequence[Package], built: Mapping[str, BuiltWheel], nowhere: Path) -> dict[str, WheelFile]:
    """Return the wheels of packages by name, for a key alone: where their bytes lie does not matter."""
    files = {}
    for package in packages:
        wheel = built.get(package.name)
        file, digest = (package.file, package.digest) if wheel is None else (wheel.file, wheel.digest)
        files[package.name] = WheelFile(file, digest, nowhere)
    return files
