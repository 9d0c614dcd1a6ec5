"""Read a package index: the files of a project, and the core metadata of a wheel without downloading it.

Follows the Simple repository API (PEP 691 JSON, PEP 503 HTML) with PEP 700 sizes and times, PEP 592 yanking and
PEP 658/714 metadata files. An index may also be a folder: of project folders, or of files with an index.html each.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from packaging.utils import canonicalize_name

from envbuilder import http
from envbuilder.errors import EnvbuilderError, InputError
from envbuilder.lock.rangefile import NoRangesError, RangeFile
from envbuilder.oci.digest import Digest

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterator, Mapping

    import requests

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_SUFFIXES = (".whl", ".tar.gz", ".zip", ".tar.bz2", ".tgz")
#: An archive that is no wheel must not fill the memory by what it claims.
_MOST_METADATA = 16 << 20


class ProjectNotFoundError(InputError):
    """The index has no such project."""

    def __init__(self, project: str, index: str) -> None:
        super().__init__(
            f"`{project}` is not on the index {http.redact(index)}",
            hint="check the spelling of the name, and that this is the right index",
        )
        self.project = project


class IndexFormatError(EnvbuilderError):
    """An answer of an index, or a wheel on it, is not what the specification says."""


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A file that an index offers. What the index does not say is None; a local folder says no digests.

    ``url`` carries credentials where the index needs them. ``yank_reason`` may be empty also when ``yanked``.
    ``metadata`` says whether the core metadata can be had beside it, with ``metadata_digest`` when that is stated.
    """

    file: str
    url: str
    digest: Digest | None = None
    size: int | None = None
    requires_python: str | None = None
    yanked: bool = False
    yank_reason: str = ""
    metadata: bool = False
    metadata_digest: Digest | None = None
    upload_time: dt.datetime | None = None


class Index:
    """An index at ``url`` (https, http or file). Safe to share between threads; pages are read once."""

    def __init__(self, url: str, session: requests.Session) -> None:
        self.url = url.rstrip("/") + "/"
        self.session = session
        self._user = urlsplit(self.url).netloc.rpartition("@")[0]
        self._pages: dict[str, tuple[IndexFile, ...]] = {}

    def __str__(self) -> str:
        return http.redact(self.url)

    def files(self, project: str) -> tuple[IndexFile, ...]:
        """Return a project's wheels and source archives in the index's order.

        Raises:
            ProjectNotFoundError: the index does not have it.
            IndexFormatError: the page is neither JSON nor HTML as specified.
            OutOfReachError: the index did not answer, or wants credentials.

        """
        name = canonicalize_name(project)
        if name not in self._pages:
            self._pages[name] = self._read_page(name, None)
        return self._pages[name]

    def find(self, project: str, file: str) -> IndexFile | None:
        """Return the file of that name, or None. Cheap on pages of thousands, and nothing is kept.

        Raises: as ``files``.
        """
        name = canonicalize_name(project)
        files = self._pages[name] if name in self._pages else self._read_page(name, file)
        return next((found for found in files if found.file == file), None)

    def metadata(self, file: IndexFile) -> bytes:
        """Return a wheel's core metadata: the file beside it, else out of the wheel by ranges or as a whole.

        Raises:
            IndexFormatError: the wheel has none, or it has another digest than stated.
            NotFoundError, OutOfReachError: the file is not there, or the index did not answer.

        """
        if file.metadata:
            try:
                data = http.read(self.session, f"{file.url}.metadata").body
            except http.NotFoundError:
                pass  # promised, but not kept: some mirrors copy the page and not the file
            else:
                if file.metadata_digest not in {None, Digest.of(data)}:
                    raise IndexFormatError(f"{self}: the metadata of {file.file} has another digest than stated")
                return data
        try:
            with RangeFile(self.session, file.url, file.size) as stream:
                return _metadata_in(stream, file.file)
        except NoRangesError:
            with self._downloaded(file) as stream:
                return _metadata_in(stream, file.file)

    def _read_page(self, name: str, only: str | None) -> tuple[IndexFile, ...]:
        try:
            page = http.read(self.session, f"{self.url}{name}/", headers={"Accept": _ACCEPT})
        except http.NotFoundError as error:
            raise ProjectNotFoundError(name, self.url) from error
        parse = _from_json if page.media_type.endswith("json") else _from_html
        try:
            return tuple(parse(page.body, lambda url: self._located(url, page.url), only))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IndexFormatError(f"{self}: the page of `{name}` is not a project page: {error}") from error

    def _located(self, link: str, page: str) -> str:
        """Return the absolute URL of a link on a page, without its fragment, with credentials where they are due."""
        # Pages have thousands of links, nearly all of them absolute.
        url = (link if link.startswith("https://") else urljoin(page, link)).partition("#")[0]
        if url.startswith("file:") and not self.url.startswith("file:"):
            message = "it offers a file of this machine"
            raise ValueError(message)
        if self._user:
            parts, ours = urlsplit(url), urlsplit(self.url)
            # Credentials were given for the index's host; its files need them as well, other hosts must not see them.
            same = (parts.scheme, parts.hostname, parts.port) == (ours.scheme, ours.hostname, ours.port)
            if same and "@" not in parts.netloc:
                return urlunsplit(parts._replace(netloc=f"{self._user}@{parts.netloc}"))
        return url

    @contextmanager
    def _downloaded(self, file: IndexFile) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile() as whole:
            with http.get(self.session, file.url, headers={"Accept-Encoding": "identity"}) as response:
                for data in http.chunks(response):
                    whole.write(data)
            whole.seek(0)
            yield whole


