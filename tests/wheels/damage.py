"""Good wheels, and how to damage them and look at what is left."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from envbuilder.oci.digest import Digest
from envbuilder.wheels.archive import Limits, MemberStream, WheelError, open_wheel
from envbuilder.wheels.key import WheelFile
from envbuilder.wheels.layer import write_wheels
from tests.wheelmaker import make_wheel
from tests.wheels.fuzz_wheels import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from envbuilder.wheels.archive import WheelArchive

INFO, DATA = "thing-1.0.dist-info", "thing-1.0.data"
#: Field -> offset in the local header, in the directory's entry, width.
FIELDS = {
    "flags": (6, 8, 2),
    "method": (8, 10, 2),
    "crc32": (14, 16, 4),
    "packed": (18, 20, 4),
    "size": (22, 24, 4),
    "version": (4, 6, 2),
    "disk": (None, 34, 2),
    "offset": (None, 42, 4),
}
GOOD = make_wheel("thing", files={"thing.py": "x = 1\n", "thing.bin": bytes(range(256)) * 9})


def read(data: bytes, folder: Path, limits: Limits | None = None) -> dict[str, bytes]:
    """Open a wheel and read all of it, as installing does."""
    folder.mkdir(exist_ok=True)
    path = folder / "blob"
    path.write_bytes(data)
    with open_wheel(path, GOOD.file, limits or Limits()) as wheel:
        return contents(wheel)


def contents(wheel: WheelArchive) -> dict[str, bytes]:
    found = {}
    for row, stream, _ in wheel.get_contents():
        assert isinstance(stream, MemberStream)
        data = b"".join(stream.content.chunks())
        stream.check(Digest.of(data))
        found[row[0]] = data
    return found


def installed(data: bytes, folder: Path) -> None:
    """Install a wheel into a layer that is thrown away."""
    path = folder / "blob"
    path.write_bytes(data)
    write_wheels([WheelFile(GOOD.file, Digest.of(data), path)], PREFIX, None, io.BytesIO())


def patched(
    data: bytes, name: str, *, local: Mapping[str, int] | None = None, central: Mapping[str, int] | None = None
) -> bytes:
    """Write other numbers into a member's local header and into its entry of the central directory."""
    changed = bytearray(data)
    here, there = data.index(name.encode()) - 30, data.rindex(name.encode()) - 46
    for at, index, values in ((here, 0, local or {}), (there, 1, central or {})):
        for field, value in values.items():
            offset, width = FIELDS[field][index], FIELDS[field][2]
            assert offset is not None
            changed[at + offset : at + offset + width] = value.to_bytes(width, "little")
    return bytes(changed)


def number(data: bytes, name: str, field: str) -> int:
    at = data.rindex(name.encode()) - 46 + (FIELDS[field][1] or 0)
    return int.from_bytes(data[at : at + FIELDS[field][2]], "little")


def refused(data: bytes, folder: Path, reason: str, *, member: str | None = None, limits: Limits | None = None) -> None:
    with pytest.raises(WheelError, match=reason) as caught:
        read(data, folder, limits)
    assert caught.value.wheel == GOOD.file
    assert caught.value.member == member
    assert caught.value.message.startswith(GOOD.file)
