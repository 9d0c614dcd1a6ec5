"""Build an image from a registry's cache alone, or take from there what a build on this machine can use.

First the image of the machine that filled the cache is tried: its interpreter, its wheels built from source, a layer for
each group. When all of it is there, no wheel, no Debian package and no interpreter is needed, and the digest is the one
of that machine. Otherwise the build is this machine's own, with every layer that fits it taken from the cache.

What a build asks is asked of the store first, then of the caches; what a finished build says to a cache, or to a record,
is what the store answers to the same questions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from envbuilder import report
from envbuilder.errors import NoError
from envbuilder.images import cachekeys as keys
from envbuilder.images.build import Parts, check_glibc, compose, compression_of, interpreters, pulled_base, stages_of
from envbuilder.images.cacheentry import PYTHON, differences, layer_entry
from envbuilder.images.layerrecord import Recorded
from envbuilder.images.packages import known_layer
from envbuilder.images.remotecache import Hit, RemoteCache, fetch
from envbuilder.spec.recipe import ImageBase
from envbuilder.system.debian import SystemPlan, system_plan
from envbuilder.wheels.built import find_tools, recall, remember
from envbuilder.wheels.key import InstallPrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuilder.images.assemble import ImagePython
    from envbuilder.images.base import PulledBase
    from envbuilder.images.build import Source
    from envbuilder.images.cacheentry import Entry, Question
    from envbuilder.images.cachekeys import Maker
    from envbuilder.oci.model import Image
    from envbuilder.spec.environment import Extra
    from envbuilder.store.store import Store
    from envbuilder.system.apt import Host

Base: TypeAlias = "SystemPlan | PulledBase"

#: What the store remembers of blobs that were taken from a cache although nothing vouches for them.
_UNVOUCHED = "unvouched"
_NAMED = 3


class UnvouchedBuildError(NoError):
    """Parts of a build came from a cache that nobody vouched for: it is no trusted build."""

    def __init__(self, titles: Sequence[str]) -> None:
        super().__init__(
            f"{len(titles)} parts of this build were once taken from a cache with --trust-cache: {_few(titles)}",
            hint="to record or to publish, build in an empty store: set XDG_CACHE_HOME to an empty folder",
        )


@dataclass(frozen=True)
class CachedImage:
    """An image known from a cache: ``hits`` says of each of its parts where it lies, and of the wheels built for it."""

    image: Image
    hits: tuple[Hit, ...]

    @property
    def layers(self) -> tuple[Hit, ...]:
        """The parts that the image itself consists of."""
        return tuple(hit for hit in self.hits if hit.entry.kind in {keys.LAYER, PYTHON})

    @property
    def rows(self) -> list[Recorded]:
        """What another cache may be told of the image."""
        return [Recorded(hit.question.title, hit.entry) for hit in self.hits]


@dataclass(frozen=True)
class _Answers:
    """What is known of an image's layers and built wheels, in order; None where nothing is."""

    questions: tuple[Question, ...]
    hits: tuple[Hit | None, ...]

    @property
    def missing(self) -> list[str]:
        """The titles of what is not known."""
        return [question.title for question, hit in zip(self.questions, self.hits, strict=True) if hit is None]

    @property
    def known(self) -> list[Hit]:
        """What is known."""
        return [hit for hit in self.hits if hit is not None]


def with_extras(source: Source, extras: Sequence[Extra], cache: RemoteCache) -> Source | None:
    """Return the source with what its extras resolved to; None when the cache does not know it of all of them."""
    hits = cache.find([keys.extra_question(extra, source.lock) for extra in extras])
    groups = [keys.read_extra(hit.question, hit.entry) for hit in hits if hit is not None]
    return replace(source, extras=tuple(groups)) if len(groups) == len(extras) else None


def from_cache(source: Source, store: Store, cache: RemoteCache, *, host: Host | None = None) -> CachedImage | None:
    """Return the image of the machine that filled the cache; None when something of it is missing.

    Nothing is fetched. Metadata layers are made here, and are in the store afterwards.

    Raises:
        PoisonedCacheError: the cache is wrong about something.
        EnvbuilderError: as ``images.build.build``.

    """
    base = _base(source, store, host)
    (hit,) = cache.find([_python_question(source, base)])
    if hit is None:
        report.detail("no cache knows which interpreter the image has")
        return None
    python, maker = keys.read_python(hit.entry)
    answers = _ask(source, base, maker, store, cache)
    if missing := answers.missing:
        report.step(f"the cache lacks {len(missing)} of {len(answers.hits)} parts: {_few(missing)}")
        return None
    layers = [known.entry.layer for known in answers.known if known.entry.kind == keys.LAYER]
    system = layers.pop(0) if isinstance(base, SystemPlan) else None
    own = len(layers) - len(source.extras)
    parts = Parts(base, system, python, tuple(layers[:own]), tuple(layers[own:]))
    report.step(f"{len(answers.hits)} parts of the image are known: nothing is built")
    return CachedImage(compose(source, parts, store), (hit, *answers.known))


def seed(source: Source, store: Store, cache: RemoteCache, *, host: Host | None = None) -> ImagePython | None:
    """Bring into the store what a cache has for a build on this machine.

    Return the interpreter that the cache's image has when this machine's compiles to the same bytes: then ours should
    have it too.
    """
    base = _base(source, store, host)
    _, compiling = interpreters(source, store)
    maker = keys.Maker(compiling.version, find_tools(compiling.executable))
    (hit,) = cache.find([_python_question(source, base)])
    hits = _ask(source, base, maker, store, cache).known
    python = None
    if hit is not None:
        theirs, their_maker = keys.read_python(hit.entry)
        if their_maker.version == maker.version:
            python = theirs
            hits.append(hit)
    keep(hits, store, cache)
    return python


