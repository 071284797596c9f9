"""HTTP/1.1 without input and output: heads and chunked bodies, strict and bounded.

What a response's head says decides where the next response begins, so anything ambiguous (two lengths, a length and
chunks, folded lines) is refused and costs the connection, never guessed at.
"""

from __future__ import annotations

import re

MAX_HEAD = 64 << 10
MAX_HEADERS = 200
_MAX_CHUNK_LINE = 1 << 10
_MAX_TRAILER = 16 << 10

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEX = re.compile(rb"[0-9A-Fa-f]{1,15}")


class ProtocolError(ConnectionError):
    """The peer does not speak HTTP/1.1. The connection is of no more use."""


class Head:
    """A response's status and headers (names in lower case), and how its body ends.

    ``length`` is the number of bytes of the body, or None if it is chunked or ends with the connection.
    """

    __slots__ = ("chunked", "headers", "keep_alive", "length", "status")

    def __init__(self, status: int, headers: dict[str, str], length: int | None, chunked: bool, keep_alive: bool) -> None:
        self.status = status
        self.headers = headers
        self.length = length
        self.chunked = chunked
        self.keep_alive = keep_alive

    @property
    def until_close(self) -> bool:
        """Whether the body ends only with the connection."""
        return self.length is None and not self.chunked


def parse_head(data: bytes) -> Head:
    """Parse status line and headers (without the empty line at the end).

    Raises:
        ProtocolError: malformed, ambiguous or too large.
    """
    lines = data.decode("latin-1").split("\r\n")
    first = lines[0]
    if len(first) < 12 or first[:7] != "HTTP/1." or first[7] not in "01" or first[8] != " ":
        raise ProtocolError("the answer does not begin as HTTP/1.1")
    if not (first[9:12].isascii() and first[9:12].isdigit()) or first[12:13] not in ("", " "):
        raise ProtocolError("the answer has no valid status")
    if len(lines) > MAX_HEADERS:
        raise ProtocolError(f"more than {MAX_HEADERS} headers")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or _TOKEN.fullmatch(name) is None or "\n" in value or "\r" in value or "\0" in value:
            raise ProtocolError("malformed header")
        name = name.lower()
        value = value.strip(" \t")
        if name in headers:
            if name == "content-length" and headers[name] != value:
                raise ProtocolError("two different content lengths")
            if name != "content-length":
                value = f"{headers[name]}, {value}"
        headers[name] = value
    return _frame(int(first[9:12]), headers, first[7] == "1")


def _frame(status: int, headers: dict[str, str], is_11: bool) -> Head:
    connection = headers.get("connection", "").lower()
    keep_alive = (is_11 and "close" not in connection) or "keep-alive" in connection
    coding = headers.get("transfer-encoding")
    raw = headers.get("content-length")
    length: int | None = None
    if status < 200 or status in (204, 304):
        return Head(status, headers, 0, False, keep_alive)
    if coding is not None:
        if coding.lower() != "chunked" or raw is not None:
            raise ProtocolError("a body whose end cannot be told")
        return Head(status, headers, None, True, keep_alive)
    if raw is not None:
        if not (raw.isascii() and raw.isdigit()) or len(raw) > 19:
            raise ProtocolError("invalid content length")
        length = int(raw)
    return Head(status, headers, length, False, keep_alive and length is not None)


class ChunkedDecoder:
    """Takes a chunked body apart as it comes.

    ``done`` is true after the trailer, whose headers are in ``trailer`` (names in lower case, the last of each); ``rest`` is
    what follows it.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._left = 0  # bytes of the current chunk still to come
        self._after_data = False  # the line break behind a chunk's data is due
        self._in_trailer = False
        self._trailer_size = 0
        self.trailer: dict[str, str] = {}
        self.done = False

    @property
    def rest(self) -> bytes:
        """Bytes that came after the end of the body."""
        return bytes(self._buffer) if self.done else b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes, return the content in them. Raises ProtocolError."""
        self._buffer += data
        out: list[bytes] = []
        while not self.done and self._step(out):
            pass
        return out[0] if len(out) == 1 else b"".join(out)

    def _step(self, out: list[bytes]) -> bool:
        """Consume one element; False if more bytes are needed."""
        if self._left:
            piece = bytes(self._buffer[: self._left])
            if not piece:
                return False
            del self._buffer[: len(piece)]
            self._left -= len(piece)
            self._after_data = self._left == 0
            out.append(piece)
            return True
        if self._after_data:
            if len(self._buffer) < 2:
                return False
            if self._buffer[:2] != b"\r\n":
                raise ProtocolError("a chunk is longer than it said")
            del self._buffer[:2]
            self._after_data = False
            return True
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > (_MAX_TRAILER if self._in_trailer else _MAX_CHUNK_LINE):
                raise ProtocolError("an endless line in a chunked body")
            return False
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        self._line(line)
        return True

    def _line(self, line: bytes) -> None:
        if self._in_trailer:
            self._trailer_size += len(line) + 2
            if self._trailer_size > _MAX_TRAILER:
                raise ProtocolError("too long a trailer")
            self.done = not line
            name, _, value = line.decode("latin-1").partition(":")
            self.trailer[name.lower()] = value.strip(" \t")
            return
        digits = line.partition(b";")[0].rstrip(b" \t")
        if len(line) > _MAX_CHUNK_LINE or _HEX.fullmatch(digits) is None:
            raise ProtocolError("malformed size of a chunk")
        self._left = int(digits, 16)
        self._in_trailer = self._left == 0
