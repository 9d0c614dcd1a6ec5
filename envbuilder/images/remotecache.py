"""The layer cache on registries: asking, holding answers against the record of a trusted build, fetching, publishing.

Who can write to a cache can write anything under a key. What protects an image (docs/CACHE.md has the whole argument):

* an answer is taken only when it equals, field by field, what the committed record says of the key; with ``trust`` also
  when the record does not know the key;
* an answer that differs from the record, or that belongs to another key, is an error and never passed over silently;
* blobs are verified by digest when they come into the store, and layers by diff id when they are unpacked;
* who publishes compares first: a layer that was made here and is in the cache as another one is an error.
"""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuilder import parallel, report
from envbuilder.errors import NoError, UnreachableError
from envbuilder.images.cacheentry import EMPTY, EMPTY_CONTENT, WHEEL, Entry, NotAnEntryError, differences
from envbuilder.images.receive import Wanted, receive_all
from envbuilder.oci.model import MANIFEST
from envbuilder.registry.errors import NotInRegistryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from envbuilder.images.cacheentry import Question
    from envbuilder.images.layerrecord import LayerRecord, Recorded
    from envbuilder.oci.digest import Digest
    from envbuilder.oci.model import Descriptor
    from envbuilder.registry.client import Repository
    from envbuilder.store.store import Store

#: Questions asked at once, and blobs moved at once.
_QUESTIONS, _BLOBS = 8, 4


class PoisonedCacheError(NoError):
    """A cache says of a key something else than is true. Nothing of it was used."""

    def __init__(self, title: str, tag: str, repository: str, reason: str) -> None:
        super().__init__(
            f"the cache {repository} is wrong about {title} (tag {tag}): it has {reason}",
            hint="find out who wrote it, delete the tag, and build without --cache; if the layer was changed on purpose, "
            "build it on a machine that you trust with --record and commit the record (docs/CACHE.md)",
        )
        self.tag = tag


@dataclass(frozen=True)
class Hit:
    """A question, its answer that may be used, and the repository with its blob; None when the store has that."""

    question: Question
    entry: Entry
    repository: Repository | None


def judge(question: Question, found: Entry, record: LayerRecord | None, *, trust: bool, where: str) -> bool:
    """Return whether an entry that a cache has for a question may be used.

    Raises:
        PoisonedCacheError: it belongs to another key, or is not what the record says.

    """
    if (found.kind, found.key) != (question.kind, question.key):
        raise PoisonedCacheError(question.title, question.tag, where, f"the entry of another key, {found.question_tag}")
    expected = record.entry(question.kind, question.key) if record is not None else None
    if expected is None:
        return trust
    if wrong := differences(expected, found):
        raise PoisonedCacheError(question.title, expected.tag, where, _words(wrong))
    return True


class RemoteCache:
    """Caches asked in order; the first that has an answer gives it. Safe to share between threads.

    Without ``trust`` nothing is asked that the record cannot vouch for. A cache out of reach is left out with a warning.
    """

    def __init__(self, repositories: Sequence[Repository], record: LayerRecord | None, *, trust: bool = False) -> None:
        self._repositories = list(repositories)
        self._record = record
        self._trust = trust
        self._guard = threading.Lock()
        self._known: dict[tuple[str, str], Hit | None] = {}
        self._gone: set[Digest] = set()

    def find(self, questions: Sequence[Question]) -> list[Hit | None]:
        """Return what the caches have, in order; None where they have nothing that may be used.

        Raises:
            PoisonedCacheError: a cache has something else than the truth; see ``judge``.
            RegistryError: a registry does not take our credentials, or its answer is not understood.

        """
        return parallel.run_all(self._find, questions, workers=_QUESTIONS)

    def _find(self, question: Question) -> Hit | None:
        address = (question.kind, question.key)
        if address not in self._known:
            expected = self.recorded(question)
            tag = expected.tag if expected is not None else question.tag
            self._known[address] = self._ask(question, tag) if expected is not None or self._trust else None
        hit = self._known[address]
        return None if hit is not None and hit.entry.blob is not None and hit.entry.blob.digest in self._gone else hit

    def recorded(self, question: Question) -> Entry | None:
        """Return what the record says of a question."""
        return self._record.entry(question.kind, question.key) if self._record is not None else None

    def forget(self, digest: Digest) -> None:
        """Count a blob as not there from now on."""
        self._gone.add(digest)

    def _ask(self, question: Question, tag: str) -> Hit | None:
        for repository in tuple(self._repositories):
            try:
                found = read_entry(repository, tag)
            except UnreachableError as error:
                self._leave_out(repository, error)
                continue
            except NotAnEntryError as error:
                raise PoisonedCacheError(question.title, tag, repository.name, error.message) from error
            if found is not None and judge(question, found, self._record, trust=self._trust, where=repository.name):
                return Hit(question, found, repository)
        return None

    def _leave_out(self, repository: Repository, error: UnreachableError) -> None:
        with self._guard:
            if repository in self._repositories:
                self._repositories.remove(repository)
                report.warning(f"the cache {repository.name} is left out: {error.message}")


def _words(wrong: Sequence[str]) -> str:
    """Return the first differences in words: when the digest differs, so does all else."""
    more = f"; and {len(wrong) - 2} more differences" if len(wrong) > 2 else ""
    return "; ".join(wrong[:2]) + more


