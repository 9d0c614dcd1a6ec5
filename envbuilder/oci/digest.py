"""Content digests, ``sha256:<64 hex digits>``, as the OCI image specification writes them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, order=True)
class Digest:
    """A SHA-256 digest. ``str(digest)`` is its OCI form."""

    hex: str

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Parse ``sha256:...``; raise ValueError for anything else (other algorithms are not supported)."""
        algorithm, _, value = text.partition(":")
        if algorithm != "sha256" or not _HEX.fullmatch(value):
            message = f"not a sha256 digest: {text!r}"
            raise ValueError(message)
        return cls(value)

    @classmethod
    def of(cls, data: bytes) -> Digest:
        """Return the digest of some bytes."""
        return cls(hashlib.sha256(data).hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> Digest:
        """Return the digest of a file, read once."""
        with path.open("rb") as file:
            return cls(hashlib.file_digest(file, "sha256").hexdigest())

    def __str__(self) -> str:
        return f"sha256:{self.hex}"
