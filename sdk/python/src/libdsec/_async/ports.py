"""Servers inside a sandbox: HTTP, raw connections, and a local port that leads there."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from datetime import datetime
from typing import Any, Union
from urllib.parse import quote, urljoin, urlsplit

from .. import _aio as net
from .._args import invalid, positive, utf8
from .._errors import DSecError, UnavailableError
from .._models import text, time_of
from .._wire import error_from_body
from .api import MAX_ERROR_BODY, Api
from .http import BodyFactory, Response

HttpBody = Union[bytes, bytearray, memoryview, str, AsyncIterable[bytes]]
"""What a request may carry: bytes, text (as UTF-8), or pieces as they are made."""

DEFAULT_TIMEOUT = 60.0
MAX_REDIRECTS = 20
MAX_BODY = 1 << 30
MAX_FRAME = 64 << 10
FRAMES = "dsec-tcp-frames"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OWN = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "keep-alive", "expect"}
)
_INNER = "dsec-inner-"


class HttpResponse:
    """An answer of a server inside a sandbox. Its body is read as it comes; close it, or use it as an async context manager.

    Attributes:
        status: of HTTP.
        headers: names in lower case; those that came several times are joined by a comma.
        url: what answered, after redirects.
    """

    def __init__(self, response: Response, url: str) -> None:
        self._response = response
        self.status = response.status
        self.url = url
        self.headers = _headers(response.head.headers)

    def __repr__(self) -> str:
        return f"<HttpResponse {self.status} {self.url}>"

    async def read(self, limit: int = MAX_BODY) -> bytes:
        """Return the whole body; more than ``limit`` bytes are an error."""
        return await self._response.read_all(limit)

    async def text(self) -> str:
        """Return the whole body as UTF-8, with U+FFFD for bytes that are not."""
        return (await self.read()).decode("utf-8", "replace")

    async def json(self) -> Any:
        """Return the whole body, which is JSON."""
        return json.loads(await self.read())

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces as they come."""
        while True:
            piece = await self._response.read()
            if not piece:
                return
            yield piece

    def close(self) -> None:
        """Let go of the rest of the body."""
        self._response.close()

    async def __aenter__(self) -> HttpResponse:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class PortStream:
    """A TCP connection to a port inside. One task may read while another writes; each direction ends by itself."""

    def __init__(self, api: Api, conn: net.Duplex, rest: bytes) -> None:
        self._api = api
        self._conn = conn
        self._buffer = rest
        self._left = 0  # of the frame that is being read
        self._ended = False
        self._write_ended = False

    async def read(self, limit: int = MAX_FRAME) -> bytes:
        """Return at most ``limit`` bytes as soon as there are some, ``b""`` once the port has ended its direction.

        Raises:
            UnavailableError: the connection was reset or cut (``connection_lost``): what came is not all.
        """
        if limit <= 0:
            raise invalid("limit must be greater than 0")
        while not self._left:
            if self._ended:
                return b""
            while len(self._buffer) < 4:
                await self._fill()
            (self._left,) = struct.unpack(">I", self._buffer[:4])
            self._buffer = self._buffer[4:]
            self._ended = self._left == 0
            if self._left > MAX_FRAME:
                raise self._lost("a frame that is too long")
        if not self._buffer:
            await self._fill()
        size = min(limit, self._left, len(self._buffer))
        piece, self._buffer = self._buffer[:size], self._buffer[size:]
        self._left -= size
        return piece

    async def _fill(self) -> None:
        try:
            more = await self._conn.read(MAX_FRAME)
        except OSError as e:
            raise self._lost(str(e)) from e
        if not more:
            raise self._lost("it ended in the middle")
        self._buffer += more

    async def write(self, data: bytes) -> None:
        """Send ``data``, of any size; returns when it is on its way.

        Raises:
            UnavailableError: the connection was reset or cut (``connection_lost``).
        """
        view = memoryview(data)
        for start in range(0, len(view), MAX_FRAME):
            piece = bytes(view[start : start + MAX_FRAME])
            await self._send(struct.pack(">I", len(piece)) + piece)

    async def write_eof(self) -> None:
        """Say that nothing follows. What the port sends can still be read."""
        if not self._write_ended:
            self._write_ended = True
            await self._send(b"\0\0\0\0")

    async def _send(self, data: bytes) -> None:
        try:
            await self._conn.write(data)
        except OSError as e:
            raise self._lost(str(e)) from e

    def _lost(self, what: str) -> UnavailableError:
        return UnavailableError(f"lost the connection to the port: {what}", reason="connection_lost")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            piece = await self.read()
            if not piece:
                return
            yield piece

    def close(self) -> None:
        """Close. Before both directions have ended the port sees a reset."""
        self._conn.close()

    async def __aenter__(self) -> PortStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Forward:
    """A local port that leads to a port inside, from ``async with`` to its end.

    Attributes:
        host, port: where it listens.
    """

    def __init__(self, port: Port, host: str, local_port: int) -> None:
        self._target = port
        self._listener = net.Listener(self._serve)
        self.host = host
        self.port = local_port

    async def __aenter__(self) -> Forward:
        try:
            self.port = await self._listener.open(self.host, self.port)
        except OSError as e:
            raise invalid(f"cannot listen on {self.host}:{self.port}: {e}", "cannot_listen") from e
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.close()

    async def _serve(self, local: net.Duplex) -> None:
        try:
            stream = await self._target.connect()
        except DSecError as e:
            net.log.warning("port %d: %s", self._target.number, e)
            local.abort()
            return

        async def inward() -> None:
            try:
                while piece := await local.read(MAX_FRAME):
                    await stream.write(piece)
                await stream.write_eof()
            except BaseException:
                stream.close()
                raise

        async def outward() -> None:
            try:
                while piece := await stream.read():
                    await local.write(piece)
                await local.write_eof()
            except BaseException:
                local.abort()
                stream.close()
                raise

        try:
            await net.together(inward, outward)
            local.close()
        except (OSError, DSecError) as e:
            net.log.debug("port %d: %s", self._target.number, e)
            local.abort()
        finally:
            stream.close()


