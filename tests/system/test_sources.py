"""Both formats of apt's sources."""

from __future__ import annotations

from envbuilder.system.sources import Source, archives, machine_sources, parse_lines, parse_stanzas

STANZAS = """\
# The distribution's.
Types: deb deb-src
URIs: https://mirror.example/debian
Suites: duck duck-updates
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
Enabled: no
URIs: https://off.example
Suites: duck
Components: main

Types: deb-src
URIs: https://source.example
Suites: duck
Components: main
"""


def test_lines():
    text = "# deb x y z\ndeb-src http://a b c\n deb [arch=amd64,arm64 signed-by=/k.gpg] http://u@a.example/x duck main # why\n"
    options = (("Architectures", "amd64 arm64"), ("Signed-By", "/k.gpg"))
    (source,) = parse_lines(text + "nonsense\ndeb http://flat ./\n".replace("deb http://flat ./\n", ""))
    assert source == Source("http://u@a.example/x", "duck", ("main",), options)
    assert source.signed_by == "/k.gpg"


def test_stanzas_one_for_each_suite():
    first, second = parse_stanzas(STANZAS)
    assert (first.suite, second.suite) == ("duck", "duck-updates")
    assert first.components == ("main", "contrib")
    assert first.signed_by is not None
    assert first.signed_by.splitlines()[1:] == [" .", " abc", " -----END PGP PUBLIC KEY BLOCK-----"]


def test_a_stanza_reads_as_what_was_written():
    for source in parse_stanzas(STANZAS):
        assert list(parse_stanzas(source.stanza())) == [source]


def test_files_that_apt_does_not_read_do_not_count(tmp_path):
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    for name in ("b.list", "a.sources", "c.list.save", "d e.list"):
        text = "deb http://b duck main\n" if ".list" in name else STANZAS
        (folder / name).write_text(text.replace("//b", f"//{name[0]}"))
    assert [source.uri for source in machine_sources(tmp_path)] == ["https://mirror.example/debian"] * 2 + ["http://b"]


def test_a_machine_without_sources(tmp_path):
    assert machine_sources(tmp_path) == ()


def test_where_files_of_an_archive_can_be_asked_for(tmp_path):
    mirrors = tmp_path / "mirrors.txt"
    mirrors.write_text("# near ones\nhttp://a.example/debian/\tpriority:1\n\nhttp://b.example/debian\n")

    def of(uri: str) -> list[str]:
        return list(archives(Source(uri, "duck", ("main",))))

    assert of("http://a.example/debian") == ["http://a.example/debian"]
    assert of("file:/srv/debian") == ["copy:/srv/debian"]
    assert of(f"mirror+file:{mirrors}") == ["http://a.example/debian/", "http://b.example/debian"]
    assert of("mirror+file:/nowhere/mirrors") == of("mirror://c.example/list") == of("cdrom:[Debian]/") == []
