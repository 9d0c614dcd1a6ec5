"""Merging packages into one tree, and what their scripts would have added."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import pytest

from envbuilder.oci.content import Bytes
from envbuilder.oci.layer import Directory, Entry, File, Hardlink, Symlink
from envbuilder.system.apt import architecture
from envbuilder.system.debfile import Control
from envbuilder.system.dpkgdb import database
from envbuilder.system.effects import all_effects
from envbuilder.system.ldcache import Library, write_cache
from envbuilder.system.rootfs import RootError, Tree, keep, merge
from envbuilder.system.spool import Part

PAM = b"\x7fELF and so on"


def part(name: str, *entries: Entry, **files: str) -> Part:
    fields = {"Package": name, "Version": "1", "Architecture": architecture(), "Maintainer": "A <a@b>"}
    fields["Description"] = f"{name}\n for tests"
    return Part(name, Control(fields, {key: text.encode() for key, text in files.items()}), entries)


def file(path: str, text: str | bytes = "", mode: int = 0o644) -> File:
    return File(path, Bytes(text.encode() if isinstance(text, str) else text), mode)


def test_paths_become_those_of_a_merged_usr():
    tree = merge([
        part("a", Directory("bin"), file("bin/sh"), Hardlink("bin/hard", "bin/sh"), file("usr/bin/env")),
        part("b", Directory("lib64"), Symlink("lib64/ld.so", "/lib/x/ld.so"), file("lib/x/ld.so")),
    ])  # fmt: skip
    assert tree.entries["bin"] == Symlink("bin", "usr/bin")
    assert tree.entries["usr/bin/hard"] == Hardlink("usr/bin/hard", "usr/bin/sh")
    assert {"usr/bin/sh", "usr/bin/env", "usr/lib64/ld.so", "usr/lib/x/ld.so", "lib64"} <= set(tree.entries)
    assert "bin/sh" not in tree
    assert "lib32" not in tree


def test_links_of_packages_to_folders_are_followed_too():
    tree = merge(
        [part("a", Symlink("usr/share/old", "new")), part("b", file("usr/share/old/x"), Directory("usr/share/new"))]
    )
    assert "usr/share/new/x" in tree
    assert tree.entries["usr/share/old"] == Symlink("usr/share/old", "new")


def test_a_package_that_ships_the_links_itself():
    assert "usr/bin/sh" in merge([part("base-files", Symlink("bin", "usr/bin")), part("sh", file("bin/sh"))])


def test_the_unusual_mode_of_a_directory_counts():
    usual, unusual = Directory("tmp"), Directory("tmp", 0o1777)
    for order in ([usual, unusual], [unusual, usual]):
        tree = merge([part(name, entry) for name, entry in zip("ab", order, strict=True)])
        assert tree.entries["tmp"] == unusual


def test_equal_files_may_come_twice_and_others_may_not():
    assert "x" in merge([part("a", file("x", "1")), part("b", file("x", "1"))])
    for other in (file("x", "2"), file("x", "1", 0o600), Directory("x"), Symlink("x", "y")):
        with pytest.raises(RootError, match="packages a and b both hold `/x`"):
            merge([part("a", file("x", "1")), part("b", other)])


def test_the_merged_usr_is_nobodys():
    with pytest.raises(RootError, match="the merged /usr"):
        merge([part("a", file("bin", "no folder"), file("usr/bin/x"))])


@pytest.mark.parametrize("links", [{"a": "b", "b": "a"}, {"a": "a/b"}, {"a": "a"}])
def test_links_in_a_circle(links):
    with pytest.raises(RootError, match="circle"):
        merge([part("p", *(Symlink(k, v) for k, v in links.items()), file("a/x"))])


def test_licences_are_kept_and_manuals_are_not():
    assert keep("usr/share/doc/git/copyright")
    assert keep("usr/share/man-db/x")
    assert keep("etc/x")
    assert not keep("usr/share/doc/git/README")
    assert not keep("usr/share/man/man1/git.1.gz")
    assert not keep("usr/share/locale/de")


def test_hard_links_come_last():
    tree = merge([part("a", file("usr/z"), Hardlink("usr/a", "usr/z"))])
    assert [entry.path for entry in tree.ordered()][-1] == "usr/a"


# -- effects ------------------------------------------------------------------------------------------------------


def effects(*entries: Entry) -> Tree:
    return all_effects(merge([part("p", *entries)]), architecture())


def test_folders_that_every_image_has():
    tree = effects(Directory("srv", 0o700))
    assert tree.entries["tmp"] == Directory("tmp", 0o1777)
    assert tree.entries["srv"] == Directory("srv", 0o700)  # the package's own
    assert tree.entries["var/run"] == Symlink("var/run", "/run")


def test_accounts_shells_and_time_zone():
    master = file("usr/share/base-passwd/passwd.master", "root:*:0:0:root:/root:/bin/bash\n")
    tree = effects(master, file("bin/bash"), file("usr/share/zoneinfo/Etc/UTC"))
    assert tree.read("etc/passwd") == b"root:*:0:0:root:/root:/bin/bash\n"
    assert tree.read("etc/shells") == b"# /etc/shells: valid login shells\n/bin/bash\n/usr/bin/bash\n"
    assert tree.entries["etc/localtime"] == Symlink("etc/localtime", "/usr/share/zoneinfo/Etc/UTC")


def test_certificates_are_bundled_in_order():
    root = "usr/share/ca-certificates/mozilla"
    tree = effects(file(f"{root}/b.crt", "BBB"), file(f"{root}/a.crt", "AAA\n"))
    assert tree.read("etc/ssl/certs/ca-certificates.crt") == b"AAA\nBBB\n"
    assert tree.read("etc/ca-certificates.conf") == b"mozilla/a.crt\nmozilla/b.crt\n"
    assert "etc/ssl/certs/ca-certificates.crt" not in effects()


def test_alternatives_lead_to_what_is_there():
    tree = effects(file("usr/bin/mawk"), file("usr/bin/gcc"))
    assert tree.entries["usr/bin/awk"] == Symlink("usr/bin/awk", "/etc/alternatives/awk")
    assert tree.entries["etc/alternatives/cc"] == Symlink("etc/alternatives/cc", "/usr/bin/gcc")
    assert "usr/bin/c++" not in tree
    best = effects(file("usr/bin/mawk"), file("usr/bin/gawk"))
    assert best.entries["etc/alternatives/awk"] == Symlink("etc/alternatives/awk", "/usr/bin/gawk")


# -- the loader's cache -------------------------------------------------------------------------------------------


def ldconfig(data: bytes, folder) -> list[str]:
    program = shutil.which("ldconfig", path="/usr/sbin:/sbin:/usr/bin")
    if program is None:
        pytest.skip("needs ldconfig")
    (folder / "cache").write_bytes(data)
    done = subprocess.run([program, "-p", "-C", folder / "cache"], check=True, capture_output=True, text=True)
    return [line.strip() for line in done.stdout.splitlines()[1:]]


def test_ldconfig_reads_the_cache(tmp_path):
    names = [
        "libz.so.1",
        "libz.so.10",
        "libz.so.9",
        "liba.so",
        "ld-linux.so.2",
        "libz3.so.4",
        "lib10.so.1",
        "lib9.so.1",
    ]
    libraries = [Library(name, f"/lib/{name}") for name in names] + [Library("liba.so", "/usr/lib/liba.so")]
    lines = ldconfig(write_cache(libraries, architecture()), tmp_path)
    assert [line.split()[0] for line in lines] == [
        "lib10.so.1", "lib9.so.1", "libz3.so.4", "libz.so.10", "libz.so.9", "libz.so.1", "liba.so", "ld-linux.so.2",
    ]  # fmt: skip
    assert lines[6].endswith("=> /lib/liba.so")


def test_libraries_are_known_by_the_names_programs_ask_for(tmp_path):
    lib = "lib/x86"
    tree = effects(
        file("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n"),
        file("etc/ld.so.conf.d/x86.conf", "# where\n/lib/x86\n/usr/lib/x86\n"),
        file(f"{lib}/libz.so.1.2", PAM), Symlink(f"{lib}/libz.so.1", "libz.so.1.2"),
        file(f"{lib}/libc.so.6", PAM), Symlink(f"{lib}/libc.so", "libc.so.6"), file(f"{lib}/libm.so", "/* GNU ld script */"),
        file("usr/lib/libother.so.3", PAM), file(f"{lib}/libx.a"),
    )  # fmt: skip
    lines = ldconfig(tree.read("etc/ld.so.cache") or b"", tmp_path)
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [
        ("libz.so.1", "/lib/x86/libz.so.1"),
        ("libother.so.3", "/lib/libother.so.3"),
        ("libc.so.6", "/lib/x86/libc.so.6"),
        ("libc.so", "/lib/x86/libc.so"),
    ]


# -- dpkg's database ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="needs dpkg")
def test_dpkg_reads_the_database(tmp_path):
    one = part(
        "one", Directory("etc"), file("etc/one.conf", "c"), file("bin/one"), conffiles="/etc/one.conf\n/etc/dropped\n",
        md5sums=f"{'0' * 32}  bin/one\n{'1' * 32}  usr/share/man/one\n", postinst="#!/bin/sh\n",
    )  # fmt: skip
    same = part("same", file("lib/same.so"))
    same = replace(same, control=Control({**same.control.fields, "Multi-Arch": "same"}, {}))
    entries = {entry.path: entry for entry in database([one, same])}
    for entry in entries.values():
        path = tmp_path / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, File):
            path.write_bytes(b"".join(entry.content.chunks()))
    admin = tmp_path / "var/lib/dpkg"

    def query(*words: str) -> str:
        argv = ["dpkg-query", f"--admindir={admin}", *words]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    assert query("-W", "-f", "${binary:Package} ${db:Status-Status} ${Version}\n").splitlines() == [
        "one installed 1", f"same:{architecture()} installed 1",
    ]  # fmt: skip
    assert query("-S", "/bin/one") == "one: /bin/one\n"
    assert query("-W", "-f", "${Conffiles}", "one").split() == ["/etc/one.conf", "4a8a08f09d37b73795649038408b5f33"]
    md5sums = entries["var/lib/dpkg/info/one.md5sums"]
    assert isinstance(md5sums, File)
    assert b"".join(md5sums.content.chunks()) == f"{'0' * 32}  bin/one\n".encode()
    script = entries["var/lib/dpkg/info/one.postinst"]
    assert isinstance(script, File)
    assert script.mode == 0o755
