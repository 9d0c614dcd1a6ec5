"""A remote file that is read where it is asked for, by HTTP ranges (RFC 9110, section 14)."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from envbuilder import http

if TYPE_CHECKING:
    import requests

#: Kept in pieces of this size. The directory of most wheels, and METADATA before it, lie within one of the end.
_BLOCK = 1 << 16


class NoRangesError(Exception):
    """The server does not serve ranges of this file as stated. Caught by whoever opens one; never shown."""


class RangeFile(io.RawIOBase):
    """The file at ``url``, readable and seekable; its size in bytes is asked for when it is not given.

    Making one and reading raise NoRangesError, and what ``http.get`` and ``http.chunks`` raise.
    """

    def __init__(self, session: requests.Session, url: str, size: int | None = None) -> None:
        super().__init__()
        self._session = session
        self._url = url
        self._blocks: dict[int, bytes] = {}  # counted from the end of the file, where the directory of a ZIP lies
        self._position = 0
        self._size = size if size is not None else self._ask(0, 1)[1]

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte; nothing is asked for before it is read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            message = "seek before the beginning"
            raise OSError(message)
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes, all that are left when negative."""
        end = self._size if size < 0 else min(self._size, self._position + size)
        if self._position >= end:
            return b""
        first, last = self._number(self._position), self._number(end - 1)
        self._load(first, last)
        data = b"".join(self._blocks[number] for number in range(first, last - 1, -1))
        skipped = self._position - self._begin(first)
        data = data[skipped : skipped + end - self._position]
        self._position = end
        return data

    def _number(self, position: int) -> int:
        return (self._size - 1 - position) // _BLOCK

    def _begin(self, number: int) -> int:
        return max(0, self._size - (number + 1) * _BLOCK)

    def _load(self, first: int, last: int) -> None:
        """Have all blocks from ``first`` down to ``last``, with at most one request."""
        absent = [number for number in range(last, first + 1) if number not in self._blocks]
        if not absent:
            return
        begin = self._begin(absent[-1])
        data, size = self._ask(begin, self._size - absent[0] * _BLOCK)
        if size != self._size:
            raise NoRangesError
        for number in range(absent[0], absent[-1] + 1):
            end = self._size - number * _BLOCK
            self._blocks[number] = data[self._begin(number) - begin : end - begin]

    def _ask(self, begin: int, end: int) -> tuple[bytes, int]:
        """Return the bytes from ``begin`` up to ``end``, and the size of the whole file."""
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with http.get(self._session, self._url, headers=headers) as response:
            match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", ""))
            if response.status_code != 206 or match is None or (int(match[1]), int(match[2])) != (begin, end - 1):
                raise NoRangesError
            return b"".join(http.chunks(response)), int(match[3])
