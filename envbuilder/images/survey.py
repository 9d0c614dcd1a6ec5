"""What a layer holds of the things that an image on top must know: glibc, the distribution, interpreters, certificates.

A layer is read through once, without being unpacked, and its diff id is verified on the way. What was found is
remembered. ``overlay`` puts the surveys of an image's layers together as an engine would put the layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envbuilder import parallel, report
from envbuilder.oci.untar import DIRECTORY, FILE, HARDLINK, SYMLINK
from envbuilder.store.unpack import OPAQUE, WHITEOUT, UnpackError, open_layer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from envbuilder.oci.digest import Digest
    from envbuilder.oci.model import Descriptor
    from envbuilder.oci.untar import Member, TarStream
    from envbuilder.store.store import Store

#: What the store remembers surveys as; changes with what is looked for.
_KIND = "survey-1"
#: Folders and links are recorded down to this depth: what lies where, and which of the usual folders are links.
DEPTH = 3
_SETS = ("folders", "implied", "removed", "opaque")
_MOST_BYTES = 64 << 20  # of a file that is looked into
_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
_GLIBC = re.compile(rb"GNU C Library \([^\n]{0,200}?\) (?:stable|development) release version (2\.\d+)")
_OS_RELEASE = re.compile(r"""^([A-Z_]+)=["']?(.*?)["']?$""", re.MULTILINE)
_FIELDS = ("Package", "Version", "Architecture", "Source")


@dataclass(frozen=True)
class Survey:
    """What one layer does: ``removed`` and ``opaque`` are its whiteouts, ``found`` maps files to what was read of them.

    Paths are in plain form, without a slash in front. ``folders`` includes the ``implied`` ones, that no member states.
    """

    folders: frozenset[str]
    implied: frozenset[str]
    links: Mapping[str, str]
    found: Mapping[str, str]
    removed: frozenset[str]
    opaque: frozenset[str]

    def to_json(self) -> dict[str, Any]:
        """Return what is remembered."""
        sets = {name: sorted(getattr(self, name)) for name in _SETS}
        return {**sets, "links": dict(self.links), "found": dict(self.found)}

    @classmethod
    def from_json(cls, document: Any) -> Survey:
        """Read what was remembered; raise KeyError, TypeError or ValueError for anything else."""
        sets = {name: frozenset(document[name]) for name in _SETS}
        return cls(links=dict(document["links"]), found=dict(document["found"]), **sets)


@dataclass(frozen=True)
class Tree:
    """What an image's layers hold together; see ``Survey``."""

    folders: frozenset[str]
    links: Mapping[str, str]
    found: Mapping[str, str]

    def real(self, path: str) -> str | None:
        """Return where a path leads, its links followed inside the image; None when nothing is known to be there."""
        pending, done, steps = _parts(path), list[str](), 0
        while pending:
            part = pending.pop(0)
            if part == "..":
                done = done[:-1]
                continue
            target = self.links.get("/".join([*done, part]))
            if target is None:
                done.append(part)
                continue
            steps += 1
            if steps > 40:  # as the kernel
                return None
            done = [] if target.startswith("/") else done
            pending = [*_parts(target), *pending]
        place = "/".join(done)
        return place if place in self.found or place in self.folders else None

    @property
    def release(self) -> Mapping[str, str]:
        """What ``os-release`` says of the distribution; empty when there is none."""
        text = self.read("etc/os-release") or self.read("usr/lib/os-release") or ""
        return dict(_OS_RELEASE.findall(text))

    def has(self, path: str) -> bool:
        """Return whether something is known to be there, if only a link that leads to what nobody looked for."""
        folder, _, name = "/".join(_parts(path)).rpartition("/")
        place = "/".join(filter(None, (self.real(folder) if folder else "", name)))
        return place in self.links or place in self.found or place in self.folders

    def read(self, path: str) -> str | None:
        """Return what was read of a file, links followed; None when it is not there."""
        place = self.real(path)
        return self.found.get(place) if place is not None else None


def survey(store: Store, layers: Sequence[tuple[Descriptor, Digest]]) -> list[Survey]:
    """Return the survey of each layer, a descriptor and the diff id that it must have; several are read at once.

    Raises:
        UnpackError: a layer is damaged, or not what its diff id says.
        NotInStoreError: a layer is not in the store.

    """
    # Both enter the key: that these bytes have this diff id is a part of what is remembered.
    wanted = {f"{layer.digest} {diff_id}": (layer, diff_id) for layer, diff_id in layers}
    known = {key: found for key in wanted if (found := _recall(store, key)) is not None}
    missing = sorted((key for key in wanted if key not in known), key=lambda key: (-wanted[key][0].size, key))
    if missing:
        with report.task("Looking into layers", sum(wanted[key][0].size for key in missing)) as task:

            def look(key: str) -> Survey:
                found = _survey(store, *wanted[key], task.advance)
                store.remember(_KIND, key, found.to_json())
                return found

            known |= zip(missing, parallel.run_all(look, missing, workers=parallel.cores()), strict=True)
    return [known[f"{layer.digest} {diff_id}"] for layer, diff_id in layers]


def overlay(surveys: Iterable[Survey]) -> Tree:
    """Return what the layers hold together, given from the base up."""
    folders: set[str] = set()
    links: dict[str, str] = {}
    found: dict[str, str] = {}
    for layer in surveys:
        for gone in layer.removed | (layer.links.keys() & folders):  # a link takes the place of a folder
            _drop(gone, folders, links, found, itself=True)
        for gone in layer.opaque:
            _drop(gone, folders, links, found, itself=False)
        for path in layer.found:
            links.pop(path, None)
        for path in layer.links:
            found.pop(path, None)
        # A folder that is stated takes the place of a link; files below one that is not go where the link leads.
        stated = layer.folders - layer.implied
        links = {path: target for path, target in links.items() if path not in stated}
        folders |= layer.folders
        links |= layer.links
        found |= layer.found
    return Tree(frozenset(folders), links, found)


def _recall(store: Store, key: str) -> Survey | None:
    try:
        return Survey.from_json(store.recall(_KIND, key))
    except (KeyError, TypeError, ValueError):
        return None


def _drop(path: str, folders: set[str], links: dict[str, str], found: dict[str, str], *, itself: bool) -> None:
    prefix = f"{path}/" if path else ""
    for known in (folders, links, found):
        for name in [n for n in known if n.startswith(prefix) or (itself and n == path)]:
            known.discard(name) if isinstance(known, set) else known.pop(name)


def _survey(store: Store, layer: Descriptor, diff_id: Digest, progress: Callable[[int], None]) -> Survey:
    report.detail(f"looking into layer {layer.digest}")
    seen = _Seen()
    with open_layer(store, layer, progress) as stream:
        for member in stream.members():
            parallel.checkpoint()
            seen.add(member, stream)
        if (actual := stream.finish()) != diff_id:
            raise UnpackError(f"layer {layer.digest} unpacks to {actual}, not to {diff_id}")
    return seen.survey()


class _Seen:
    """What was seen of a layer so far. A later member replaces an earlier one."""

    def __init__(self) -> None:
        self._folders: set[str] = set()
        self._stated: set[str] = set()
        self._links: dict[str, str] = {}
        self._found: dict[str, str] = {}
        self._removed: set[str] = set()
        self._opaque: set[str] = set()

    def survey(self) -> Survey:
        """Return it as a survey."""
        return Survey(
            folders=frozenset(self._folders),
            implied=frozenset(self._folders - self._stated),
            links=self._links,
            found=self._found,
            removed=frozenset(self._removed),
            opaque=frozenset(self._opaque),
        )

    def add(self, member: Member, stream: TarStream) -> None:
        """Take one member; what is looked for is read from the stream."""
        parts = _parts(member.name)
        if not parts or ".." in parts:
            return  # the root itself; what leads outside is refused by whoever unpacks
        path, name = "/".join(parts), parts[-1]
        above = parts if member.kind == DIRECTORY else parts[:-1]
        self._folders |= {"/".join(above[:count]) for count in range(1, min(len(above), DEPTH) + 1)}
        if member.kind == DIRECTORY and len(parts) <= DEPTH:
            self._stated.add(path)
            self._links.pop(path, None)
        if name.startswith(WHITEOUT):
            self._whiteout(parts[:-1], name)
        elif member.kind == SYMLINK:
            self._found.pop(path, None)
            if len(parts) <= DEPTH or _reader(path) is not None:
                self._links[path] = member.link
        elif member.kind in {FILE, HARDLINK} and (read := _reader(path)) is not None:
            self._links.pop(path, None)
            # A hard link is another name of a file of this layer: what was read there counts.
            linked = self._found.get("/".join(_parts(member.link)), "")
            self._found[path] = linked if member.kind == HARDLINK else read(member, stream)

    def _whiteout(self, folder: Sequence[str], name: str) -> None:
        if name == OPAQUE:
            self._opaque.add("/".join(folder))
        elif not name.startswith(WHITEOUT * 2):
            self._removed.add("/".join([*folder, name.removeprefix(WHITEOUT)]))


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in {"", "."}]


