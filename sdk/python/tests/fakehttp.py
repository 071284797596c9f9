"""The wire of the platform in miniature: requests as they are read, answers as they are written, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Fault:
    """What happens to a request instead of, or around, its proper answer.

    Attributes:
        raw: bytes sent in place of the answer.
        cut_at: the connection is reset after this many bytes of the answer.
        before: the connection is closed before the request is carried out.
        until: before the answer it is waited for this.
        delay: seconds before the answer.
        piece: the answer is written in pieces of this many bytes.
        pause: seconds between pieces.
        prefix: bytes before the answer, for example an interim one.
        chunked: the answer's body is sent in chunks of this many bytes.
        status, error: a Connect error in place of the answer.
        early: answer before the request's body is read, then close.
        mute: does not say that it will close.
        times: how many requests it applies to.
        skip: how many matching requests pass before.
    """

    raw: bytes | None = None
    cut_at: int | None = None
    before: bool = False
    until: Callable[[], bool] = lambda: True
    delay: float = 0.0
    piece: int = 0
    pause: float = 0.0
    prefix: bytes = b""
    chunked: int = 0
    status: int = 0
    error: dict[str, Any] | None = None
    early: bool = False
    mute: bool = False
    times: int = 1
    skip: int = 0


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    reader: asyncio.StreamReader
    raw_query: str
    consumed: bool = False

    async def pieces(self) -> Any:
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int((await self.reader.readline()).split(b";")[0], 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        else:
            left = int(self.headers.get("content-length", "0"))
            while left:
                data = await self.reader.read(min(left, 65536))
                if not data:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(data)
                yield data
        self.consumed = True

    async def body(self) -> bytes:
        return b"".join([p async for p in self.pieces()])


class ApiError(Exception):
    def __init__(self, status: int, code: str, message: str, reason: str, **facts: str) -> None:
        self.status = status
        self.body = {
            "code": code,
            "message": message,
            "details": [
                {"type": "google.rpc.Other", "value": ""},
                {"type": "dsec.v1.ErrorInfo", "value": "", "debug": {"reason": reason, "facts": facts, "sandboxId": "sfake"}},
            ],
        }


def not_found(what: str) -> ApiError:
    return ApiError(404, "not_found", f"there is no such {what}; list them", f"{what}_not_found")


async def gone(reader: asyncio.StreamReader) -> None:
    """Return when the client has closed the connection; clients here never pipeline."""
    while not reader.at_eof():
        waiter = getattr(reader, "_wait_for_data")  # noqa: B009
        await waiter("gone")


class Answer:
    """Writes one answer, with the faults that were asked for."""

    def __init__(self, writer: asyncio.StreamWriter, fault: Fault) -> None:
        self._writer = writer
        self._fault = fault
        self._chunked = False
        self.cut_left = fault.cut_at

    @property
    def gone(self) -> bool:
        """Whether the connection has been closed by anybody."""
        return self._writer.is_closing()

    async def error(self, e: ApiError, *, close: bool = False) -> None:
        await self.send(e.status, json.dumps(e.body).encode(), headers={"Connection": "close"} if close else None)

    async def send(
        self, status: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        await self.begin(status, kind, None if self._fault.chunked else len(body), headers)
        step = self._fault.chunked or len(body) or 1
        for start in range(0, len(body), step):
            await self.write(body[start : start + step])
        await self.end()

    async def begin(self, status: int, kind: str, length: int | None, headers: dict[str, str] | None = None) -> None:
        self._chunked = length is None
        lines = [f"HTTP/1.1 {status} Some Reason", f"Content-Type: {kind}", "Date: Thu, 01 Jan 2026 00:00:00 GMT"]
        lines.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
        lines += [f"{k}: {v}" for k, v in (headers or {}).items()]
        await self._raw(self._fault.prefix + "\r\n".join(lines).encode() + b"\r\n\r\n")

    async def write(self, data: bytes) -> None:
        await self._raw(b"%x;ext=1\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def end(self, trailer: dict[str, str] | None = None) -> None:
        if self._chunked:
            lines = [f"{k}: {v}\r\n" for k, v in (trailer or {"Trailer": "x"}).items()]
            await self._raw(b"0\r\n" + "".join(lines).encode() + b"\r\n")

    async def _raw(self, data: bytes) -> None:
        if self.cut_left is not None:
            data = data[: self.cut_left]
            self.cut_left -= len(data)
        step = self._fault.piece or len(data) or 1
        for start in range(0, len(data), step):
            self._writer.write(data[start : start + step])
            await self._writer.drain()
            if self._fault.piece:
                await asyncio.sleep(self._fault.pause)
        if self.cut_left == 0:
            raise ConnectionResetError
