"""The options of ``envbuilder build`` that have to do with caches on registries, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from envbuilder.images.build import Source
    from envbuilder.images.cachedbuild import Built, Means, Wanted
    from envbuilder.lock.indexconfig import Indexes
    from envbuilder.spec.catalog import Catalog
    from envbuilder.store.store import Store


def configure_cache(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``build``."""
    group = parser.add_argument_group("cache on a registry (docs/CACHE.md)")
    configure_reading(group)
    group.add_argument("--cache-to", metavar="REF", help="write the layers of this build into this repository")
    group.add_argument("--record", action="store_true", help="write the record that caches are held against")


def configure_reading(group: argparse._ActionsContainer) -> None:
    """Declare the options by which caches are read."""
    group.add_argument(
        "--cache", action="append", default=[], metavar="REF",
        help="take from this repository the layers that the committed record vouches for",
    )  # fmt: skip
    group.add_argument("--trust-cache", action="store_true", help="take others as well: who can write there is trusted")


def check_cache_options(args: argparse.Namespace) -> None:
    """Raise InputError for options that contradict each other."""
    from envbuilder.errors import InputError

    if args.trust_cache and not args.cache:
        raise InputError("--trust-cache says how a cache is read", hint="name the cache: --cache REF")
    if args.record and args.cache:
        raise InputError(
            "--record writes what caches are held against, and so takes nothing from one", hint="leave --cache out"
        )
    if args.cache_to and args.trust_cache:
        raise InputError("--cache-to would pass on what --trust-cache takes unseen", hint="leave --trust-cache out")


def means_for(source: Source, store: Store, index_url: str | None) -> Means:
    """Return what images are made with on this machine; indexes are opened when they are needed."""
    from envbuilder.images.cachedbuild import Means
    from envbuilder.wheels.supply import LockedWheels

    def open_indexes() -> Indexes:
        from envbuilder import http
        from envbuilder.lock.indexconfig import Indexes

        return Indexes(index_url, source.environment.indexes, http.new_session())

    def supply(python: Path) -> LockedWheels:
        return LockedWheels(store, open_indexes, python, source.environment, source.lock.input.exclude_newer)

    return Means(store, supply, open_indexes)


def make(args: argparse.Namespace, catalog: Catalog, wanted: Wanted, means: Means, *, fetch: bool = True) -> Built:
    """Make the image with what the caches have, and write record and cache as asked.

    Its layers are in the store afterwards unless not to ``fetch``: then ``Built.hits`` says where they are.
    """
    from envbuilder.images.cachedbuild import build_cached, build_here

    check_cache_options(args)
    if not args.cache:
        built = build_here(wanted, means)
    else:
        from envbuilder.images.layerrecord import read_record
        from envbuilder.images.remotecache import RemoteCache
        from envbuilder.registry.client import open_repository
        from envbuilder.registry.reference import Reference

        file = record_file(catalog, wanted.source)
        record = read_record(file) if file.exists() else None
        if record is None and not args.trust_cache:
            _warn_of_no_record(file, wanted.source.environment.name)
        repositories = [open_repository(Reference.parse(text)) for text in dict.fromkeys(args.cache)]
        cache = RemoteCache(repositories, record, trust=args.trust_cache)
        built = build_cached(wanted, means, cache, fetch=fetch or bool(args.cache_to))
    if args.record:
        _write_record(record_file(catalog, wanted.source), built, means.store)
    if args.cache_to:
        _publish(args.cache_to, built, means.store)
    return built


def record_file(catalog: Catalog, source: Source) -> Path:
    """Return where the record of an environment's layers lies or would lie: one for each release that is built on."""
    from envbuilder.spec.recipe import DebianBase
    from envbuilder.system.apt import Host

    base = source.recipe.base
    parts = [source.environment.name, (base.suite or Host().codename()) if isinstance(base, DebianBase) else "image"]
    return catalog.root / "lockfiles" / f"{'.'.join(parts)}.layers.toml"


def _warn_of_no_record(file: Path, name: str) -> None:
    from envbuilder import report

    report.warning(
        f"nothing is taken from the cache, because {file.name} is not there to vouch for it: write it with "
        f"`envbuilder build {name} --record` on a machine that you trust and commit it, or give --trust-cache"
    )


def _write_record(file: Path, built: Built, store: Store) -> None:
    from envbuilder import report
    from envbuilder.images.layerrecord import LayerRecord, write_record

    write_record(LayerRecord(built.source.environment.name, tuple(built.rows(store))), file)
    report.step(f"wrote {file}; commit it")


def _publish(text: str, built: Built, store: Store) -> None:
    """Write what the cache lacks. That it refuses is told, and stops nothing: the image is there all the same."""
    from envbuilder import report
    from envbuilder.images.remotecache import publish
    from envbuilder.images.whereabouts import note
    from envbuilder.registry.client import open_repository
    from envbuilder.registry.errors import RegistryError
    from envbuilder.registry.reference import Reference

    reference = Reference.parse(text)
    repository = open_repository(reference, push=True)
    rows = built.rows(store)
    try:
        written = publish(rows, repository, store)
    except RegistryError as error:
        report.warning(f"the cache {repository.name} was not written: {error.message}")
        return
    note(store, reference, [row.entry.blob.digest for row in rows if row.entry.blob is not None])
    report.step(f"{written} of {len(rows)} entries were new to the cache {repository.name}")