# -- what is looked for -------------------------------------------------------------------------------------------


def _is_there(_member: Member, _stream: TarStream) -> str:
    return ""


def _text(member: Member, stream: TarStream) -> str:
    return _bytes(member, stream).decode("utf-8", "replace")


def _libc(member: Member, stream: TarStream) -> str:
    """Return machine and version, ``x86_64 2.36``, from the text that libc prints when it is run; "" when it is no ELF."""
    data = _bytes(member, stream)
    if data[:4] != b"\x7fELF":
        return ""
    machine = int.from_bytes(data[18:20], "little")
    version = _GLIBC.search(data)
    return f"{_ELF_MACHINES.get(machine, machine)} {version[1].decode() if version else ''}"


def _packages(member: Member, stream: TarStream) -> str:
    """Return a line for each installed package of a dpkg status file: name, version, architecture, source."""
    lines = []
    for paragraph in _text(member, stream).split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if re.match(r"[A-Za-z-]+: ", line))
        if fields.get("Status", "install ok installed").endswith(" installed") and "Package" in fields:
            lines.append("\t".join(fields.get(name, "") for name in _FIELDS))
    return "\n".join(lines)


def _bytes(member: Member, stream: TarStream) -> bytes:
    return b"".join(map(bytes, stream.content())) if member.size <= _MOST_BYTES else b""


