"""One entry of the registry's cache: what a key stands for, and its form as a small OCI artifact.

A question is what is computed with nothing at hand but locks and recipe: kind, key, title. Its entry is the answer: the
blob that was made (a layer, a wheel) and facts. On a registry each entry is an artifact of its own, under a tag made of
kind and key. The blob is the artifact's one layer, so that the registry keeps it as long as the entry, and lets it be
mounted into other repositories. Equal entries are equal bytes.

What answers of some kinds say is no function of the key alone (``VARYING``): such an entry has a second tag, made of its
own digest, which another answer to the same question does not take away.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from envbuilder.errors import EnvbuilderError
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import MANIFEST, TOC_DIGEST, Descriptor, ImageFormatError, Layer, canonical_json

if TYPE_CHECKING:
    from collections.abc import Mapping

ARTIFACT = "application/vnd.envbuilder.cache.v1"
WHEEL = "application/vnd.envbuilder.wheel.v1+zip"
EMPTY_CONTENT = b"{}"
#: What stands where an artifact has no configuration, or no blob (image specification 1.1).
EMPTY = Descriptor("application/vnd.oci.empty.v1+json", Digest.of(EMPTY_CONTENT), len(EMPTY_CONTENT))
_PREFIX = "dev.envbuilder.cache."
_DIFF_ID, _TAR_SIZE = "diff-id", "tar-size"


#: Kinds whose answers say what one machine had: which interpreter, which files an index offered.
PYTHON, EXTRA = "python", "extra"
VARYING = frozenset({PYTHON, EXTRA})


class NotAnEntryError(EnvbuilderError):
    """Something else than an entry lies where one should; the reason says what is wrong with it."""


@dataclass(frozen=True)
class Question:
    """What is asked of a cache. ``content`` is what the answer is a function of, in canonical form; any characters."""

    kind: str
    content: str
    title: str

    @property
    def key(self) -> str:
        """The key, 64 hex digits."""
        return hashlib.sha256(f"{self.kind}\n{self.content}".encode()).hexdigest()

    @property
    def tag(self) -> str:
        """The tag under which it is asked."""
        return f"{self.kind}-{self.key}"


@dataclass(frozen=True)
class Entry:
    """What a key of a kind (``layer``, ``python``, ``wheel``, ``extra``) stands for."""

    kind: str
    key: str
    blob: Descriptor | None
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        """The tag that only an equal entry has: the key's, or one of its own where the kind is ``VARYING``."""
        return f"{self.kind}-at-{Digest.of(self.to_bytes()).hex}" if self.kind in VARYING else self.question_tag

    @property
    def question_tag(self) -> str:
        """The tag under which the question is asked by one who expects no certain answer."""
        return f"{self.kind}-{self.key}"

    @property
    def layer(self) -> Layer:
        """The layer that the entry describes; raise NotAnEntryError when it describes none."""
        try:
            if self.blob is None:
                raise NotAnEntryError(f"{self.question_tag} has no layer")
            toc = self.blob.annotations.get(TOC_DIGEST)
            layer = Layer(
                digest=self.blob.digest,
                size=self.blob.size,
                diff_id=Digest.parse(self.facts[_DIFF_ID]),
                tar_size=int(self.facts[_TAR_SIZE]),
                media_type=self.blob.media_type,
                toc=Digest.parse(toc) if toc is not None else None,
            )
        except (KeyError, ValueError) as error:
            raise NotAnEntryError(f"{self.question_tag} does not describe a layer: {error!r}") from error
        if layer.descriptor != self.blob:
            raise NotAnEntryError(f"{self.question_tag} has annotations that no layer of ours has")
        return layer

    def to_bytes(self) -> bytes:
        """Return the artifact's manifest."""
        facts = {f"{_PREFIX}{name}": value for name, value in self.facts.items()}
        return canonical_json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "artifactType": ARTIFACT,
                "config": EMPTY.to_json(),
                "layers": [(self.blob or EMPTY).to_json()],
                "annotations": {f"{_PREFIX}kind": self.kind, f"{_PREFIX}key": self.key, **facts},
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        """Read an artifact's manifest.

        Raises:
            NotAnEntryError: it is none of ours, or says more than an entry says.

        """
        try:
            document = json.loads(data)
            (blob,) = (Descriptor.from_json(layer) for layer in document["layers"])
            facts = {str(name): str(value) for name, value in document["annotations"].items()}
            facts = {name.removeprefix(_PREFIX): value for name, value in facts.items()}
            entry = cls(facts.pop("kind"), facts.pop("key"), None if blob == EMPTY else blob, facts)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, ImageFormatError) as error:
            raise NotAnEntryError(f"not an entry of a cache: {error!r}") from error
        if entry.to_bytes() != data:
            raise NotAnEntryError("not an entry of a cache as this version writes them")
        return entry


def layer_entry(question: Question, layer: Layer, **facts: str) -> Entry:
    """Return the entry that says: this question's answer is this layer."""
    own = {_DIFF_ID: str(layer.diff_id), _TAR_SIZE: str(layer.tar_size)}
    return Entry(question.kind, question.key, layer.descriptor, {**own, **facts})


def differences(expected: Entry, actual: Entry) -> list[str]:
    """Return in words how two entries differ, the most telling first."""
    was, now = _fields(expected), _fields(actual)
    return [
        f"{name} {now.get(name, 'absent')} instead of {was.get(name, 'none')}"
        for name in dict.fromkeys([*was, *now])
        if was.get(name) != now.get(name)
    ]


def _fields(entry: Entry) -> dict[str, str]:
    own = {"kind": entry.kind, "key": entry.key}
    blob = entry.blob
    if blob is not None:
        own |= {"digest": str(blob.digest), "size": str(blob.size), "media type": blob.media_type, **blob.annotations}
    return own | dict(entry.facts)