class Port:
    """A TCP port on the loopback of a sandbox. Made by ``Sandbox.port``."""

    def __init__(self, api: Api, sandbox_id: str, number: int) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 1 << 16:
            raise invalid(f"a port is a whole number between 1 and 65535, not {number!r}", "invalid_port")
        self._api = api
        self._route = f"/v1/sandboxes/{sandbox_id}/ports/{number}/"
        self._sandbox_id = sandbox_id
        self.number = number

    def __repr__(self) -> str:
        return f"<Port {self.number} of {self._sandbox_id}>"

    def url(self, path: str = "/") -> str:
        """Return the URL of a path for any HTTP client that sends the platform's key.

        The key goes into ``Authorization: Bearer``, or, where that header is meant for the server inside, into
        ``Dsec-Authorization``. An answer with the header ``Dsec-Error`` is the platform's.
        """
        return self._api.config.url.rstrip("/") + self._path(path)

    def _path(self, path: str) -> str:
        if not path.startswith("/") or not path.isascii() or any(c <= " " for c in path):
            raise invalid("the path must begin with a slash and be as it stands in a URL")
        return f"{self._route}http{path}"

    async def public_url(self, expires: float | None = None) -> str:
        """Return a URL by which a browser reaches the port without a key.

        Args:
            expires: seconds until it ends, at most 7 days. None: 1 h. It ends with the sandbox in any case.
        """
        return (await self.public_link(expires))[0]

    async def public_link(self, expires: float | None = None) -> tuple[str, datetime | None]:
        """Return the URL of ``public_url`` and when it ends. See ``public_url``."""
        positive("expires", expires)
        request: dict[str, Any] = {"sandboxId": self._sandbox_id, "port": self.number}
        if expires is not None:
            request["expiresSeconds"] = str(int(max(expires, 1)))
        answer = await self._api.call("CreatePortURL", request)
        return text(answer, "url"), time_of(answer, "expiresAt")

    async def http(
        self,
        method: str,
        path: str = "/",
        *,
        headers: Mapping[str, str] | None = None,
        body: HttpBody | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> HttpResponse:
        """Send an HTTP request to the port, once, and return the answer; redirects are not followed. See ``Sandbox.http``.

        Args:
            method: of HTTP.
            path: with its query, as it stands in a URL.
            headers, body, timeout: as in ``Sandbox.http``.
        """
        response = await request(self._api, method, self._path(path), headers, body, timeout)
        return HttpResponse(response, f"http://localhost:{self.number}{path}")

    async def connect(self) -> PortStream:
        """Open a TCP connection to the port and return it.

        Raises:
            FailedPreconditionError: nothing listens there (``port_refused``).
        """
        conn, head, rest = await self._api.http.upgrade(f"{self._route}tcp", FRAMES)
        if head.status == 101:
            return PortStream(self._api, conn, rest)
        try:
            while len(rest) < min(head.length or 0, MAX_ERROR_BODY):
                more = await conn.read(MAX_FRAME)
                if not more:
                    break
                rest += more
        except OSError as e:
            raise self._api.http.error(e) from e
        finally:
            conn.close()
        raise error_from_body(head.status, rest)

    def forward(self, local_port: int = 0, *, host: str = "127.0.0.1") -> Forward:
        """Return a local port that leads to this one, for use in ``async with``.

        Every connection to it becomes one to the port inside, with half-close and resets.

        Args:
            local_port: where to listen; 0: any free one, which is ``Forward.port``.
            host: address to listen at.

        Raises:
            InvalidArgumentError: by ``async with``: it cannot listen there (``cannot_listen``).
        """
        return Forward(self, host, local_port)


async def fetch(
    api: Api,
    sandbox_id: str,
    method: str,
    url: str,
    headers: Mapping[str, str] | None,
    body: HttpBody | None,
    timeout: float,
    verify: bool,
    follow_redirects: bool,
) -> HttpResponse:
    """Send a request from a sandbox's position in the network."""
    given = dict(headers or {})
    for _ in range(MAX_REDIRECTS + 1):
        target = f"/v1/sandboxes/{sandbox_id}/http?url={quote(url, safe='')}" + ("" if verify else "&verify=0")
        response = await request(api, method, target, given, body, timeout)
        answer = HttpResponse(response, url)
        location = answer.headers.get("location")
        if not follow_redirects or location is None or answer.status not in (301, 302, 303, 307, 308):
            return answer
        answer.close()
        before, url = url, urljoin(url, location)
        if answer.status == 303 or (answer.status in (301, 302) and method == "POST"):
            method, body = "GET", None
        elif body is not None and not isinstance(body, (bytes, bytearray, memoryview, str)):
            raise invalid("a redirect asks for the body again, which was made only once", "cannot_repeat")
        if urlsplit(before)[:2] != urlsplit(url)[:2]:  # credentials are for whom they were given
            given = {k: v for k, v in given.items() if k.lower() not in ("authorization", "cookie")}
    raise UnavailableError(f"more than {MAX_REDIRECTS} redirects, the last to {url}", reason="too_many_redirects")


async def request(
    api: Api, method: str, target: str, headers: Mapping[str, str] | None, body: HttpBody | None, timeout: float
) -> Response:
    """Make one attempt to send a request to a server inside; what the platform itself answers is raised."""
    positive("timeout", timeout)
    if not isinstance(method, str) or not _TOKEN.fullmatch(method):
        raise invalid(f"{method!r} is not a method of HTTP")
    pieces, length = _body(body)
    response = await api.http.stream(
        method.upper(),
        target,
        headers=_checked(headers or {}),
        body=pieces,
        length=length,
        wait=timeout,
        once=True,
        stall=timeout,
        inner=True,
    )
    if "dsec-error" not in response.head.headers:
        return response
    try:
        raise error_from_body(response.status, await response.read_all(MAX_ERROR_BODY))
    finally:
        response.close()


def _body(body: HttpBody | None) -> tuple[BodyFactory | None, int | None]:
    if body is None:
        return None, 0
    if isinstance(body, str):
        body = utf8("the body", body)
    if not isinstance(body, (bytes, bytearray, memoryview)):
        stream = body
        return lambda: stream, None
    data = bytes(body)

    async def pieces() -> AsyncIterator[bytes]:
        yield data

    return pieces, len(data)


def _checked(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str) or not _TOKEN.fullmatch(name):
            raise invalid(f"{name!r} is not a header's name")
        if any(c in value for c in "\r\n\0") or not value.isascii():
            raise invalid(f"the value of header {name} holds what no header can")
        if name.lower() in _OWN or name.lower().startswith("dsec-"):
            raise invalid(f"header {name} is not the caller's to set")
    return dict(headers)


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Undo what the platform did to the headers of an answer for the sake of browsers."""
    out = {k: v for k, v in headers.items() if k not in ("content-security-policy", "x-content-type-options")}
    for name, value in headers.items():
        if name.startswith(_INNER):
            out.pop(name)
            out[name[len(_INNER) :]] = value
    return out