_Reader = Callable[["Member", "TarStream"], str]
_BIN = r"(?:.+/)?s?bin/"
_LIB = r"(?:.+/)?lib(?:32|64|x32)?/(?:[^/]+-linux-[^/]+/)?"
#: What is looked for by path, and how it is read.
_LOOKED_FOR: tuple[tuple[re.Pattern[str], _Reader], ...] = (
    (re.compile(_LIB + r"libc(?:\.so\.6|-2\.\d+\.so)"), _libc),
    (re.compile(_LIB + r"(?:ld-musl-[^/]+\.so\.1|lib(?:stdc\+\+|gcc_s|z)\.so\.\d+(?:\.[\d.]+)?)"), _is_there),
    (re.compile(r"(?:etc|usr/lib)/os-release"), _text),
    (re.compile(_BIN + r"(?:python\d(?:\.\d+)?|sh|cc|gcc)"), _is_there),
    (re.compile(r"(?:.+/)?lib(?:64)?/python\d\.\d+/os\.py"), _is_there),
    (re.compile(r"(?:.+/)?include/python\d\.\d+/Python\.h"), _is_there),
    (re.compile(r"(?:.+/)?(?:site|dist)-packages/[^/]+\.dist-info/METADATA"), _is_there),
    (re.compile(r"etc/(?:.+/)?(?:ca-certificates\.crt|(?:tls-)?ca-bundle\.(?:crt|pem)|cert\.pem)"), _is_there),
    (re.compile(r"usr/share/envbuilder/[^/]+\.lock\.toml"), _text),
    (re.compile(r"var/lib/dpkg/status(?:\.d/[^/]+)?"), _packages),
)
_NAMES = re.compile(
    r"libc[.-]|ld-musl-|libstdc\+\+|libgcc_s|libz\.|os-release$|python\d|sh$|cc$|gcc$|os\.py$|Python\.h$|METADATA$|.*\.lock\.toml$|"
    r"ca-|tls-ca-|cert\.pem$|status$"
)


def _reader(path: str) -> _Reader | None:
    """Return how a file is read, None when it is not looked for. Most are none, so the last part is asked first."""
    if not _NAMES.match(path.rpartition("/")[2]) and "/status.d/" not in path:
        return None
    return next((read for pattern, read in _LOOKED_FOR if pattern.fullmatch(path)), None)
