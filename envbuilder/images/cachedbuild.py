"""Make an image from caches on registries, from wheels, or from both; and say afterwards what it was made of.

A build without caches and extras imports nothing that talks HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envbuilder import report
from envbuilder.images.build import compose, make_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from envbuilder.images.build import Parts, Source
    from envbuilder.images.layerrecord import Recorded
    from envbuilder.images.packages import SupplyMaker
    from envbuilder.images.remotecache import Hit, RemoteCache
    from envbuilder.lock.indexconfig import Indexes
    from envbuilder.oci.model import Image
    from envbuilder.spec.environment import Extra
    from envbuilder.store.store import Store
    from envbuilder.system.apt import Host


@dataclass(frozen=True)
class Wanted:
    """What is to be made: a source without extras, and the extras that come on top."""

    source: Source
    extras: tuple[Extra, ...]


@dataclass(frozen=True)
class Built:
    """An image and its source with extras. ``hits`` says where its layers are that may not be in the store."""

    wanted: Wanted
    source: Source
    image: Image
    hits: tuple[Hit, ...] = ()
    _cached: tuple[Recorded, ...] = ()
    _parts: Parts | None = None

    def rows(self, store: Store) -> list[Recorded]:
        """Return what may be told a cache, or written to a record.

        Raises:
            UnvouchedBuildError: some of it came from a cache that nothing vouched for.

        """
        from envbuilder.images.fromcache import check_vouched, rows_of  # noqa: PLC0415 (see above)

        rows = list(self._cached)
        if self._parts is not None:
            rows = rows_of(self.source, self.wanted.extras, self._parts, store)
        check_vouched(rows, store)
        return rows


@dataclass(frozen=True)
class Means:
    """What an image is made with: store, wheels, indexes for extras, and the machine whose apt is asked (None: this)."""

    store: Store
    supply: SupplyMaker
    open_indexes: Callable[[], Indexes]
    host: Host | None = None


def build_here(wanted: Wanted, means: Means) -> Built:
    """Build without a cache; everything the image consists of is in the store afterwards. Raises as ``build``."""
    source = _provided(wanted, means)
    parts = make_parts(source, means.store, means.supply, host=means.host)
    return Built(wanted, source, compose(source, parts, means.store), _parts=parts)


def build_cached(wanted: Wanted, means: Means, cache: RemoteCache, *, fetch: bool = True) -> Built:
    """Build with what caches have. All that the image consists of is in the store afterwards, unless not to ``fetch``.

    Raises:
        PoisonedCacheError: a cache is wrong about something.
        EnvbuilderError: as ``build``.

    """
    from envbuilder.images.remotecache import BlobGoneError  # noqa: PLC0415 (see above)

    while True:
        try:
            return _all_from_cache(wanted, means, cache, fetch=fetch) or _some_from_cache(wanted, means, cache)
        except BlobGoneError as error:
            report.warning(f"{error.message}; it is made here")
            cache.forget(error.digest)


def _all_from_cache(wanted: Wanted, means: Means, cache: RemoteCache, *, fetch: bool) -> Built | None:
    from envbuilder.images.fromcache import from_cache, keep, with_extras  # noqa: PLC0415 (see above)

    source = with_extras(wanted.source, wanted.extras, cache)
    found = from_cache(source, means.store, cache, host=means.host) if source is not None else None
    if source is None or found is None:
        return None
    if fetch:
        keep(found.layers, means.store, cache)
    return Built(wanted, source, found.image, found.layers, tuple(found.rows))


def _some_from_cache(wanted: Wanted, means: Means, cache: RemoteCache) -> Built:
    from envbuilder.images.fromcache import seed  # noqa: PLC0415 (see above)

    source = _provided(wanted, means)
    given = seed(source, means.store, cache, host=means.host)
    parts = make_parts(source, means.store, means.supply, host=means.host, given=given)
    return Built(wanted, source, compose(source, parts, means.store), _parts=parts)


def _provided(wanted: Wanted, means: Means) -> Source:
    """Return the source with its extras, whose wheels are in the store."""
    if not wanted.extras:
        return wanted.source
    from envbuilder.images.extras import provide_extra  # noqa: PLC0415 (see above)

    indexes = means.open_indexes()
    groups = [provide_extra(extra, wanted.source.lock, means.store, indexes) for extra in wanted.extras]
    return replace(wanted.source, extras=tuple(groups))
