"""Bytecode that was compiled before: a bucket whose one package changed is written again, but not compiled again."""

from __future__ import annotations

import hashlib
import json
import struct
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zstandard

from envbuilder.oci.digest import Digest
from envbuilder.oci.model import canonical_json
from envbuilder.store.store import BlobMismatchError, NotInStoreError
from envbuilder.wheels.bytecode import REVISION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from envbuilder.store.store import Store
    from envbuilder.wheels.bytecode import Compiler, SourceCompiler

_KIND = "bytecode"


@dataclass(frozen=True)
class BytecodeCache:
    """Remembers the bytecode of whole wheels in a store.

    When one package of a bucket changes, the bucket's other wheels are written again, but not compiled again.
    ``scope`` says for which interpreter and prefix.
    """

    store: Store
    compiler: Compiler
    scope: str

    @contextmanager
    def of(self, wheel: Digest) -> Iterator[SourceCompiler]:
        """Give a compiler for the sources of one wheel; what it compiles is remembered when the block ends well."""
        key = f"{REVISION} {self.scope} {wheel}"
        known = self._load(key)
        if known is not None:
            yield _Known(known)
            return
        recorder = _Recorder(self.compiler)
        yield recorder
        sha256 = hashlib.sha256()
        with self.store.writer() as blob:
            for piece in _pack({path: future.result() for path, future in recorder.submitted.items()}):
                blob.file.write(piece)
                sha256.update(piece)
            digest = Digest(sha256.hexdigest())
            blob.commit(digest)
        self.store.remember(_KIND, key, {"digest": str(digest)})

    def _load(self, key: str) -> Mapping[str, bytes] | None:
        match self.store.recall(_KIND, key):
            case {"digest": str(text)}:
                with suppress(NotInStoreError, BlobMismatchError, ValueError):
                    return _unpack(self.store.read(Digest.parse(text)))
            case _:
                pass
        return None


class _Known:
    def __init__(self, compiled: Mapping[str, bytes]) -> None:
        self._compiled = compiled

    def submit(self, path: str, source: bytes) -> Future[bytes]:  # noqa: ARG002 (the wheel's digest vouches for it)
        future: Future[bytes] = Future()
        future.set_result(self._compiled[path])
        return future


class _Recorder:
    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self.submitted: dict[str, Future[bytes]] = {}

    def submit(self, path: str, source: bytes) -> Future[bytes]:
        future = self.submitted[path] = self._compiler.submit(path, source)
        return future


def _pack(compiled: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield many .pyc as one blob: the sizes as JSON behind their length, then the bytes, compressed."""
    sizes = canonical_json([[path, len(data)] for path, data in compiled.items()])
    pieces = (struct.pack(">L", len(sizes)), sizes, *compiled.values())
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=sum(map(len, pieces)))
    yield from map(compressor.compress, pieces)
    yield compressor.flush()


def _unpack(blob: bytes) -> Mapping[str, bytes]:
    plain = zstandard.ZstdDecompressor().decompress(blob)
    (length,) = struct.unpack_from(">L", plain)
    position, compiled = 4 + length, {}
    for path, size in json.loads(plain[4:position]):
        compiled[path] = plain[position : position + size]
        position += size
    return compiled