def read_entry(repository: Repository, tag: str) -> Entry | None:
    """Return the entry under a tag, None when there is none; raise NotAnEntryError when it is something else."""
    try:
        return Entry.from_bytes(repository.manifest(tag).data)
    except NotInRegistryError:
        return None


def fetch(hits: Iterable[Hit], store: Store) -> None:
    """Bring the blobs of entries into the store, verified; what is there already is not asked for.

    Raises:
        BlobGoneError: a registry does not have one any more.
        WrongBytesError: a registry gives other bytes; nothing of those is kept.
        RegistryError: a registry is out of reach, or does not take our credentials.
        DiskFullError: there is no room.

    """
    wanted: dict[Repository, dict[Digest, Wanted]] = {}
    for hit in hits:
        blob = hit.entry.blob
        if hit.repository is not None and blob is not None and not store.has(blob.digest, blob.size):
            # A wheel has no diff id; nothing is unpacked here, so that none is looked at.
            diff_id = blob.digest if blob.media_type == WHEEL else hit.entry.layer.diff_id
            wanted.setdefault(hit.repository, {})[blob.digest] = Wanted(blob, diff_id)
    for repository, blobs in wanted.items():
        size = sum(one.layer.size for one in blobs.values())
        report.step(f"fetching {len(blobs)} layers and wheels from {repository.name} ({size / 1e6:.1f} MB)")
        try:
            receive_all(list(blobs.values()), repository, store, unpack=False)
        except NotInRegistryError as error:
            for digest in blobs:
                if not store.has(digest) and not repository.has_blob(digest):
                    raise BlobGoneError(repository.name, digest) from error
            raise


def offer(hits: Sequence[Hit], target: Repository, store: Store) -> None:
    """Let a repository have the blobs that the store lacks, without moving them where the registry can do that itself.

    What it cannot is fetched into the store. Afterwards an image of these layers can be pushed to ``target``.

    Raises:
        BlobGoneError, WrongBytesError, RegistryError: as ``fetch``.

    """
    absent = [hit for hit in hits if hit.entry.blob is not None and not store.has(hit.entry.blob.digest)]

    def is_there(hit: Hit) -> bool:
        return hit.entry.blob is None or _has(target, hit.entry.blob.digest, hit.repository)

    there = parallel.run_all(is_there, absent, workers=_QUESTIONS)
    fetch([hit for hit, is_there in zip(absent, there, strict=True) if not is_there], store)


def _has(target: Repository, digest: Digest, source: Repository | None) -> bool:
    """Return whether a repository has a blob, having taken it over from another one of the same registry if need be."""
    if target.has_blob(digest):
        return True
    if source is None or source.name == target.name:
        return False
    registry, _, path = source.name.partition("/")
    return target.name.startswith(f"{registry}/") and target.mount(digest, path)


class BlobGoneError(NoError):
    """A registry has an entry, but no longer the blob that it names."""

    def __init__(self, repository: str, digest: Digest) -> None:
        super().__init__(
            f"the cache {repository} has an entry of {digest}, but not the blob itself",
            hint="its registry lost it: delete the cache's repository, and fill it anew with --cache-to",
        )
        self.digest = digest


def publish(rows: Sequence[Recorded], repository: Repository, store: Store, source: Repository | None = None) -> int:
    """Write the entries that a cache lacks, and their blobs; return how many were written.

    Blobs are taken over from ``source``, where the image was pushed to, if that is on the same registry, else uploaded.

    Raises:
        PoisonedCacheError: the cache has an entry of one of the keys that says something else.
        RegistryError: the registry refuses.

    """
    there = parallel.run_all(lambda row: _is_there(row, repository), rows, workers=_QUESTIONS)
    missing = [row.entry for row, is_there in zip(rows, there, strict=True) if not is_there]
    if not missing:
        return 0
    blobs = {entry.blob.digest: entry.blob for entry in missing if entry.blob is not None}
    if not repository.has_blob(EMPTY.digest):
        repository.put_blob(EMPTY.digest, EMPTY.size, lambda: io.BytesIO(EMPTY_CONTENT), lambda _: None)
    with report.task("to the cache", sum(blob.size for blob in blobs.values())) as task:
        order = sorted(blobs.values(), key=lambda blob: -blob.size)
        parallel.run_all(lambda blob: _give(blob, repository, store, source, task), order, workers=_BLOBS)
    tags = [(entry, tag) for entry in missing for tag in dict.fromkeys((entry.tag, entry.question_tag))]
    parallel.run_all(lambda p: repository.put_manifest(p[0].to_bytes(), MANIFEST, p[1]), tags, workers=_BLOBS)
    return len(missing)


def _is_there(row: Recorded, repository: Repository) -> bool:
    """Return whether the cache has the entry; raise PoisonedCacheError when it has another one in its place."""
    try:
        found = read_entry(repository, row.entry.tag)
    except NotAnEntryError as error:
        raise PoisonedCacheError(row.title, row.entry.tag, repository.name, error.message) from error
    if found is not None and (wrong := differences(row.entry, found)):
        raise PoisonedCacheError(row.title, row.entry.tag, repository.name, _words(wrong))
    return found is not None


def _give(
    blob: Descriptor, repository: Repository, store: Store, source: Repository | None, task: report.Task
) -> None:  # fmt: skip
    if _has(repository, blob.digest, source):
        task.advance(blob.size)
        return
    path = store.blob(blob.digest)
    repository.put_blob(blob.digest, blob.size, lambda: path.open("rb"), task.advance)