def keep(hits: Sequence[Hit], store: Store, cache: RemoteCache) -> None:
    """Bring what a cache has into the store, where later builds find it. What nothing vouches for is marked.

    Raises:
        BlobGoneError, WrongBytesError, RegistryError: as ``remotecache.fetch``.

    """
    fetch(hits, store)
    for hit in (hit for hit in hits if hit.repository is not None):
        if cache.recorded(hit.question) is None and hit.entry.blob is not None:
            digest = str(hit.entry.blob.digest)
            store.remember(_UNVOUCHED, digest, {"digest": digest})
        if hit.question.kind == keys.LAYER:
            store.remember(keys.LAYER, hit.question.content, hit.entry.layer.to_json())
        elif hit.question.kind == keys.BUILT:
            remember(store, hit.question.content, keys.read_built(hit.entry))


def rows_of(source: Source, extras: Sequence[Extra], parts: Parts, store: Store) -> list[Recorded]:
    """Return what a build that has ended says to a cache, or to the record, in the order of the image."""
    compiling = parts.compiling or interpreters(source, store)[1]
    maker = keys.Maker(compiling.version, find_tools(compiling.executable))
    answers = _ask(source, parts.system, maker, store, RemoteCache((), None))
    if missing := answers.missing:
        raise NoError(f"the store has {len(missing)} parts of the image no longer: {_few(missing)}", hint="build again")
    question = _python_question(source, parts.system)
    rows = [Recorded(question.title, keys.python_entry(question, parts.python, maker))]
    rows += [Recorded(hit.question.title, hit.entry) for hit in answers.known]
    for extra, group in zip(extras, source.extras, strict=True):
        question = keys.extra_question(extra, source.lock)
        rows.append(Recorded(question.title, keys.extra_entry(question, group)))
    return rows


def check_vouched(rows: Sequence[Recorded], store: Store) -> None:
    """Raise UnvouchedBuildError when some of this came from a cache with nothing that vouches for it."""
    blobs = [(row.title, row.entry.blob) for row in rows if row.entry.blob is not None]
    if titles := [title for title, blob in blobs if store.recall(_UNVOUCHED, str(blob.digest)) is not None]:
        raise UnvouchedBuildError(titles)


def _ask(source: Source, base: Base, maker: Maker, store: Store, cache: RemoteCache) -> _Answers:
    """Ask for the base's layer, the layer of each group, and the wheels built from source that the groups' keys need."""
    groups = [*(group for stage in stages_of(source) for group in stage.groups), *source.extras]
    packages = [package for group in groups for package in group.packages]
    from_source = [package for package in packages if package.build is not None]
    exclude_newer = source.lock.input.exclude_newer
    wheel_questions = [keys.built_question(package, exclude_newer, maker.tools) for package in from_source]
    wheels = _find(wheel_questions, store, cache)
    built = {p.name: keys.read_built(hit.entry) for p, hit in zip(from_source, wheels, strict=True) if hit is not None}
    files = keys.wheel_files([p for p in packages if p.build is None or p.name in built], built, store.root)
    prefix = InstallPrefix(source.recipe.paths.environment, source.lock.target.python)
    unasked = [g for g in groups if any(package.name not in files for package in g.packages)]
    questions = [
        *([keys.system_question(base, compression_of(source))] if isinstance(base, SystemPlan) else []),
        *(
            keys.group_question(group, files, prefix, maker.version, compression_of(source))
            for group in groups
            if group not in unasked
        ),
    ]
    hits = _find(questions, store, cache)
    # A group whose wheel is not known has no key, and so no layer: it counts by its wheel.
    return _Answers((*questions, *wheel_questions), (*hits, *wheels))


def _find(questions: Sequence[Question], store: Store, cache: RemoteCache) -> list[Hit | None]:
    """Ask the store, then the cache."""
    here = [_in_store(question, store, cache) for question in questions]
    found = iter(cache.find([question for question, entry in zip(questions, here, strict=True) if entry is None]))
    return [
        Hit(question, entry, None) if entry is not None else next(found)
        for question, entry in zip(questions, here, strict=True)
    ]


def _in_store(question: Question, store: Store, cache: RemoteCache) -> Entry | None:
    """Return what the store says; None when it is not what the record says, which is told."""
    entry, expected = _remembered(question, store), cache.recorded(question)
    if entry is None or expected is None:
        return entry
    if wrong := differences(expected, entry):
        report.warning(f"the store is at odds with the record about {question.title}: it has {'; '.join(wrong)}")
        return None
    return entry


def _remembered(question: Question, store: Store) -> Entry | None:
    if question.kind == keys.LAYER:
        layer = known_layer(store, question.content)
        return layer_entry(question, layer) if layer is not None else None
    wheel = recall(store, question.content)
    return keys.built_entry(question, wheel) if wheel is not None else None


def _base(source: Source, store: Store, host: Host | None) -> Base:
    """Return the base. Packages without a lock are asked of this machine's apt, lists alone; an image is pulled."""
    wanted = source.recipe.base
    if isinstance(wanted, ImageBase):
        return pulled_base(source, wanted, store)
    plan = source.system.plan if source.system is not None else system_plan(wanted, store, host=host)
    check_glibc(source, plan)
    return plan


def _python_question(source: Source, base: Base) -> Question:
    compression = compression_of(source)
    name = base.key(compression) if isinstance(base, SystemPlan) else str(base.digest)
    return keys.python_question(source.recipe, source.lock, name, compression)


def _few(titles: Sequence[str]) -> str:
    return ", ".join(titles[:_NAMED]) + (", ..." if len(titles) > _NAMED else "")
