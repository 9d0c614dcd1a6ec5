from __future__ import annotations

import datetime as dt
import hashlib
import zipfile
from typing import TYPE_CHECKING

import pytest

from envbuilder import http
from envbuilder.lock.coremetadata import core_metadata
from envbuilder.lock.index import Index, IndexFormatError, ProjectNotFoundError
from envbuilder.oci.digest import Digest
from tests.indexes import serve
from tests.wheelmaker import make_sdist, make_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import requests

    from tests.indexes import IndexServer

OLD = make_wheel("My.Pkg", "1.0")
NEW = make_wheel("My.Pkg", "2.0", requires=["dep>=1"], requires_python=">=3.9,<4")
SOURCE = make_sdist("My.Pkg", "2.0")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[IndexServer]:
    with serve(tmp_path / "index") as server:
        server.add(OLD, NEW, SOURCE)
        server.yanked[OLD.file] = "broken"
        yield server


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with http.new_session(retries=1, backoff=0.01) as session:
        yield session


@pytest.mark.parametrize("json", [True, False])
def test_files(server: IndexServer, session: requests.Session, json: bool):  # noqa: FBT001
    server.json = json
    files = Index(server.url, session).files("my_PKG")
    old, new, source = files
    assert [file.file for file in files] == [OLD.file, NEW.file, SOURCE.file]
    assert [file.digest for file in files] == [OLD.digest, NEW.digest, SOURCE.digest]
    assert (old.yanked, old.yank_reason, new.yanked) == (True, "broken", False)
    assert (old.requires_python, new.requires_python) == (None, ">=3.9,<4")
    assert (new.metadata, source.metadata) == (True, False)
    assert new.metadata_digest == Digest.of(NEW.metadata)
    assert new.url == server.url.replace("/simple/", f"/files/my-pkg/{NEW.file}")
    assert new.size == (NEW.size if json else None)
    assert new.upload_time == (dt.datetime(2025, 1, 1, tzinfo=dt.UTC) if json else None)


@pytest.mark.parametrize("json", [True, False])
def test_find(server: IndexServer, session: requests.Session, json: bool):  # noqa: FBT001
    server.json = json
    index = Index(server.url, session)
    found = index.find("My_Pkg", NEW.file)
    assert index.find("my-pkg", "my_pkg-3.0.tar.gz") is None
    assert found == index.files("my-pkg")[1] == index.find("my-pkg", NEW.file)
    assert len(server.requests) == 3


def test_page_is_read_once(server: IndexServer, session: requests.Session):
    index = Index(server.url, session)
    index.files("my-pkg")
    index.files("My.Pkg")
    assert server.paths() == ["/simple/my-pkg/"]


def test_project_that_is_not_there(server: IndexServer, session: requests.Session):
    with pytest.raises(ProjectNotFoundError, match="`no-such` is not on the index http://127") as caught:
        Index(server.url, session).files("no.such")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("body", ["{}", '{"meta": {"api-version": "2.0"}}', "[1]", "no JSON"])
def test_page_that_is_none(session: requests.Session, body: str, monkeypatch: pytest.MonkeyPatch):
    page = http.Page("http://host.test/simple/x/", "application/vnd.pypi.simple.v1+json", body.encode())
    monkeypatch.setattr(http, "read", lambda *_args, **_options: page)
    with pytest.raises(IndexFormatError, match="page of `x`"):
        Index("http://host.test/simple", session).files("x")


def test_credentials_go_to_the_files_of_the_same_host_only(
    server: IndexServer, session: requests.Session, monkeypatch: pytest.MonkeyPatch
):
    server.credentials = ("user", "secret")
    index = Index(server.url_with_credentials, session)
    assert index.metadata(index.files("my-pkg")[1]) == NEW.metadata
    assert "secret" not in str(index)
    body = b'<a href="https://files.test/x-1-py3-none-any.whl">x</a><a href="/f/x-2-py3-none-any.whl">x</a>'
    page = http.Page("https://host.test/simple/x/", "text/html", body)
    monkeypatch.setattr(http, "read", lambda *_args, **_options: page)
    first, second = Index("https://user:secret@host.test/simple/", session).files("x")
    assert first.url == "https://files.test/x-1-py3-none-any.whl"
    assert second.url == "https://user:secret@host.test/f/x-2-py3-none-any.whl"


