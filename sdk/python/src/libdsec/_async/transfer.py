"""Bytes in and out: downloads that continue where they broke, uploads that are checked.

Nothing is held in memory but the piece under way, and there is no limit on the total time: only a transfer without
any progress for ``stall_timeout`` seconds has failed.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Union
from urllib.parse import quote

from .. import _aio as net
from .._args import utf8
from .._errors import DataLossError, DSecError, InvalidArgumentError, UnavailableError
from .._files import FilePath, path_bytes
from .._http1 import Head
from .._models import FileInfo, bad_response, parse_time
from .._retry import Backoff
from .._wire import decode
from .api import Api
from .http import BodyFactory, Response

FILE_BLOCK = 1 << 20

Content = Union[bytes, bytearray, memoryview, str, Path, AsyncIterable[bytes]]
"""What can be written: bytes, text (as UTF-8), a local file, or pieces as they are made."""


class Download:
    """A body that is read piece by piece and taken up again at its position when a connection breaks.

    Args:
        api: where from.
        target: path and query for an offset.
        position: offset of the first byte.
        limit: number of bytes wanted, or None for all.
        same: called with the head of each further answer; raises if it is no longer the same content.
        follow: the content is still being made: an answer may end before it does, when nothing came for a while, and says in
            ``Dsec-Final`` whether it did. The bound of a pause must be longer than that.
        stall: longest pause in an answer, instead of ``stall_timeout``.
    """

    def __init__(
        self,
        api: Api,
        target: Callable[[int], str],
        position: int = 0,
        limit: int | None = None,
        same: Callable[[Head], None] | None = None,
        *,
        follow: bool = False,
        stall: float | None = None,
    ) -> None:
        self._api = api
        self._target = target
        self._limit = limit
        self._same = same
        self._follow = follow
        self._stall = stall
        self._backoff = Backoff(api.config.retry_seconds, None, net.monotonic)
        self._response: Response | None = None
        self._done = limit == 0
        self.position = position

    async def open(self) -> Head:
        """Ask for the content and return the head of the answer."""
        while True:
            try:
                self._response = await self._api.bytes_request("GET", self._target(self.position), stall=self._stall)
            except DSecError as e:
                pause = self._backoff.delay(e)
            else:
                if self._response.head.until_close:
                    self.close()
                    raise bad_response("content without a length, whose end cannot be told from a cut")
                return self._response.head
            await net.sleep(pause)

    async def read(self) -> bytes:
        """Return the next piece, ``b""`` at the end."""
        while not self._done:
            if self._response is None:
                head = await self.open()
                if self._same is not None:
                    try:
                        self._same(head)
                    except BaseException:
                        self.close()
                        raise
            assert self._response is not None
            try:
                piece = await self._response.read()
            except DSecError as e:
                self._response = None
                pause = self._backoff.delay(e)
            except BaseException:
                self._response = None  # it has closed itself; a further read goes on at the position
                raise
            else:
                if piece or self._ended():
                    return self._take(piece)
                continue
            await net.sleep(pause)
        return b""

    def _ended(self) -> bool:
        """Whether an answer that has ended was the last one."""
        assert self._response is not None
        if not self._follow or self._response.header("dsec-final") == "1":
            return True
        self._backoff.progress()
        self._response = None
        return False

    def _take(self, piece: bytes) -> bytes:
        self._backoff.progress()
        if self._limit is not None:
            piece = piece[: self._limit]
            self._limit -= len(piece)
        self.position += len(piece)
        if not piece or self._limit == 0:
            self._done = True
            self.close()
        return piece

    def close(self) -> None:
        """Give up what was not read."""
        if self._response is not None:
            self._response.close()
            self._response = None


class FileReader:
    """A file in a sandbox, open for reading: an async context manager and an async iterator of pieces.

    Attributes:
        info: size, mode, owner and time of last change, as they were when it was opened.
    """

    def __init__(self, download: Download, info: FileInfo) -> None:
        self._download = download
        self._pending = b""
        self.info = info

    async def read(self, size: int = -1) -> bytes:
        """Return ``size`` bytes, fewer only at the end; all that is left if ``size`` is negative."""
        parts = [self._pending]
        have = len(self._pending)
        try:
            while size < 0 or have < size:
                piece = await self._download.read()
                if not piece:
                    break
                parts.append(piece)
                have += len(piece)
        except BaseException:
            self._pending = b"".join(parts)  # for the next read: the position is behind it
            raise
        data = b"".join(parts)
        if size < 0:
            size = len(data)
        self._pending = data[size:]
        return data[:size]

    def close(self) -> None:
        """Give up what was not read."""
        self._download.close()

    def __aiter__(self) -> FileReader:
        return self

    async def __anext__(self) -> bytes:
        piece, self._pending = self._pending, b""
        piece = piece or await self._download.read()
        if not piece:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> FileReader:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def quoted(path: FilePath) -> str:
    """Return a path of a sandbox for a query. Names that are not UTF-8 may be given as bytes."""
    return quote(path_bytes(path), safe="/")


async def open_file(api: Api, target: str, offset: int, length: int | None) -> FileReader:
    """Open a file for reading. ``target`` is its route with path and user."""
    first: list[FileInfo] = []

    def at(position: int) -> str:
        query = f"{target}&offset={position}" if position else target
        return query if length is None else f"{query}&length={length - (position - offset)}"

    def same(head: Head) -> None:
        now, before = _file_info(head, download.position), first[0]
        if now.mtime != before.mtime or (_total(head) is not None and now.size != before.size):
            raise UnavailableError(
                "the file was changed while it was being read and the connection broke; read it again",
                reason="file_changed",
            )

    download = Download(api, at, offset, length, same)
    head = await download.open()
    first.append(_file_info(head, offset))
    return FileReader(download, first[0])


def _total(head: Head) -> int | None:
    """Return the size of the whole file, if the answer tells."""
    text = head.headers.get("dsec-size") or head.headers.get("content-range", "").rpartition("/")[2]
    return int(text) if text.isdigit() else None


def _file_info(head: Head, offset: int) -> FileInfo:
    headers = head.headers
    try:
        mode, uid, gid = headers.get("dsec-mode"), headers.get("dsec-uid"), headers.get("dsec-gid")
        total = _total(head)
        return FileInfo(
            size=(head.length or 0) + offset if total is None else total,
            mode=int(mode, 8) if mode else None,
            mtime=_file_time(headers.get("dsec-mtime", "")),
            uid=int(uid) if uid else None,
            gid=int(gid) if gid else None,
        )
    except ValueError:
        raise bad_response("a header of a file is not a number") from None


def _file_time(value: str) -> datetime | None:
    """Read a time: RFC 3339, seconds since 1970, or HTTP's form."""
    if not value:
        return None
    if value[0].isdigit() and "T" in value:
        return parse_time(value)
    try:
        return datetime.fromtimestamp(float(value), timezone.utc)
    except (ValueError, OverflowError, OSError):
        pass
    try:
        return parsedate_to_datetime(value)
    except (ValueError, TypeError):
        raise bad_response("a time of a file") from None


