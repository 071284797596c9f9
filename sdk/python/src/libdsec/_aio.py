"""What the asynchronous client needs of its surroundings: connections, waiting, clean-up, concurrency.

``_sio`` offers the same names without ``async``; everything above is written once against both. Deadlines are
absolute, on ``time.monotonic``. Connections raise ConnectionError and TimeoutError, nothing else.

A connection is an asyncio.Protocol, not a StreamReader: at thousands of small requests a second the difference is a
third of the processor time. It has one timer, which is moved lazily: most requests end long before their deadline, so a
timer each would be set and cancelled for nothing.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import BinaryIO, TypeVar

from ._config import Endpoint

log = logging.getLogger("libdsec")

T = TypeVar("T")

IS_ASYNC = True

monotonic = time.monotonic
sleep = asyncio.sleep
Lock = asyncio.Lock

# What ends an operation from outside: its clean-up is done, then it is raised again.
INTERRUPTS: tuple[type[BaseException], ...] = (asyncio.CancelledError, KeyboardInterrupt)
FAILURES: tuple[type[BaseException], ...] = (*INTERRUPTS, Exception)

READ_BUFFER = 256 << 10


def scope() -> object:
    """Return what connections belong to: those of another event loop are of no use here."""
    return asyncio.get_running_loop()


class Stream(asyncio.Protocol):
    """One connection. Made by ``connect``; used by one task at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._pending = b""
        self._reading_paused = False
        self._writing_paused = False
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._pending = self._pending + data if self._pending else data
        if len(self._pending) > READ_BUFFER and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """Called by asyncio; the transport closes itself."""
        self._ended = True
        self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._ended = True
        self._error = exc
        self._writing_paused = False
        self._wake()
        self._disarm()

    def pause_writing(self) -> None:
        """Called by asyncio."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Called by asyncio."""
        self._writing_paused = False
        self._wake()

    # The user's side.

    @property
    def readable(self) -> bool:
        """Whether bytes or the end have come: on an idle connection, that it is of no more use."""
        return bool(self._pending) or self._ended

    async def read(self, deadline: float) -> bytes:
        """Return bytes as soon as there are some, ``b""`` at the end."""
        while not self._pending:
            if self._ended:
                if self._error is not None:
                    raise ConnectionResetError(str(self._error)) from self._error
                return b""
            await self._wait(deadline)
        data, self._pending = self._pending, b""
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()
        return data

    async def write(self, data: bytes | memoryview, deadline: float) -> bool:
        """Send bytes. Returns early, with False, when the peer has something to say, which may be a refusal of the rest."""
        # asyncio drops what is written to a transport that has failed, without a word.
        if self._ended or self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the connection was closed by the server")
        self._transport.write(data)
        while self._writing_paused and not self.readable:
            await self._wait(deadline)
        return not self._writing_paused

    def close(self) -> None:
        """Close at once, whatever is under way."""
        self._ended = True
        self._disarm()
        if self._transport is not None and not self._loop.is_closed():
            self._transport.abort()
        elif self._transport is not None:  # its loop can do nothing any more, but the peer shall know
            with contextlib.suppress(OSError):
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            self._transport = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self, deadline: float) -> None:
        self._deadline = deadline
        if self._timer is None or self._timer.when() > deadline:
            self._disarm()
            self._timer = self._loop.call_at(deadline, self._on_timer)
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _on_timer(self) -> None:
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._loop.time() >= self._deadline - 0.001:
            waiter.set_exception(TimeoutError("no progress within the time allowed"))
        else:
            self._timer = self._loop.call_at(self._deadline, self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def connect(endpoint: Endpoint, context: ssl.SSLContext | None, timeout: float) -> Stream:
    """Open a connection; ``context`` is given for TLS."""
    loop = asyncio.get_running_loop()

    def factory() -> Stream:
        return Stream(loop)

    if endpoint.unix_path is not None:
        dial: Awaitable[tuple[asyncio.BaseTransport, Stream]] = loop.create_unix_connection(factory, endpoint.unix_path)
    else:
        dial = loop.create_connection(factory, endpoint.host, endpoint.port, ssl=context)
    try:
        _, stream = await asyncio.wait_for(dial, timeout)
    except asyncio.TimeoutError:
        raise TimeoutError(f"no connection within {timeout:g} s (connect_timeout)") from None
    return stream


class Duplex:
    """A connection that one task reads while another writes. Made by ``open_duplex`` and ``listen``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, limit: int, timeout: float | None = None) -> bytes:
        """Return bytes as soon as there are some, ``b""`` at the end; TimeoutError if there is neither in ``timeout`` s."""
        try:
            return await asyncio.wait_for(self._reader.read(limit), timeout)
        except asyncio.TimeoutError:
            raise TimeoutError("nothing came") from None

    async def write(self, data: bytes) -> None:
        """Send all of it."""
        self._writer.write(data)
        await self._writer.drain()

    async def write_eof(self) -> None:
        """Say that nothing follows."""
        self._writer.write_eof()

    def close(self) -> None:
        """Close, in order."""
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._writer.close()

    def abort(self) -> None:
        """Close so that the peer sees that it was cut."""
        sock = self._writer.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        with contextlib.suppress(RuntimeError):
            self._writer.transport.abort()


async def open_duplex(endpoint: Endpoint, context: ssl.SSLContext | None, timeout: float) -> Duplex:
    """Open a connection that is read and written at the same time."""
    if endpoint.unix_path is not None:
        dial = asyncio.open_unix_connection(endpoint.unix_path)
    else:
        dial = asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    try:
        return Duplex(*await asyncio.wait_for(dial, timeout))
    except asyncio.TimeoutError:
        raise TimeoutError(f"no connection within {timeout:g} s (connect_timeout)") from None


async def together(*jobs: Callable[[], Awaitable[None]]) -> None:
    """Run jobs at the same time and return when all have ended. The first error ends the others and is raised."""
    tasks = [asyncio.ensure_future(job()) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Listener:
    """Accepts connections on a local port and serves each by ``serve``, until it is closed."""

    def __init__(self, serve: Callable[[Duplex], Awaitable[None]]) -> None:
        self._serve = serve
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> int:
        """Listen, and return the port."""
        self._server = await asyncio.start_server(self._accept, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(Duplex(reader, writer))
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)

    async def close(self) -> None:
        """End the listening and all connections."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Slots:
    """A bound on what is in use at once. First come, first served."""

    def __init__(self, limit: int) -> None:
        self._free = limit  # none while somebody waits
        self._waiters: collections.deque[asyncio.Future[None]] = collections.deque()

    @property
    def free(self) -> int:
        """How many may be taken at once."""
        return self._free

    async def acquire(self, deadline: float | None) -> None:
        """Wait for a slot; TimeoutError at the deadline, if there is one."""
        if self._free > 0 and not self._waiters:
            self._free -= 1
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.append(waiter)
        timer = None if deadline is None else loop.call_at(deadline, _expire, waiter)
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release()  # it was given a slot while it was being cancelled
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def release(self) -> None:
        """Give a slot back."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError("no connection became free within request_timeout; see max_connections"))


async def shielded(job: Callable[[float], Awaitable[None]], limit: float) -> None:
    """Do clean-up to its end, whatever is cancelled meanwhile, but for at most ``limit`` seconds. Errors are logged.

    The job is told when its time is over. A cancellation that came meanwhile is raised at the end.
    """
    cancelled = False
    task = asyncio.ensure_future(asyncio.wait_for(job(monotonic() + limit), limit))
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
        except Exception:
            break
    if task.cancelled():
        log.warning("clean-up was cancelled")
    elif task.exception() is not None:
        log.warning("clean-up failed: %r", task.exception())
    if cancelled:
        raise asyncio.CancelledError


async def as_completed(jobs: Sequence[Callable[[], Awaitable[T]]], limit: int) -> AsyncGenerator[T, None]:
    """Run jobs, at most ``limit`` at once, and yield results as they come.

    A job's exception ends the others. So does closing the iterator; all have ended when it has.
    """
    waiting = iter(jobs)
    running: set[asyncio.Future[T]] = set()
    try:
        while True:
            for job in waiting:
                running.add(asyncio.ensure_future(job()))
                if len(running) >= limit:
                    break
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            while done:
                yield done.pop().result()
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.gather(*running, return_exceptions=True)


async def breathe() -> None:
    """Let other tasks run, and connections notice what has come."""
    await asyncio.sleep(0)


async def read_block(file: BinaryIO, size: int) -> bytes:
    """Read from a local file without holding up the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, file.read, size)


async def write_block(file: BinaryIO, data: bytes) -> None:
    """Write to a local file without holding up the event loop."""
    await asyncio.get_running_loop().run_in_executor(None, file.write, data)


async def call(function: Callable[..., T], *args: object) -> T:
    """Call what works on local files without holding up the event loop. A cancelled caller waits for its end all the same."""
    job = asyncio.get_running_loop().run_in_executor(None, function, *args)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait([job])
        raise
