"""What the packages' maintainer scripts would have done and what matters in an image, as functions of the tree.

Each takes the merged tree and yields further entries. Nothing is run. Left out on purpose: users and groups that
scripts add (``_ssh``), PAM's common-* files, icon and font caches, alternatives' manual pages.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

from envbuilder.oci.content import Bytes
from envbuilder.oci.layer import Directory, Entry, File, Symlink
from envbuilder.system.ldcache import Library, write_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from envbuilder.system.rootfs import Tree

#: (link, name, where it leads): made when the last is there and the first is not, the first fitting row of a name
#: winning. The rows of one name are ordered by the priority that the packages give.
ALTERNATIVES = (
    ("usr/bin/awk", "awk", "usr/bin/gawk"),
    ("usr/bin/awk", "awk", "usr/bin/mawk"),
    ("usr/bin/nawk", "nawk", "usr/bin/gawk"),
    ("usr/bin/nawk", "nawk", "usr/bin/mawk"),
    ("usr/bin/cc", "cc", "usr/bin/gcc"),
    ("usr/bin/c++", "c++", "usr/bin/g++"),
    ("usr/bin/c89", "c89", "usr/bin/c89-gcc"),
    ("usr/bin/c99", "c99", "usr/bin/c99-gcc"),
    ("usr/bin/f77", "f77", "usr/bin/gfortran"),
    ("usr/bin/which", "which", "usr/bin/which.debianutils"),
    ("usr/bin/pager", "pager", "usr/bin/less"),
    ("usr/bin/pager", "pager", "usr/bin/more"),
    ("usr/bin/editor", "editor", "usr/bin/vim.basic"),
    ("usr/bin/editor", "editor", "usr/bin/vim.tiny"),
    ("usr/bin/editor", "editor", "usr/bin/nano"),
    ("usr/bin/vim", "vim", "usr/bin/vim.basic"),
    ("usr/bin/vi", "vi", "usr/bin/vim.basic"),
    ("usr/bin/vi", "vi", "usr/bin/vim.tiny"),
    ("usr/bin/w", "w", "usr/bin/w.procps"),
    ("usr/bin/rsh", "rsh", "usr/bin/ssh"),
    ("usr/bin/rcp", "rcp", "usr/bin/scp"),
    ("usr/bin/rlogin", "rlogin", "usr/bin/slogin"),
    ("usr/bin/nc", "nc", "usr/bin/nc.openbsd"),
    ("usr/bin/fakeroot", "fakeroot", "usr/bin/fakeroot-sysv"),
    ("usr/bin/lzma", "lzma", "usr/bin/xz"),
    ("usr/bin/unlzma", "unlzma", "usr/bin/unxz"),
    ("usr/sbin/iptables", "iptables", "usr/sbin/iptables-nft"),
)
#: Copied to their place when they are not there.
COPIES = (
    ("usr/share/base-passwd/passwd.master", "etc/passwd"),
    ("usr/share/base-passwd/group.master", "etc/group"),
    ("usr/share/base-files/dot.bashrc", "root/.bashrc"),
    ("usr/share/base-files/dot.profile", "root/.profile"),
    ("usr/share/base-files/profile", "etc/profile"),
    ("usr/share/base-files/nsswitch.conf", "etc/nsswitch.conf"),
    ("usr/share/libc-bin/nsswitch.conf", "etc/nsswitch.conf"),
)
#: Directories that every image has: what is mounted over at run time, and homes.
DIRECTORIES = (
    Directory("dev"),
    Directory("home"),
    Directory("media"),
    Directory("mnt"),
    Directory("opt"),
    Directory("proc"),
    Directory("root", 0o700),
    Directory("run"),
    Directory("run/lock", 0o1777),
    Directory("srv"),
    Directory("sys"),
    Directory("tmp", 0o1777),
    Directory("usr/local/bin"),
    Directory("usr/local/lib"),
    Directory("var/tmp", 0o1777),
)
SHELLS = ("bin/sh", "usr/bin/sh", "bin/bash", "usr/bin/bash", "bin/rbash", "usr/bin/rbash", "bin/dash", "usr/bin/dash")
_BUNDLE = "etc/ssl/certs/ca-certificates.crt"
_LIBRARY = re.compile(r"(lib|ld-).*\.so(\.|$)")


def all_effects(tree: Tree, architecture: str) -> Tree:
    """Return the tree with everything that scripts would have added."""
    for effect in (folders, copies, shells, time_zone, certificates, alternatives):
        tree = tree.with_entries(effect(tree))
    return tree.with_entries(linker_cache(tree, architecture))


def folders(tree: Tree) -> Iterator[Entry]:
    """Yield the directories of every system, the links in /var that programs rely on, and what engines mount over."""
    del tree
    yield from DIRECTORIES
    yield File("etc/hosts", Bytes(b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"))
    yield File("etc/resolv.conf", Bytes(b""))
    yield Symlink("var/run", "/run")
    yield Symlink("var/lock", "/run/lock")


def copies(tree: Tree) -> Iterator[Entry]:
    """Yield configuration files whose masters lie in /usr/share: accounts, name service, root's shell."""
    for master, path in COPIES:
        if (data := tree.read(master)) is not None:
            yield File(path, Bytes(data))


