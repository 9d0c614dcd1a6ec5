"""Unpack a layer into a folder, once, and verify it on the way.

What is verified by what. A blob enters the store under its digest, and one that is still arriving is unpacked into a
temporary folder until its digest is known to be right. So the bytes of a layer are those that the manifest names, and
the tree, which is named by the same digest, is a function of them alone. Each gzip member carries a CRC-32, which
finds what a disk has done to a blob since.

The diff id, the digest of the tar, would say the same a second time, at the price of hashing every byte on one core.
It is verified for layers that other tools made, because container engines verify it. It is not for layers whose
descriptor carries the digest of an eStargz table of contents, which ours do, as the snapshotters that read such layers
do not. A configuration that lies about the diff id of such a layer is therefore accepted here and refused by Docker;
it gains nothing by it, because here no tree is found by its diff id. The table of contents is not trusted either: see
``inflate``. All that is unpacked comes from the headers of the tar.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import zstandard
from isal import igzip, igzip_lib

from envbuilder import report
from envbuilder.atomic import atomic_folder, remove_tree
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import TOC_DIGEST
from envbuilder.oci.toc import FOOTER_SIZE, LANDMARK, LARGEST, NAME, TocError, places, read_table, table_start
from envbuilder.oci.untar import TarError, TarStream
from envbuilder.parallel import checkpoint
from envbuilder.store.arriving import Arriving
from envbuilder.store.inflate import cut, inflated
from envbuilder.store.store import NotInStoreError
from envbuilder.store.trees import is_whole, note_made, private_folder
from envbuilder.store.treewriter import IMPLIED, OPAQUE, WHITEOUT, TreeWriter, UnpackError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from envbuilder.oci.model import Descriptor
    from envbuilder.store.store import Store

__all__ = ["IMPLIED", "OPAQUE", "WHITEOUT", "UnpackError", "open_layer", "tree_of", "unpack_layer"]


def tree_of(store: Store, layer: Descriptor) -> Path:
    """Return where a layer's files are or would be unpacked."""
    return store.root / "trees" / layer.digest.hex


def unpack_layer(
    store: Store,
    layer: Descriptor,
    diff_id: Digest,
    progress: Callable[[int], None] = lambda _: None,
    arriving: Arriving | None = None,
) -> Path:
    """Return the folder that holds the layer's files, unpacked now or at an earlier call; whiteouts stay as files.

    ``progress`` is told the compressed bytes read. Threads and processes may ask for the same layer at once. The
    files are shared by every root made of them: never write to them. With ``arriving`` the layer is unpacked while it
    arrives, and the folder is there, whole, when the blob has been verified.

    Raises:
        UnpackError: the layer is damaged, is not what ``diff_id`` says (see above), or has a member that must not be
            unpacked.
        NotInStoreError: the layer's blob is not in the store.
        EnvbuilderError: what the writer of an arriving blob failed with.

    """
    store.protect(layer.digest)
    tree = tree_of(store, layer)
    if is_whole(store, tree):
        return tree
    private_folder(tree.parent)
    with store.lock(f"tree-{layer.digest.hex}"):
        if not is_whole(store, tree):
            remove_tree(tree)  # what a power cut left of it
            report.detail(f"unpacking layer {layer.digest}")
            with _blob(store, layer, arriving) as blob, atomic_folder(tree) as folder:
                _unpack(blob, layer, diff_id, folder, progress)
                folder.chmod(0o755)
                note_made(store, tree, folder)
    return tree


@contextmanager
def open_layer(
    store: Store, layer: Descriptor, progress: Callable[[int], None] = lambda _: None
) -> Iterator[TarStream]:
    """Open a layer, gzip, zstd or plain; turn every way in which it can be damaged into UnpackError."""
    with _blob(store, layer, None) as blob, _opened(blob, layer, (0,), progress, hashed=True) as stream:
        yield stream


def _unpack(blob: Arriving, layer: Descriptor, diff_id: Digest, folder: Path, progress: Callable[[int], None]) -> None:
    try:
        _write(blob, layer, diff_id, TreeWriter(folder), progress)
    except UnpackError:
        # While a blob arrives the fault may lie with what brings it: then its writer has more to say.
        blob.wait_verified()
        raise
    blob.wait_verified()


def _write(
    blob: Arriving, layer: Descriptor, diff_id: Digest, writer: TreeWriter, progress: Callable[[int], None]
) -> None:
    starts = _starts(blob, layer)
    # The table of contents is for those who pull lazily; here it would be a stray file in the root.
    unwanted = {NAME, LANDMARK} if TOC_DIGEST in layer.annotations else set()
    with _opened(blob, layer, starts or (0,), progress, hashed=not starts) as stream:
        for member in stream.members():
            checkpoint()
            if member.name not in unwanted:
                writer.add(member, stream)
        actual = stream.finish()
    if actual not in {None, diff_id}:
        raise UnpackError(f"layer {layer.digest} unpacks to {actual}, not to {diff_id}")


def _blob(store: Store, layer: Descriptor, arriving: Arriving | None) -> AbstractContextManager[Arriving]:
    if arriving is not None:
        return nullcontext(arriving)
    try:
        return Arriving.whole(store.blob(layer.digest))
    except FileNotFoundError as error:
        raise NotInStoreError(f"layer {layer.digest} is not in the store") from error


@contextmanager
def _opened(
    blob: Arriving, layer: Descriptor, starts: Sequence[int], progress: Callable[[int], None], *, hashed: bool
) -> Iterator[TarStream]:
    try:
        with inflated(blob, starts, progress) as data:
            yield TarStream(data, hashed=hashed)
    except TarError as error:
        raise UnpackError(f"layer {layer.digest}: {error.message}") from error
    except (igzip.BadGzipFile, igzip_lib.IsalError, EOFError) as error:  # type: ignore[misc]  # as in oci.content
        places = " in the parts that its table of contents says" if len(starts) > 1 else ""
        raise UnpackError(f"layer {layer.digest} is not valid gzip{places}: {error}") from error
    except zstandard.ZstdError as error:
        raise UnpackError(f"layer {layer.digest} is not valid zstd: {error}") from error


def _starts(blob: Arriving, layer: Descriptor) -> Sequence[int]:
    """Return where inflating can begin, as the layer's table of contents says; nothing when there is no such table.

    A table that cannot be had, or is not the one that the descriptor names, is no reason to refuse a layer whose diff
    id can be verified.
    """
    expected = layer.annotations.get(TOC_DIGEST)
    if expected is None:
        return ()
    try:
        table = _table(blob, expected)
        return cut(places(table), blob.size) if table is not None else ()
    except TocError as error:
        report.detail(f"layer {layer.digest} is unpacked front to back: {error.message}")
        return ()


def _table(blob: Arriving, expected: str) -> bytes | None:
    """Return the table with this digest, None when the end of the blob is not there yet; raise TocError without one."""
    foot = max(0, blob.size - FOOTER_SIZE)
    if not blob.ends_from(foot):
        return None
    start = table_start(blob.read(foot, blob.size))
    if start is None or not 0 <= start < foot or blob.size - start > LARGEST:
        raise TocError("there is no footer that says where a table of contents is")
    if not blob.ends_from(start):
        return None
    table = read_table(blob.read(start, blob.size))
    if str(Digest.of(table)) != expected:
        raise TocError(f"its table of contents is not {expected}")
    return table
