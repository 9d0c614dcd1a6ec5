from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from envbuilder import http
from envbuilder.errors import InputError
from envbuilder.lock import indexconfig
from envbuilder.lock.indexconfig import Indexes, IndexLocation, configured_index, named_index
from envbuilder.spec.environment import NamedIndex

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("configuration")
NAMED = NamedIndex("torch-cu126", "https://torch.test/whl", ("torch",))


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a user's configuration; nothing else is configured."""
    for name in list(os.environ):
        if name.startswith(("UV_", "PIP_", "ENVBUILDER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "uv").mkdir()
    return tmp_path


@pytest.fixture
def pip_file(configuration: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = configuration / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    return file


def test_what_is_given_wins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ENVBUILDER_INDEX_URL", "https://ours.test/simple")
    assert configured_index("https://given.test/simple").url == "https://given.test/simple"
    assert configured_index(None) == IndexLocation("https://ours.test/simple", "$ENVBUILDER_INDEX_URL")


@pytest.mark.parametrize("variable", ["UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_uv_by_variable(monkeypatch: pytest.MonkeyPatch, variable: str):
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.test/simple")
    monkeypatch.setenv(variable, "https://user:secret@uv.test/simple")
    found = configured_index(None)
    assert found == IndexLocation("https://user:secret@uv.test/simple", "uv's configuration")
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    "text",
    [
        'index-url = "https://uv.test/simple"\n',
        '[pip]\nindex-url = "https://uv.test/simple"\n',
        '[[index]]\nurl = "https://more.test/simple"\n\n[[index]]\nurl = "https://uv.test/simple"\ndefault = true\n',
    ],
)
def test_uv_by_file(configuration: Path, text: str):
    (configuration / "uv" / "uv.toml").write_text(text)
    assert configured_index(None) == IndexLocation("https://uv.test/simple", "uv's configuration")


def test_pip_by_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:se=cret'@pip.test/simple")
    assert configured_index(None) == IndexLocation("https://user:se=cret'@pip.test/simple", "pip's configuration")


def test_pip_by_file(pip_file: Path):
    pip_file.write_text("[global]\nindex-url = https://global.test/simple\n")
    assert configured_index(None).url == "https://global.test/simple"
    with pip_file.open("a") as file:
        file.write("[install]\nindex-url = https://install.test/simple\n")
    assert configured_index(None).url == "https://install.test/simple"


def test_broken_configuration_of_uv(configuration: Path):
    (configuration / "uv" / "uv.toml").write_text("index-url = \n")
    with pytest.raises(InputError, match="cannot be told") as caught:
        configured_index(None)
    assert "uv.toml" in str(caught.value)


def test_nothing_configured_is_uvs_default():
    found = configured_index(None)
    assert found.source == "uv's default"
    assert found.url.startswith("https://")


@pytest.mark.parametrize("url", ["simple", "ftp://x.test/", "/folder"])
def test_what_is_no_url(url: str):
    with pytest.raises(InputError, match="not a URL"):
        configured_index(url)


def test_named_index_can_be_overridden(monkeypatch: pytest.MonkeyPatch):
    assert named_index(NAMED) == IndexLocation("https://torch.test/whl", "index `torch-cu126`")
    monkeypatch.setenv("ENVBUILDER_INDEX_TORCH_CU126_URL", "https://mirror.test/whl")
    assert named_index(NAMED).url == "https://mirror.test/whl"


def test_indexes_are_found_when_asked_for(monkeypatch: pytest.MonkeyPatch):
    def never(explicit: str | None) -> IndexLocation:
        raise AssertionError(explicit)

    with http.new_session() as session, monkeypatch.context() as patch:
        patch.setattr(indexconfig, "configured_index", never)
        indexes = Indexes(None, [NAMED], session)
        assert indexes.of("torch-cu126").url == "https://torch.test/whl/"
        assert indexes.of("torch-cu126") is indexes.of("torch-cu126")
        with pytest.raises(InputError, match="no index named `torch-cu12`") as caught:
            indexes.of("torch-cu12")
        assert caught.value.hint == "did you mean `torch-cu126`?"
        patch.undo()
        assert Indexes("https://given.test/simple", [], session).of(None).url == "https://given.test/simple/"
