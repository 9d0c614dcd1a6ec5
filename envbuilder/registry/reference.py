"""Names of images: ``[registry[:port]/]repository[:tag][@sha256:hex]``, read as Docker reads them.

Follows the grammar of github.com/distribution/reference, with Docker Hub's defaults: no registry means ``docker.io``,
and one word there means ``library/<word>``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from envbuilder.errors import InputError
from envbuilder.oci.digest import Digest

DOCKER_HUB = "docker.io"
_OTHER_NAMES_OF_DOCKER_HUB = frozenset({"index.docker.io", "registry-1.docker.io"})
_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_REGISTRY = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:]+\])(?::([0-9]{{1,5}}))?")
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_HEX = re.compile(r"[0-9a-f]{64}")
_SCHEME = re.compile(r"(https?|docker|oci|containers-storage)://")
_MOST_TAG = 128
_MOST_REPOSITORY = 255
_MOST_PORT = 65535


class NotAReferenceError(InputError):
    """A text is no reference; the reason names the part that is wrong."""

    def __init__(self, text: str, reason: str, *, hint: str | None = None) -> None:
        usual = "write it as `registry/repository:tag` or `registry/repository@sha256:...`"
        super().__init__(f"`{text}` is no image reference: {reason}", hint=hint or usual)
        self.text = text
        self.reason = reason


@dataclass(frozen=True)
class Reference:
    """A repository in a registry, and which image in it: by tag, by digest, or both (then the digest decides).

    ``registry`` is a host in lower case with its port where one was given; Docker Hub is always ``docker.io``.
    """

    registry: str
    repository: str
    tag: str | None = None
    digest: Digest | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read a reference as a user writes it.

        Raises:
            NotAReferenceError: it is none.

        """
        if found := _SCHEME.match(text):
            raise NotAReferenceError(text, "it begins with a scheme", hint=f"leave off `{found[0]}`")
        name, at, digest_text = text.partition("@")
        digest = _digest(text, digest_text) if at else None
        first, slash, rest = name.partition("/")
        # As Docker decides: what has a dot, a port or a capital letter is a host, and so is `localhost`.
        if slash and (any(mark in first for mark in ".:[") or first == "localhost" or first != first.lower()):
            registry, path = first.lower(), rest
        else:
            registry, path = DOCKER_HUB, name
        path, colon, tag = path.partition(":")
        if registry in _OTHER_NAMES_OF_DOCKER_HUB:
            registry = DOCKER_HUB
        _check_registry(text, registry)
        check_repository(text, path)
        if colon:
            _check_tag(text, tag)
        if registry == DOCKER_HUB and "/" not in path:
            path = f"library/{path}"
        return cls(registry, path, tag if colon else None, digest)

    @property
    def name(self) -> str:
        """``registry/repository``."""
        return f"{self.registry}/{self.repository}"

    @property
    def target(self) -> str:
        """What to ask the registry for: the digest if there is one, else the tag, else ``latest``."""
        return str(self.digest) if self.digest is not None else self.tag or "latest"

    def with_digest(self, digest: Digest) -> Reference:
        """Return the same reference, fixed to a digest."""
        return replace(self, digest=digest)

    def with_tag(self, tag: str) -> Reference:
        """Return the repository's image with this tag.

        Raises:
            NotAReferenceError: it is no tag.

        """
        _check_tag(f"{self.name}:{tag}", tag)
        return replace(self, tag=tag, digest=None)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag is not None else ""
        digest = f"@{self.digest}" if self.digest is not None else ""
        return f"{self.name}{tag}{digest}"


def check_target(name: str, target: str) -> None:
    """Raise NotAReferenceError unless ``target`` is a tag or a digest; ``name`` is that of the repository."""
    if target.startswith("sha256:"):
        _digest(f"{name}@{target}", target)
    else:
        _check_tag(f"{name}:{target}", target)


def _check_registry(text: str, registry: str) -> None:
    found = _REGISTRY.fullmatch(registry)
    if found is None or int(found[1] or 0) > _MOST_PORT:
        raise NotAReferenceError(text, f"`{registry}` is no registry's host, or host and port")


def check_repository(text: str, path: str) -> None:
    """Raise NotAReferenceError unless ``path``, a part of ``text``, names a repository."""
    if not path:
        raise NotAReferenceError(text, "it names no repository")
    if path != path.lower():
        raise NotAReferenceError(text, f"the repository `{path}` has capital letters", hint=f"write `{path.lower()}`")
    if len(path) > _MOST_REPOSITORY:
        raise NotAReferenceError(text, f"the repository's name is longer than {_MOST_REPOSITORY} characters")
    if _HEX.fullmatch(path):
        raise NotAReferenceError(text, "a bare digest names no repository")
    for component in path.split("/"):
        if not _COMPONENT.fullmatch(component):
            what = f"`{component}` in the repository `{path}`" if component else f"a part of the repository `{path}`"
            rule = "is not letters and digits joined by one `.`, one or two `_`, or `-`" if component else "is empty"
            raise NotAReferenceError(text, f"{what} {rule}")


def _check_tag(text: str, tag: str) -> None:
    if len(tag) > _MOST_TAG:
        raise NotAReferenceError(text, f"the tag is longer than {_MOST_TAG} characters")
    if not _TAG.fullmatch(tag):
        rule = "is not letters, digits, `_`, `.` and `-`, beginning with none of the last two"
        raise NotAReferenceError(text, f"the tag `{tag}` {rule}" if tag else "the tag is empty")


def _digest(text: str, digest: str) -> Digest:
    try:
        return Digest.parse(digest)
    except ValueError as error:
        raise NotAReferenceError(text, f"`{digest}` is no digest: `sha256:` and 64 hexadecimal digits") from error