def shells(tree: Tree) -> Iterator[Entry]:
    """Yield /etc/shells with the shells that are there."""
    there = [path for path in SHELLS if f"usr/{path.removeprefix('usr/')}" in tree]
    text = "# /etc/shells: valid login shells\n" + "".join(f"/{path}\n" for path in there)
    yield File("etc/shells", Bytes(text.encode()))


def time_zone(tree: Tree) -> Iterator[Entry]:
    """Yield the time zone, UTC."""
    if "usr/share/zoneinfo/Etc/UTC" in tree:
        yield Symlink("etc/localtime", "/usr/share/zoneinfo/Etc/UTC")
        yield File("etc/timezone", Bytes(b"Etc/UTC\n"))


def certificates(tree: Tree) -> Iterator[Entry]:
    """Yield the bundle of authorities, and what leads OpenSSL builds to it.

    git and curl read the bundle. OpenSSL reads ``cert.pem`` in the folder it was built with: /usr/lib/ssl for
    Debian's, /etc/ssl for uv's standalone Python's. With it no folder of links named by hashes is needed.
    """
    root = "usr/share/ca-certificates/"
    names = sorted(path for path in tree.entries if path.startswith(root) and path.endswith(".crt"))
    if not names:
        return
    texts = [(tree.read(path) or b"").rstrip(b"\n") + b"\n" for path in names]
    yield File(_BUNDLE, Bytes(b"".join(texts)))
    listing = "".join(f"{path.removeprefix(root)}\n" for path in names)
    yield File("etc/ca-certificates.conf", Bytes(listing.encode()))
    yield Symlink("etc/ssl/cert.pem", f"/{_BUNDLE}")
    yield Symlink("usr/lib/ssl/cert.pem", f"/{_BUNDLE}")
    yield Symlink("usr/lib/ssl/certs", "/etc/ssl/certs")


def alternatives(tree: Tree) -> Iterator[Entry]:
    """Yield the links of ``ALTERNATIVES``, by way of /etc/alternatives as update-alternatives makes them."""
    for link, name, target in ALTERNATIVES:
        if target in tree and link not in tree:
            yield Symlink(link, f"/etc/alternatives/{name}")
            yield Symlink(f"etc/alternatives/{name}", f"/{target}")


def linker_cache(tree: Tree, architecture: str) -> Iterator[Entry]:
    """Yield /etc/ld.so.cache for the folders that /etc/ld.so.conf names, and the loader's own."""
    found = [library for folder in _library_folders(tree) for library in _libraries(tree, folder)]
    yield File("etc/ld.so.cache", Bytes(write_cache(found, architecture)))


def _library_folders(tree: Tree) -> list[str]:
    configured = [(tree.read("etc/ld.so.conf") or b"").decode()]
    configured += [(tree.read(p) or b"").decode() for p in tree.under("etc/ld.so.conf.d") if p.endswith(".conf")]
    lines = [line.partition("#")[0].strip() for text in configured for line in text.splitlines()]
    folders = [line for line in lines if line.startswith("/")]
    # Merged /usr: /lib/... and /usr/lib/... are one folder; it keeps the name under which it comes first.
    unique: dict[str, str] = {}
    for folder in (*folders, "/lib", "/usr/lib", "/lib64", "/usr/lib64"):
        unique.setdefault("/usr/" + folder.strip("/").removeprefix("usr/"), folder.rstrip("/"))
    return list(unique.values())


def _libraries(tree: Tree, folder: str) -> Iterator[Library]:
    """Yield a folder's libraries under the names they are asked for.

    ldconfig reads the SONAME in each file. Debian's packages hold a link of that name beside each library whose file
    is named otherwise (Debian Policy 8.1), so the names of links, and of files that no such link leads to, serve as
    well. A link without a version (``libm.so``) is for compilers, and says nothing about the file.
    """
    real = "usr/" + folder.strip("/").removeprefix("usr/")
    paths = [p for p in tree.under(real) if _LIBRARY.match(posixpath.basename(p))]
    links = {p: posixpath.basename(e.target) for p in paths if isinstance(e := tree.entries[p], Symlink)}
    versioned = {target for path, target in links.items() if not path.endswith(".so")}
    for path in paths:
        name = posixpath.basename(path)
        if path in links or (name not in versioned and _is_elf(tree, path)):
            yield Library(name, f"{folder}/{name}")


def _is_elf(tree: Tree, path: str) -> bool:
    """Return whether a file is a library indeed: some, such as libc.so, are scripts for the linker."""
    entry = tree.entries[path]
    return isinstance(entry, File) and next(iter(entry.content.chunks()), b"").startswith(b"\x7fELF")