def _from_json(body: bytes, located: Callable[[str], str], only: str | None) -> Iterator[IndexFile]:
    # Large pages take tens of megabytes as objects: what is not asked for is dropped as it is read.
    document = json.loads(body, object_hook=None if only is None else partial(_unless_another, only))
    version = str(document["meta"]["api-version"])
    if version.partition(".")[0] != "1":
        message = f"it is of version {version} of the API, not 1"
        raise ValueError(message)
    for entry in document["files"]:
        if entry is not None and _is_asked_for(entry["filename"], only):
            yield _json_file(entry, located(entry["url"]))


def _unless_another(only: str, found: dict[str, Any]) -> dict[str, Any] | None:
    return found if found.get("filename", only) == only else None


def _is_asked_for(file: str, only: str | None) -> bool:
    return file.endswith(_SUFFIXES) and only in {None, file}


def _json_file(entry: Mapping[str, Any], url: str) -> IndexFile:
    yanked = entry.get("yanked", False)
    # PEP 714: the name of the key was once dist-info-metadata, and is still on some indexes.
    metadata = entry.get("core-metadata", entry.get("data-dist-info-metadata", entry.get("dist-info-metadata", False)))
    time = entry.get("upload-time")
    return IndexFile(
        file=entry["filename"],
        url=url,
        digest=_sha256(entry.get("hashes")),
        size=entry.get("size"),
        requires_python=entry.get("requires-python") or None,
        yanked=yanked is not False,
        yank_reason=yanked if isinstance(yanked, str) else "",
        metadata=bool(metadata),
        metadata_digest=_sha256(metadata),
        upload_time=dt.datetime.fromisoformat(time) if isinstance(time, str) else None,
    )


def _sha256(hashes: object) -> Digest | None:
    value = hashes.get("sha256") if isinstance(hashes, dict) else None
    return Digest.parse(f"sha256:{value}".lower()) if value else None


def _from_html(body: bytes, located: Callable[[str], str], only: str | None) -> Iterator[IndexFile]:
    parser = _Anchors()
    parser.feed(body.decode("utf-8", "replace"))
    parser.close()
    for attributes in parser.found:
        link, _, fragment = urljoin(parser.base, attributes.get("href", "")).partition("#")
        file = unquote(urlsplit(link).path.rpartition("/")[2])
        if _is_asked_for(file, only):
            yield _html_file(attributes, file, located(link), fragment)


def _html_file(attributes: Mapping[str, str], file: str, url: str, fragment: str) -> IndexFile:
    metadata = attributes.get("data-core-metadata", attributes.get("data-dist-info-metadata"))
    return IndexFile(
        file=file,
        url=url,
        digest=_digest_of(fragment),
        requires_python=attributes.get("data-requires-python") or None,
        yanked="data-yanked" in attributes,
        yank_reason=attributes.get("data-yanked", ""),
        metadata=metadata is not None and metadata != "false",
        metadata_digest=_digest_of(metadata or ""),
    )


def _digest_of(text: str) -> Digest | None:
    match = re.search(r"(?:^|&)sha256=([0-9a-f]{64})(?:&|$)", text.lower())
    return Digest(match[1]) if match else None


class _Anchors(HTMLParser):
    """Collects the attributes of every ``<a>``, and what ``<base>`` says."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[dict[str, str]] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take one tag."""
        attributes = {name: value or "" for name, value in attrs}
        if tag == "a":
            self.found.append(attributes)
        elif tag == "base" and not self.base:
            self.base = attributes.get("href", "")


def _metadata_in(stream: IO[bytes] | io.RawIOBase, file: str) -> bytes:
    """Return ``<name>-<version>.dist-info/METADATA`` of the wheel in ``stream``."""
    try:
        with zipfile.ZipFile(stream) as archive:
            names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            if len(names) != 1:
                raise IndexFormatError(f"{file}: has {len(names)} METADATA files instead of one")
            if archive.getinfo(names[0]).file_size > _MOST_METADATA:
                raise IndexFormatError(f"{file}: its METADATA is larger than {_MOST_METADATA >> 20} MiB")
            return archive.read(names[0])
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise IndexFormatError(f"{file}: is not a wheel: {error}") from error
