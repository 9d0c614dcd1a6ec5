"""Which repositories of a registry had which blobs when we last pushed or pulled: hints for mounting, nothing more.

A hint saves an upload when the registry still has the blob there and lets us take it over; only its answer counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from envbuilder.oci.digest import Digest
    from envbuilder.registry.reference import Reference
    from envbuilder.store.store import Store

_KIND = "registry"
#: What is remembered of one registry: so many repositories, and so many blobs of each.
_REPOSITORIES, _BLOBS = 32, 500


class Whereabouts:
    """What the store remembers of one registry, as of now."""

    def __init__(self, store: Store, registry: str) -> None:
        self._seen = {repository: frozenset(blobs) for repository, blobs in _read(store, registry).items()}

    def of(self, digest: Digest, *, but: str) -> list[str]:
        """Return the repositories that had a blob, other than ``but``, the one used last first."""
        return [repository for repository, blobs in self._seen.items() if repository != but and digest.hex in blobs]


def note(store: Store, reference: Reference, digests: Collection[Digest]) -> None:
    """Remember that the reference's repository has these blobs. Nothing is written when that is known."""
    wanted = [digest.hex for digest in digests]
    if _is_known(_read(store, reference.registry), reference.repository, wanted):
        return
    with store.lock("registries"):
        seen = _read(store, reference.registry)
        blobs = list(dict.fromkeys([*wanted, *seen.pop(reference.repository, [])]))[:_BLOBS]
        rows = [(reference.repository, blobs), *seen.items()][:_REPOSITORIES]
        document = {"repositories": [{"name": name, "blobs": sorted(blobs)} for name, blobs in rows]}
        store.remember(_KIND, reference.registry, document)


def _is_known(seen: dict[str, list[str]], repository: str, wanted: list[str]) -> bool:
    return next(iter(seen), None) == repository and set(wanted) <= set(seen[repository])


def _read(store: Store, registry: str) -> dict[str, list[str]]:
    """Return the repositories, the one used last first, with the hexadecimal digests of their blobs."""
    document = store.recall(_KIND, registry)
    try:
        return {str(row["name"]): [str(blob) for blob in row["blobs"]] for row in document["repositories"]}
    except (KeyError, TypeError):
        return {}
