"""The same names as ``_aio`` without ``async``: what the generated synchronous client stands on.

Sockets are non-blocking and waited for by ``poll``, so that one thread can send while it watches for an early answer,
and so that every wait has a deadline. A connection is used by one thread at a time; ``Slots`` is thread-safe.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import BinaryIO, TypeVar

from ._config import Endpoint

log = logging.getLogger("libdsec")

T = TypeVar("T")

IS_ASYNC = False

monotonic = time.monotonic
sleep = time.sleep
Lock = threading.Lock

# What ends an operation from outside: its clean-up is done, then it is raised again.
INTERRUPTS: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit)
FAILURES: tuple[type[BaseException], ...] = (*INTERRUPTS, Exception)

READ_BUFFER = 256 << 10


def scope() -> object:
    """Return what connections belong to: those of the process before a fork are of no use here."""
    return os.getpid()


class Stream:
    """One connection. Made by ``connect``; used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @property
    def readable(self) -> bool:
        """Whether bytes or the end have come: on an idle connection, that it is of no more use."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        try:
            return _wait_for(self._sock, read=True, write=False, timeout=0)
        except (OSError, ValueError):
            return True

    def read(self, deadline: float) -> bytes:
        """Return bytes as soon as there are some, ``b""`` at the end."""
        if not (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()):
            self._wait(deadline, write=False)
        while True:
            try:
                return self._sock.recv(READ_BUFFER)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(deadline, write=False)
            except ssl.SSLWantWriteError:
                self._wait(deadline, read=False)
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    def write(self, data: bytes | memoryview, deadline: float) -> bool:
        """Send bytes. Returns early, with False, when the peer has something to say, which may be a refusal of the rest."""
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(deadline)
                if self.readable and not _wait_for(self._sock, read=False, write=True, timeout=0):
                    return False
            except ssl.SSLWantReadError:
                self._wait(deadline, write=False)
        return True

    def close(self) -> None:
        """Close at once, whatever is under way."""
        self._sock.close()

    def _wait(self, deadline: float, *, read: bool = True, write: bool = True) -> None:
        try:
            ready = _wait_for(self._sock, read=read, write=write, timeout=max(0.0, deadline - monotonic()))
        except ValueError:  # closed under our feet
            raise ConnectionResetError("the connection was closed") from None
        if not ready:
            raise TimeoutError("no progress within the time allowed")


def _wait_for(sock: socket.socket, *, read: bool, write: bool, timeout: float) -> bool:
    if not hasattr(select, "poll"):  # not a Unix
        r, w, _ = select.select([sock] if read else [], [sock] if write else [], [], timeout)
        return bool(r or w)
    poll = select.poll()
    poll.register(sock, (select.POLLIN if read else 0) | (select.POLLOUT if write else 0))
    return bool(poll.poll(timeout * 1000))


def connect(endpoint: Endpoint, context: ssl.SSLContext | None, timeout: float) -> Stream:
    """Open a connection; ``context`` is given for TLS."""
    sock = _open(endpoint, context, timeout)
    sock.setblocking(False)
    return Stream(sock)


def _open(endpoint: Endpoint, context: ssl.SSLContext | None, timeout: float) -> socket.socket:
    try:
        return _opened(endpoint, context, timeout)
    except TimeoutError:
        raise TimeoutError(f"no connection within {timeout:g} s (connect_timeout)") from None


def _opened(endpoint: Endpoint, context: ssl.SSLContext | None, timeout: float) -> socket.socket:
    if endpoint.unix_path is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout)
    try:
        sock.settimeout(timeout)
        if endpoint.unix_path is not None:
            sock.connect(endpoint.unix_path)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=endpoint.host)
    except BaseException:
        sock.close()
        raise
    return sock


class Duplex:
    """A connection that one thread reads while another writes. Made by ``open_duplex`` and ``listen``."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()  # TLS takes one caller at a time
        sock.setblocking(False)

    def _attempt(self, f: Callable[[], T], timeout: float | None = None) -> T:
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            try:
                with self._lock:
                    return f()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as e:
                write = f == self._send or isinstance(e, ssl.SSLWantWriteError)
            left = 1.0 if deadline is None else min(1.0, deadline - monotonic())
            if left <= 0:
                raise TimeoutError("nothing came")
            try:
                _wait_for(self._sock, read=not write, write=write, timeout=left)
            except ValueError:
                raise ConnectionResetError("the connection was closed") from None

    def read(self, limit: int, timeout: float | None = None) -> bytes:
        """Return bytes as soon as there are some, ``b""`` at the end; TimeoutError if there is neither in ``timeout`` s."""
        try:
            return self._attempt(lambda: self._sock.recv(limit), timeout)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    def _send(self) -> int:
        return self._sock.send(self._out)

    def write(self, data: bytes) -> None:
        """Send all of it."""
        self._out = memoryview(data)
        while self._out:
            self._out = self._out[self._attempt(self._send) :]

    def write_eof(self) -> None:
        """Say that nothing follows."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close, in order."""
        with contextlib.suppress(OSError):  # wakes who reads in another thread
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def abort(self) -> None:
        """Close so that the peer sees that it was cut."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._sock.close()


def open_duplex(endpoint: Endpoint, context: ssl.SSLContext | None, timeout: float) -> Duplex:
    """Open a connection that is read and written at the same time."""
    return Duplex(_open(endpoint, context, timeout))


def together(*jobs: Callable[[], None]) -> None:
    """Run jobs at the same time and return when all have ended. The first error is raised."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(job,), name="libdsec", daemon=True) for job in jobs[1:]]
    for thread in threads:
        thread.start()
    run(jobs[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Listener:
    """Accepts connections on a local port and serves each by ``serve`` in threads, until it is closed."""

    def __init__(self, serve: Callable[[Duplex], None]) -> None:
        self._serve = serve
        self._sock: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._open: set[Duplex] = set()

    def open(self, host: str, port: int) -> int:
        """Listen, and return the port."""
        self._sock = socket.create_server((host, port))
        thread = threading.Thread(target=self._accept, args=(self._sock,), name="libdsec", daemon=True)
        self._threads.append(thread)
        thread.start()
        return int(self._sock.getsockname()[1])

    def _accept(self, sock: socket.socket) -> None:
        while True:
            try:
                conn, _ = sock.accept()
            except OSError:
                return
            duplex = Duplex(conn)
            self._open.add(duplex)
            threading.Thread(target=self._run, args=(duplex,), name="libdsec", daemon=True).start()

    def _run(self, duplex: Duplex) -> None:
        try:
            self._serve(duplex)
        finally:
            self._open.discard(duplex)

    def close(self) -> None:
        """End the listening and all connections."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            self._sock.close()
        for thread in self._threads:
            thread.join()
        for duplex in list(self._open):
            duplex.close()


class Slots:
    """A bound on what is in use at once, for all threads. First come, first served."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._lock = threading.Lock()
        self._waiters: collections.deque[threading.Event] = collections.deque()

    @property
    def free(self) -> int:
        """How many may be taken at once."""
        return self._free

    def acquire(self, deadline: float | None) -> None:
        """Wait for a slot; TimeoutError at the deadline, if there is one."""
        with self._lock:
            if self._free > 0 and not self._waiters:
                self._free -= 1
                return
            waiter = threading.Event()
            self._waiters.append(waiter)
        given = False
        try:
            given = waiter.wait(None if deadline is None else max(0.0, deadline - monotonic()))
        finally:
            if not given:
                self._give_up(waiter)
        if not given:
            raise TimeoutError("no connection became free within request_timeout; see max_connections")

    def _give_up(self, waiter: threading.Event) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                return
        self.release()  # it was given a slot at the last moment

    def release(self) -> None:
        """Give a slot back."""
        with self._lock:
            if self._waiters:
                self._waiters.popleft().set()
            else:
                self._free += 1


def shielded(job: Callable[[float], None], limit: float) -> None:
    """Do clean-up. Errors are logged. A second Ctrl-C ends it; the job is told when its time is over, and keeps to that."""
    try:
        job(monotonic() + limit)
    except Exception as e:
        log.warning("clean-up failed: %r", e)


def as_completed(jobs: Sequence[Callable[[], T]], limit: int) -> Generator[T, None, None]:
    """Run jobs in threads, at most ``limit`` at once, and yield results as they come.

    After a job's exception, or when the iterator is closed, no further job begins; those that run end on their own. The
    threads are daemons: a process that was interrupted does not wait for them.
    """
    waiting = collections.deque(jobs)
    results: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                job = waiting.popleft()
            except IndexError:
                return
            try:
                results.put((job(), None))
            except BaseException as e:
                results.put((None, e))

    for _ in range(min(limit, len(jobs))):
        threading.Thread(target=work, name="libdsec", daemon=True).start()
    try:
        for _ in jobs:
            result, error = results.get()
            if error is not None:
                raise error
            yield result  # type: ignore[misc]
    finally:
        waiting.clear()


def breathe() -> None:
    """Nothing: threads run by themselves."""


def read_block(file: BinaryIO, size: int) -> bytes:
    """Read from a local file."""
    return file.read(size)


def write_block(file: BinaryIO, data: bytes) -> None:
    """Write to a local file."""
    file.write(data)


def call(function: Callable[..., T], *args: object) -> T:
    """Call what works on local files."""
    return function(*args)
