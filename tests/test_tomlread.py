from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pytest

from envbuilder.tomlread import Table, TomlError, load

if TYPE_CHECKING:
    from pathlib import Path


def table(tmp_path: Path, text: str) -> Table:
    file = tmp_path / "x.toml"
    file.write_text(text)
    return load(file)


def test_getters_return_what_is_there(tmp_path: Path):
    read = table(
        tmp_path,
        's = "x"\nn = 3\nb = true\nd = 2025-08-13\nm = 2025-12-01T00:00:00Z\nl = ["a"]\n[t]\nk = "v"\n[[a]]\nx = 1\n',
    )
    assert read.string("s") == "x"
    assert read.integer("n") == 3
    assert read.boolean("b") is True
    assert read.date("d") == dt.date(2025, 8, 13)
    assert read.moment("m").year == 2025
    assert read.strings("l") == ("a",)
    assert read.string_map("t") == {"k": "v"}
    assert read.tables("a")[0].integer("x") == 1
    assert read.optional_string("nothing") is None
    read.finish()


@pytest.mark.parametrize(
    ("text", "get", "place", "reason"),
    [
        ("s = 3", lambda t: t.string("s"), "s", "must be a string, not an integer"),
        ("n = true", lambda t: t.integer("n"), "n", "must be an integer, not a boolean"),
        ("l = ['a', 3]", lambda t: t.strings("l"), "l[1]", "must be a string, not an integer"),
        ("l = 'a'", lambda t: t.strings("l"), "l", "must be an array of strings"),
        ("", lambda t: t.string("s"), "s", "is missing"),
        ("[t]\n", lambda t: t.table("t").string("x"), "t.x", "is missing"),
        ("[[a]]\n[[a]]\ny = 1", lambda t: t.tables("a")[1].string("y"), "a[1].y", "must be a string"),
        ("m = 2025-12-01T00:00:00", lambda t: t.moment("m"), "m", "needs an offset"),
        ("d = 2025-12-01T00:00:00Z", lambda t: t.date("d"), "d", "must be a date"),
    ],
)
def test_errors_name_file_place_and_reason(tmp_path: Path, text: str, get, place: str, reason: str):
    with pytest.raises(TomlError) as caught:
        get(table(tmp_path, text))
    assert caught.value.place == place
    assert reason in caught.value.reason
    assert str(tmp_path / "x.toml") in caught.value.message


def test_unknown_keys_are_errors_with_the_nearest_known_one(tmp_path: Path):
    read = table(tmp_path, 'titel = "x"\n')
    read.optional_string("title")
    with pytest.raises(TomlError, match="titel: unknown key") as caught:
        read.finish()
    assert caught.value.hint == "did you mean `title`?"


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(TomlError, match="cannot be read"):
        load(tmp_path / "absent.toml")
    with pytest.raises(TomlError, match="line 1"):
        table(tmp_path, "a = = 1")
    (tmp_path / "latin.toml").write_bytes(b's = "\xe9"')
    with pytest.raises(TomlError, match="UTF-8"):
        load(tmp_path / "latin.toml")
