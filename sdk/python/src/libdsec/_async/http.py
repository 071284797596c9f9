"""HTTP/1.1 over a pool of kept connections.

Connections are taken last in, first out, so that a burst's surplus goes idle and expires. A kept connection on which
anything arrived is dead (the server closed it) and is dropped unused; one that dies between the check and the request is
replaced once more, without counting as a failure.

The requests of a client are built from bytes that never change; small answers come back in one read and are not copied.
"""

from __future__ import annotations

import collections
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Union

from .. import _aio as net
from .._config import DSecConfig, Endpoint
from .._errors import (
    AuthenticationError,
    DSecError,
    DSecTimeoutError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from .._http1 import MAX_HEAD, ChunkedDecoder, Head, ProtocolError, parse_head
from .._models import bad_response
from .._retry import CONNECT_FAILED, NO_ANSWER, TLS_FAILED
from .._version import USER_AGENT

MAX_UNARY_BODY = 80 << 20
MAX_INTERIM = 16
WRITE_BLOCK = 256 << 10

BodyFactory = Callable[[], AsyncIterable[Union[bytes, memoryview]]]


class ContentError(Exception):
    """Carries what the maker of a body raised past the handlers of what the connection raises: both may be OSErrors."""

    def __init__(self, original: Exception) -> None:
        super().__init__(original)
        self.original = original


class Connection:
    """One connection and what has been read from it too early."""

    __slots__ = ("answered", "buffer", "idle_since", "reused", "stream")

    def __init__(self, stream: net.Stream) -> None:
        self.stream = stream
        self.buffer = b""
        self.reused = False
        self.answered = False  # whether a byte of the present answer has come
        self.idle_since = 0.0

    async def read_head(self, deadline: float) -> Head:
        """Read up to the end of the response's head; interim (1xx) responses are skipped."""
        data = self.buffer
        interim = searched = 0
        while True:
            end = data.find(b"\r\n\r\n", max(0, searched - 3))
            if end > MAX_HEAD or (end < 0 and len(data) > MAX_HEAD):
                raise ProtocolError(f"headers of more than {MAX_HEAD} bytes")
            if end >= 0:
                head = parse_head(data[:end])
                data = data[end + 4 :]
                searched = 0
                if head.status >= 200:
                    self.buffer = data
                    return head
                interim += 1
                if head.status == 101 or interim > MAX_INTERIM:
                    raise ProtocolError(f"unexpected interim answer {head.status}")
                continue
            searched = len(data)
            more = await self.stream.read(deadline)
            if not more:
                raise ConnectionResetError("the server closed the connection without an answer")
            self.answered = True
            data = data + more if data else more

    async def read_all(self, head: Head, stall: float) -> bytes:
        """Read the whole body of a small answer."""
        if head.length is not None:
            data, self.buffer = self.buffer, b""
            if len(data) == head.length:
                return data
            self.buffer = data
        reader = BodyReader(self, head, stall, "stall_timeout")
        parts: list[bytes] = []
        size = 0
        while True:
            part = await reader.read()
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
            if size > MAX_UNARY_BODY:
                raise ProtocolError(f"an answer of more than {MAX_UNARY_BODY} bytes")


class BodyReader:
    """Reads one body piece by piece."""

    __slots__ = ("_chunks", "_conn", "_left", "_stall", "_why", "done")

    def __init__(self, conn: Connection, head: Head, stall: float, why: str = "") -> None:
        self._conn = conn
        self._left = head.length
        self._chunks = ChunkedDecoder() if head.chunked else None
        self._stall = stall
        self._why = why
        self.done = head.length == 0

    @property
    def trailer(self) -> dict[str, str]:
        """What came behind a chunked body that was read to its end."""
        return self._chunks.trailer if self._chunks is not None else {}

    async def read(self) -> bytes:
        """Return the next piece, ``b""`` at the end; ConnectionError if the body was cut."""
        while not self.done:
            data, self._conn.buffer = self._conn.buffer, b""
            if not data:
                try:
                    data = await self._conn.stream.read(net.monotonic() + self._stall)
                except TimeoutError:
                    raise _overdue("no byte came", self._stall, self._why) from None
                if not data:
                    return self._end()
            piece = self._take(data)
            if piece:
                return piece
        return b""

    def _take(self, data: bytes) -> bytes:
        if self._chunks is not None:
            piece = self._chunks.feed(data)
            if self._chunks.done:
                self.done = True
                self._conn.buffer = self._chunks.rest
            return piece
        if self._left is None:
            return data
        piece = data[: self._left]
        self._conn.buffer = data[len(piece) :]
        self._left -= len(piece)
        self.done = self._left == 0
        return piece

    def _end(self) -> bytes:
        if self._chunks is None and self._left is None:
            self.done = True
            return b""
        raise ConnectionResetError("the server closed the connection in the middle of its answer")


class Response:
    """An answer whose body is read as it comes. Must be closed; a body read to its end frees the connection for others."""

    def __init__(
        self, client: HttpClient, conn: Connection, head: Head, *, slot: bool, reusable: bool, stall: float | None = None
    ) -> None:
        self.status = head.status
        self.head = head
        self._client = client
        self._conn: Connection | None = conn
        self._slot = slot
        self._reusable = reusable and head.keep_alive
        config = client.config
        limit, why = (config.stall_timeout, "stall_timeout") if stall is None else (stall, "")
        self._body = BodyReader(conn, head, limit, why)

    def header(self, name: str) -> str | None:
        """Return a header of the head, or, once the body was read to its end, of the trailer. ``name`` is in lower case."""
        return self.head.headers.get(name) or self._body.trailer.get(name)

    async def read(self) -> bytes:
        """Return the next piece of the body, ``b""`` at its end.

        Raises:
            UnavailableError: it was cut (reason ``connection_lost``).
            DSecTimeoutError: no byte came for ``stall_timeout`` seconds (reason ``no_answer``).
        """
        if self._conn is None:
            return b""
        try:
            piece = await self._body.read()
        except OSError as e:
            self.close()
            raise self._client.error(e) from e
        except BaseException:
            self.close()
            raise
        if not piece:
            self.close()
        return piece

    async def read_all(self, limit: int) -> bytes:
        """Return what is left of the body; more than ``limit`` bytes are an InternalError."""
        parts: list[bytes] = []
        size = 0
        while True:
            piece = await self.read()
            if not piece:
                return b"".join(parts)
            parts.append(piece)
            size += len(piece)
            if size > limit:
                self.close()
                raise bad_response(f"more than {limit} bytes")

    def close(self) -> None:
        """Let go of the connection; it is kept if the body was read to its end."""
        conn, self._conn = self._conn, None
        if conn is not None:
            self._client.give_back(conn, reusable=self._reusable and self._body.done, slot=self._slot)


class HttpClient:
    """Sends requests to one server."""

    def __init__(self, config: DSecConfig) -> None:
        self.config = config
        self.endpoint = Endpoint.parse(config.url)
        self._tls = (config.ssl_context or ssl.create_default_context()) if self.endpoint.tls else None
        self._bound = config.connection_bound()
        self._slots = net.Slots(self._bound)
        self._idle: collections.deque[Connection] = collections.deque()
        self._scope: object = None
        self._closed = False
        fixed = f"Host: {self.endpoint.authority}\r\nUser-Agent: {USER_AGENT}\r\n"
        if config.api_key is not None:
            fixed += f"Authorization: Bearer {config.api_key}\r\n"
        self._fixed = fixed
        # For servers inside a sandbox: their Authorization is the caller's business.
        self._inner = fixed.replace("\r\nAuthorization: ", "\r\nDsec-Authorization: ")
        self._json = fixed + "Content-Type: application/json\r\nConnect-Protocol-Version: 1\r\nContent-Length: "

    @property
    def crowded(self) -> bool:
        """Whether the next request takes the last free connection, or has to wait for one."""
        return self._slots.free <= 1

    async def unary(
        self,
        target: str,
        body: bytes,
        *,
        wait: float,
        urgent: bool,
        patient: bool = False,
        once: bool = False,
        until: float | None = None,
    ) -> tuple[int, bytes]:
        """POST a JSON message and return status and body of the answer.

        Args:
            target: path below the URL's.
            body: JSON.
            wait: seconds that the answer may take beyond ``request_timeout``, counted from when there is a connection.
            urgent: does not wait for a free connection.
            patient: waits for a free connection without a bound, else for ``wait`` and ``request_timeout`` again.
            once: never sent twice, so no kept connection is used: it may turn out to be dead when all has been sent.
            until: on the clock, when all of it must be over, or None.

        Raises:
            UnavailableError: no connection, or it broke. The request may have been carried out.
            DSecTimeoutError: no answer in time (reason ``no_answer``). The same.
        """
        request = f"POST {self.endpoint.prefix}{target} HTTP/1.1\r\n{self._json}{len(body)}\r\n\r\n".encode() + body
        limit = wait + self.config.request_timeout
        while True:
            if not urgent:
                await self._take_slot(None if patient else limit)
            conn = await self._acquire(slot=not urgent, fresh=once, until=until)
            deadline = _earlier(net.monotonic() + limit, until)
            keep = False
            try:
                if len(request) <= WRITE_BLOCK:
                    sent = await conn.stream.write(request, deadline)
                else:
                    sent = await self._write_blocks(conn, request)
                head = await self._read_head(conn, limit, deadline)
                stall = self.config.stall_timeout
                data = await conn.read_all(head, stall if until is None else max(until - net.monotonic(), 0.01))
                keep = sent and head.keep_alive
                return head.status, data
            except OSError as e:
                if conn.reused and not conn.answered and isinstance(e, ConnectionError):
                    continue
                raise self.error(e) from e
            finally:
                self.give_back(conn, reusable=keep, slot=not urgent)

    async def stream(
        self,
        method: str,
        target: str,
        *,
        headers: dict[str, str] | None = None,
        body: BodyFactory | None = None,
        length: int | None = 0,
        wait: float = 0.0,
        once: bool = False,
        stall: float | None = None,
        inner: bool = False,
    ) -> Response:
        """Send a request whose body is streamed, and return as soon as the head of the answer is there.

        Args:
            method: of HTTP.
            target: path and query below the URL's.
            headers: additional ones.
            body: makes the pieces of the body; called again if a kept connection turned out to be dead.
            once: the body cannot be made again, so no kept connection is used.
            length: of the body in bytes; None: unknown, sent in chunks.
            wait: as in ``unary``, counted from the end of the request's body.
            stall: longest pause in the answer's body, instead of ``stall_timeout``.
            inner: the request is for a server inside a sandbox.
        """
        request = self._stream_head(method, target, headers or {}, length, inner=inner)
        while True:
            await self._take_slot(self.config.request_timeout)
            conn = await self._acquire(slot=True, fresh=once)
            try:
                sent = await conn.stream.write(request, net.monotonic() + self.config.request_timeout)
                if sent and body is not None:
                    sent = await self._send_body(conn, _apart(body()), length)
                limit = wait + self.config.request_timeout
                head = await self._read_head(conn, limit, net.monotonic() + limit)
            except OSError as e:
                self.give_back(conn, reusable=False, slot=True)
                if conn.reused and not conn.answered and isinstance(e, ConnectionError):
                    continue
                raise self.error(e) from e
            except ContentError as e:
                self.give_back(conn, reusable=False, slot=True)
                raise e.original from e.original.__cause__
            except BaseException:
                self.give_back(conn, reusable=False, slot=True)
                raise
            if method == "HEAD":  # its length is that of a body that does not come
                head.length, head.chunked = 0, False
            return Response(self, conn, head, slot=True, reusable=sent, stall=stall)

    async def upgrade(self, target: str, protocol: str) -> tuple[net.Duplex, Head, bytes]:
        """Ask for another protocol. Returns the connection, the head of the answer, and what came behind it.

        Raises:
            UnavailableError: no connection, or no answer.
        """
        self._check()
        try:
            conn = await net.open_duplex(self.endpoint, self._tls, self.config.connect_timeout)
        except OSError as e:
            raise self._connect_error(e) from e
        ask = f"GET {self.endpoint.prefix}{target} HTTP/1.1\r\n{self._fixed}Connection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n"
        data, end = b"", -1
        try:
            await conn.write(ask.encode())
            while end < 0:
                more = await self._first(conn)
                data += more
                end = data.find(b"\r\n\r\n") if more and len(data) <= 2 * MAX_HEAD else len(data)
            return conn, parse_head(data[:end]), data[end + 4 :]
        except OSError as e:
            conn.abort()
            raise self.error(e) from e
        except BaseException:
            conn.abort()
            raise

    def _stream_head(
        self, method: str, target: str, headers: dict[str, str], length: int | None, *, inner: bool = False
    ) -> bytes:
        fixed = self._inner if inner else self._fixed
        if any(name.lower() == "user-agent" for name in headers):
            fixed = fixed.replace(f"User-Agent: {USER_AGENT}\r\n", "")
        lines = [f"{method} {self.endpoint.prefix}{target} HTTP/1.1\r\n", fixed]
        lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
        if length is None:
            lines.append("Transfer-Encoding: chunked\r\n")
        elif method not in ("GET", "HEAD") or length:
            lines.append(f"Content-Length: {length}\r\n")
        lines.append("\r\n")
        return "".join(lines).encode()

    async def _read_head(self, conn: Connection, limit: float, deadline: float) -> Head:
        try:
            return await conn.read_head(deadline)
        except TimeoutError:
            raise _overdue("it did not begin", limit, "request_timeout") from None

    async def _first(self, conn: net.Duplex) -> bytes:
        limit = self.config.request_timeout
        try:
            return await conn.read(MAX_HEAD, limit)
        except TimeoutError:
            raise _overdue("it did not begin", limit, "request_timeout") from None

    async def _write_blocks(self, conn: Connection, data: bytes | memoryview) -> bool:
        """Write a long run of bytes, each block with its own deadline; False if the server answered meanwhile."""
        view = memoryview(data)
        for start in range(0, len(view), WRITE_BLOCK):
            await net.breathe()
            if conn.stream.readable:
                return False
            try:
                if not await conn.stream.write(view[start : start + WRITE_BLOCK], net.monotonic() + self.config.stall_timeout):
                    return False
            except TimeoutError:
                raise _overdue("it took no byte", self.config.stall_timeout, "stall_timeout") from None
        return True

    async def _send_body(self, conn: Connection, pieces: AsyncIterable[bytes | memoryview], length: int | None) -> bool:
        """Send the body; False if the server answered before its end, after which the connection is of no more use."""
        left = length
        async for piece in pieces:
            if not piece:
                continue
            if left is not None:
                left -= len(piece)
                if left < 0:
                    raise InvalidArgumentError("the content is longer than was said", reason="wrong_length")
            data = piece if length is not None else b"".join((b"%x\r\n" % len(piece), piece, b"\r\n"))
            try:
                if not await self._write_blocks(conn, data):
                    return False
            except ConnectionError:
                if conn.stream.readable:  # an answer may have come before the connection was closed
                    return False
                raise
        if left:
            raise InvalidArgumentError(f"the content is {left} bytes shorter than was said", reason="wrong_length")
        if length is None:
            return await conn.stream.write(b"0\r\n\r\n", net.monotonic() + self.config.stall_timeout)
        return True

    async def _take_slot(self, limit: float | None) -> None:
        """Wait until one more connection may be used, for at most ``limit`` seconds.

        That is no time of the request: what waits here behind others says nothing about the platform.
        """
        self._check()
        try:
            await self._slots.acquire(None if limit is None else net.monotonic() + limit)
        except TimeoutError as e:
            raise self.error(e) from e

    def _check(self) -> None:
        if self._closed:
            raise FailedPreconditionError("the client is closed; make a new one", reason="client_closed")
        scope = net.scope()
        if scope is not self._scope and scope != self._scope:
            self._enter(scope)

    async def _acquire(self, *, slot: bool, fresh: bool = False, until: float | None = None) -> Connection:
        """Return a connection that seems to live, or a new one. With ``slot`` one was taken; a failure gives it back."""
        try:
            self._check()
            while not fresh:
                try:
                    conn = self._idle.pop()
                except IndexError:
                    break
                if conn.stream.readable or net.monotonic() - conn.idle_since > self.config.keep_alive_seconds:
                    conn.stream.close()
                    continue
                conn.reused = True
                conn.answered = False
                return conn
            limit = self.config.connect_timeout
            if until is not None:
                limit = min(limit, max(until - net.monotonic(), 0.01))
            return Connection(await net.connect(self.endpoint, self._tls, limit))
        except BaseException as e:
            if slot:
                self._slots.release()
            if isinstance(e, OSError):
                raise self._connect_error(e) from e
            raise

    def _enter(self, scope: object) -> None:
        """Forget the connections of another event loop or process."""
        self._scope = scope
        self.drop_idle()
        self._slots = net.Slots(self._bound)

    def give_back(self, conn: Connection, *, reusable: bool, slot: bool) -> None:
        """Keep a connection for the next request, or close it."""
        if reusable and not conn.buffer and not self._closed and len(self._idle) < self._bound:
            now = conn.idle_since = net.monotonic()
            self._idle.append(conn)
            self._expire(now)
        else:
            conn.stream.close()
        if slot:
            self._slots.release()

    def _expire(self, now: float) -> None:
        """Close the oldest kept connections."""
        limit = now - self.config.keep_alive_seconds
        try:
            while self._idle[0].idle_since < limit:
                self._idle.popleft().stream.close()
        except IndexError:  # other threads take from it, too
            return

    def close(self) -> None:
        """Close kept connections; those in use are closed by whoever uses them."""
        self._closed = True
        self.drop_idle()

    def drop_idle(self) -> None:
        """Close kept connections."""
        while True:
            try:
                self._idle.pop().stream.close()
            except IndexError:  # other threads take from it, too
                return

    def error(self, e: OSError) -> DSecError:
        """Make the exception for a connection that failed in use."""
        if isinstance(e, TimeoutError):
            return DSecTimeoutError(f"no answer from {self.config.url} in time: {e}", reason=NO_ANSWER)
        reason = "protocol_error" if isinstance(e, ProtocolError) else "connection_lost"
        return UnavailableError(f"lost the connection to {self.config.url}: {e}", reason=reason)

    def _connect_error(self, e: OSError) -> DSecError:
        where = self.config.url
        if isinstance(e, ssl.SSLError):
            return UnavailableError(f"no TLS connection to {where}: {e}; check the certificate", reason=TLS_FAILED)
        if isinstance(e, PermissionError):
            return AuthenticationError(f"no permission to connect to {where}: {e}", reason="connect_refused")
        return UnavailableError(f"cannot reach the platform at {where}: {e}; is it running?", reason=CONNECT_FAILED)


def _overdue(what: str, limit: float, why: str) -> TimeoutError:
    """Make the error that says which time-out has passed."""
    return TimeoutError(f"{what} for {limit:g} s" + (f" ({why})" if why else ""))


def _earlier(deadline: float, until: float | None) -> float:
    return deadline if until is None else min(deadline, until)


async def _apart(pieces: AsyncIterable[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    """Pass a body on, and its maker's failures as ContentError."""
    try:
        async for piece in pieces:
            yield piece
    except Exception as e:
        raise ContentError(e) from e