def test_html_of_odd_indexes(session: requests.Session, monkeypatch: pytest.MonkeyPatch):
    digest = hashlib.sha256(b"x").hexdigest()
    body = f"""<html><head><base href="https://files.test/a/"></head>
        <a name="top">no link</a> <a href="../">up</a>
        <A HREF="x%2B-1.0+cpu-py3-none-any.whl#egg=x&sha256={digest}" data-dist-info-metadata="true"
           data-requires-python="&gt;=3.9" data-yanked>x</A>
        <a href='b/x-1.0.tar.gz#md5=00'>x<a href="x.exe">""".encode()
    page = http.Page("https://host.test/simple/x/", "text/html", body)
    monkeypatch.setattr(http, "read", lambda *_args, **_options: page)
    wheel, source = Index("https://host.test/simple/", session).files("x")
    assert wheel.file == "x+-1.0+cpu-py3-none-any.whl"
    assert wheel.url == "https://files.test/a/x%2B-1.0+cpu-py3-none-any.whl"
    assert wheel.digest == Digest(digest)
    assert (wheel.yanked, wheel.yank_reason, wheel.requires_python) == (True, "", ">=3.9")
    assert (wheel.metadata, wheel.metadata_digest) == (True, None)
    assert (source.file, source.digest, source.metadata) == ("x-1.0.tar.gz", None, False)


def test_remote_page_cannot_offer_a_local_file(session: requests.Session, monkeypatch: pytest.MonkeyPatch):
    page = http.Page("https://host.test/simple/x/", "text/html", b'<a href="file:///etc/x-1.tar.gz">x</a>')
    monkeypatch.setattr(http, "read", lambda *_args, **_options: page)
    with pytest.raises(IndexFormatError, match="offers a file of this machine"):
        Index("https://host.test/simple/", session).files("x")


def test_metadata_beside_the_wheel(server: IndexServer, session: requests.Session):
    index = Index(server.url, session)
    assert index.metadata(index.files("my-pkg")[1]) == NEW.metadata
    assert server.paths("/files/*") == [f"/files/my-pkg/{NEW.file}.metadata"]


def test_metadata_with_another_digest_is_refused(server: IndexServer, session: requests.Session):
    index = Index(server.url, session)
    server.fail("*.metadata", corrupt=True)
    with pytest.raises(IndexFormatError, match="another digest"):
        index.metadata(index.files("my-pkg")[1])


def test_metadata_promised_but_absent_is_read_from_the_wheel(server: IndexServer, session: requests.Session):
    index = Index(server.url, session)
    file = index.files("my-pkg")[1]
    server.metadata = False
    assert index.metadata(file) == NEW.metadata


@pytest.mark.parametrize("json", [True, False])
def test_metadata_by_ranges(server: IndexServer, session: requests.Session, json: bool):  # noqa: FBT001
    # A directory larger than a block, METADATA far from the end, and content that does not shrink.
    files = {f"big/{number:05}.py": hashlib.sha512(str(number).encode()).digest() * 4 for number in range(4000)}
    big = make_wheel("big", requires=["dep"], files=files)
    server.add(big)
    server.metadata, server.json = False, json
    index = Index(server.url, session)
    assert index.metadata(index.files("big")[0]) == big.metadata
    asked = [request.range for request in server.requests if request.path.endswith(".whl")]
    assert None not in asked
    assert len(asked) <= 4
    assert core_metadata(big.metadata).requires == ("dep",)


def test_metadata_by_download_where_there_are_no_ranges(server: IndexServer, session: requests.Session):
    server.metadata = server.ranges = False
    index = Index(server.url, session)
    assert index.metadata(index.files("my-pkg")[1]) == NEW.metadata


def test_metadata_of_what_is_no_wheel(server: IndexServer, session: requests.Session):
    server.metadata = False
    (server.folder / "my-pkg" / OLD.file).write_bytes(b"no ZIP" * 1000)
    with zipfile.ZipFile(server.folder / "my-pkg" / NEW.file, "w") as archive:
        archive.writestr("x/METADATA", "")
    index = Index(server.url, session)
    old, new, _ = index.files("my-pkg")
    with pytest.raises(IndexFormatError, match="is not a wheel"):
        index.metadata(old)
    with pytest.raises(IndexFormatError, match="0 METADATA files"):
        index.metadata(new)


def test_folder_as_an_index(tmp_path: Path, session: requests.Session):
    NEW.write(tmp_path / "my-pkg")
    SOURCE.write(tmp_path / "my-pkg")
    page = tmp_path / "other" / "index.html"
    page.parent.mkdir()
    page.write_text(f'<a href="../my-pkg/{NEW.file}#sha256={NEW.digest.hex}">x</a>')
    index = Index(tmp_path.as_uri(), session)
    assert [file.file for file in index.files("My_Pkg")] == [NEW.file, SOURCE.file]
    assert index.metadata(index.files("my-pkg")[0]) == NEW.metadata
    assert index.files("other")[0].digest == NEW.digest
    assert index.metadata(index.files("other")[0]) == NEW.metadata
    with pytest.raises(ProjectNotFoundError):
        index.files("nothing")
