"""The record of a trusted build, ``lockfiles/<environment>.<suite>.layers.toml``: what a cache is held against.

It names every layer of an image by key and digest, the interpreter, and the wheels that were built from source. It is
written by ``build --record``, committed, and reviewed like a lock: who can write to a cache cannot write to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from envbuilder import tomlread
from envbuilder.atomic import atomic_file
from envbuilder.errors import InputError
from envbuilder.images.cacheentry import Entry
from envbuilder.oci.digest import Digest
from envbuilder.oci.model import Descriptor
from envbuilder.tomlwrite import inline, string

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from envbuilder.tomlread import Table

SCHEMA = 1


@dataclass(frozen=True)
class Recorded:
    """An entry with what it is called."""

    title: str
    entry: Entry


@dataclass(frozen=True)
class LayerRecord:
    """What a trusted build of an environment consisted of, in the order of the image."""

    environment: str
    rows: tuple[Recorded, ...]

    def entry(self, kind: str, key: str) -> Entry | None:
        """Return the entry of a key; None when the record does not know it."""
        return self._by_key.get((kind, key))

    @cached_property
    def _by_key(self) -> Mapping[tuple[str, str], Entry]:
        return {(row.entry.kind, row.entry.key): row.entry for row in self.rows}


def format_record(record: LayerRecord) -> str:
    """Return the record's text: fixed order, no clock, no host, trailing newline."""
    lines = [
        f"# The layers of `{record.environment}` as a trusted machine built them. Written by",
        f"# `envbuilder build {record.environment} --record`; do not edit. See docs/CACHE.md.",
        f"schema = {SCHEMA}",
        f"environment = {string(record.environment)}",
    ]
    for row in record.rows:
        entry = row.entry
        lines += ["", "[[entry]]", f"title = {string(row.title)}", f"kind = {string(entry.kind)}"]
        lines += [f"key = {string(entry.key)}"]
        if (blob := entry.blob) is not None:
            lines += [f"digest = {string(str(blob.digest))}", f"size = {blob.size}"]
            lines += [f"media-type = {string(blob.media_type)}"]
            if blob.annotations:
                lines += [f"annotations = {inline(sorted(blob.annotations.items()))}"]
        lines += [f"facts.{string(name)} = {string(value)}" for name, value in sorted(entry.facts.items())]
    return "\n".join(lines) + "\n"


def write_record(record: LayerRecord, file: Path) -> None:
    """Write the record to ``file``, whole or not at all."""
    with atomic_file(file) as out:
        out.write(format_record(record).encode())


def read_record(file: Path) -> LayerRecord:
    """Read a record.

    Raises:
        InputError: there is no such file.
        TomlError: it is not a record of this schema; it names file, place and reason.

    """
    if not file.exists():
        raise InputError(
            f"{file} does not exist", hint="run `envbuilder build ENV --record` on a machine that you trust"
        )
    table = tomlread.load(file)
    if (schema := table.integer("schema")) != SCHEMA:
        hint = "write it anew with `envbuilder build ENV --record`" if schema < SCHEMA else "use a newer envbuilder"
        raise table.error("schema", f"is {schema}; this envbuilder reads {SCHEMA}", hint=hint)
    record = LayerRecord(table.string("environment"), tuple(_read_row(row) for row in table.tables("entry")))
    table.finish()
    return record


def _read_row(table: Table) -> Recorded:
    blob = None
    if table.has("digest"):
        try:
            digest = Digest.parse(table.string("digest"))
        except ValueError as error:
            raise table.error("digest", str(error)) from error
        size, media_type = table.integer("size"), table.string("media-type")
        blob = Descriptor(media_type, digest, size, table.string_map("annotations"))
    entry = Entry(table.string("kind"), table.string("key"), blob, table.string_map("facts"))
    row = Recorded(table.string("title"), entry)
    table.finish()
    return row