async def upload(api: Api, target: str, content: Content, *, repeatable: bool, once: bool = False) -> None:
    """PUT content to a byte route, and compare what the platform says it wrote with what was sent.

    What is at hand whole (bytes, text, a local file) is sent with its length, and again if the connection breaks
    and ``repeatable``; pieces from an iterator are sent once. With ``once`` not even a kept connection that turns out to be
    dead is replaced.
    """
    headers: dict[str, str] = {}
    if isinstance(content, str):
        content = utf8("the text", content)
    if isinstance(content, (bytes, bytearray, memoryview)):
        content = memoryview(content).cast("B")
        headers["Dsec-Sha256"] = hashlib.sha256(content).hexdigest()
    backoff = Backoff(api.config.retry_seconds if repeatable else 0.0, None, net.monotonic)
    while True:
        body, length = _body_of(content)
        once = once or length is None
        sent = _Sent(body)
        try:
            response = await api.bytes_request(
                "PUT", target, headers=headers, body=sent.pieces, length=length, wait=30.0, once=once
            )
            sent.check(await response.read_all(FILE_BLOCK))
        except DSecError as e:
            if once:
                raise
            pause = backoff.delay(e)
        else:
            return
        await net.sleep(pause)


class _Sent:
    """What was sent in one attempt: its size and digest."""

    def __init__(self, body: BodyFactory) -> None:
        self._body = body
        self._digest = hashlib.sha256()
        self._size = 0

    async def pieces(self) -> AsyncIterator[bytes | memoryview]:
        """Yield the body; it may begin again on another connection."""
        self._digest, self._size = hashlib.sha256(), 0
        async for piece in self._body():
            self._digest.update(piece)
            self._size += len(piece)
            yield piece

    def check(self, answer: bytes) -> None:
        """Raise if the platform wrote something else."""
        try:
            said = decode(answer) if answer else {}
        except DSecError:
            return  # not of the form that tells it
        if (
            said.get("size", self._size) != self._size
            or said.get("sha256", self._digest.hexdigest()) != self._digest.hexdigest()
        ):
            raise DataLossError("the file in the sandbox is not what was sent; write it again", reason="content_mismatch")


def _body_of(content: memoryview | Path | AsyncIterable[bytes]) -> tuple[BodyFactory, int | None]:
    if isinstance(content, memoryview):
        whole = content
        return lambda: _once(whole), len(whole)
    if isinstance(content, Path):
        path = content
        return lambda: _blocks(path), path.stat().st_size
    if not isinstance(content, AsyncIterable):
        raise InvalidArgumentError(
            f"cannot write a {type(content).__name__}; give bytes, str, a pathlib.Path or an asynchronous iterator of bytes",
            reason="invalid_content",
        )
    pieces = content
    return lambda: pieces, None


async def _once(data: memoryview) -> AsyncIterator[memoryview]:
    yield data


async def _blocks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while True:
            block = await net.read_block(file, FILE_BLOCK)
            if not block:
                return
            yield block
