"""Many files at once: trees up and down, and lists of small files, each in one request.

They travel as tar archives, which aether packs and unpacks inside. A transfer that breaks is begun again: what was there
already is written over.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Union

from .. import _aio as net
from .._args import invalid, utf8
from .._errors import DataLossError, DSecError
from .._files import path_bytes, permissions
from .._models import ArchiveResult, bad_response, number
from .._retry import Backoff
from .._tar import LINK, Entry, Packed, Packer, coalesced
from .._untar import Reader, Sink, Unpacker, gather, unsafe
from .._wire import decode, error_from_body
from .api import Api
from .http import Response

MAX_ANSWER = 1 << 20
MAX_NAMES = 1 << 20  # bytes of names asked for in one request

AnyPath = Union[str, bytes, "os.PathLike[str]"]
Files = Union[
    "Mapping[Any, str | bytes]",
    "Iterable[tuple[AnyPath, str | bytes] | tuple[AnyPath, str | bytes, int]]",
]
"""Files to write: paths with their contents (text as UTF-8), or tuples of path, content and perhaps mode."""


def raw_path(path: AnyPath) -> bytes:
    """Return an absolute path of a sandbox as bytes."""
    raw = path_bytes(path)
    if not raw.startswith(b"/") or b".." in raw.split(b"/"):
        raise invalid(f'the path {path!r} is not absolute, or holds ".."', "invalid_path")
    return raw


def contents_of(files: Files, mode: int) -> tuple[bytes, list[tuple[bytes, bytes, int]]]:
    """Return the directory that all files are below, and their names there with contents and modes."""
    items: Iterable[Any] = files.items() if isinstance(files, Mapping) else files
    found: list[tuple[bytes, bytes, int]] = []
    for item in items:
        path, content, bits = item if len(item) == 3 else (*item, mode)
        if isinstance(content, str):
            content = utf8(f"the content of {path!r}", content)
        if not isinstance(content, (bytes, bytearray, memoryview)):
            raise invalid(f"the content of {path!r} is a {type(content).__name__}; give bytes or str", "invalid_content")
        raw = posixpath.normpath(raw_path(path))
        if raw.endswith(b"/") or os.fspath(path)[-1:] in ("/", b"/"):
            raise invalid(f"the path {path!r} is that of a directory", "invalid_path")
        found.append((raw, bytes(content), permissions(bits)))
    if not found:
        return b"/", []
    base = posixpath.commonpath({posixpath.dirname(raw) for raw, _, _ in found}).replace(b"//", b"/")
    skip = len(base.rstrip(b"/")) + 1
    return base, [(raw[skip:], content, bits) for raw, content, bits in found]


async def put_archive(api: Api, target: str, make: Callable[[Packed], Iterator[bytes]]) -> ArchiveResult:
    """Send an archive, made anew for each attempt, and check that all of it was unpacked."""
    backoff = Backoff(api.config.retry_seconds, None, net.monotonic)
    packed = Packed()

    async def body() -> AsyncIterator[bytes]:
        nonlocal packed
        packed = Packed()
        pieces = packed.sent(make(packed))
        while True:
            piece = await net.call(next, pieces, b"")
            if not piece:
                return
            yield piece

    while True:
        try:
            response = await api.bytes_request("PUT", target, body=body, length=None, wait=60.0)
            answer = decode(await response.read_all(MAX_ANSWER))
        except DSecError as e:
            pause = backoff.delay(e)
        else:
            break
        await net.sleep(pause)
    entries, size = number(answer, "entries"), number(answer, "bytes")
    if (entries, size) != (packed.entries, packed.size):
        raise DataLossError(
            f"{packed.entries} entries in {packed.size} bytes were sent, and {entries} in {size} unpacked",
            reason="content_mismatch",
        )
    return ArchiveResult(packed.entries, packed.size, packed.skipped, 0)


async def get_archive(
    api: Api, method: str, target: str, body: bytes, begin: Callable[[], tuple[Sink, Callable[[bool], None]]]
) -> ArchiveResult:
    """Read an archive into a sink.

    Args:
        api: where from.
        method: of HTTP.
        target: path and query.
        body: of the request.
        begin: makes a sink for each attempt, and what is called at its end: with whether all has come.
    """
    backoff = Backoff(api.config.retry_seconds, None, net.monotonic)

    async def whole() -> AsyncIterator[bytes]:
        yield body

    while True:
        try:
            response = await api.bytes_request(
                method,
                target,
                headers={"TE": "trailers", "Connection": "TE"},
                body=whole if body else None,
                length=len(body),
                wait=30.0,
            )
            return await _read(response, begin)
        except DSecError as e:
            pause = backoff.delay(e)
        await net.sleep(pause)


async def _read(response: Response, begin: Callable[[], tuple[Sink, Callable[[bool], None]]]) -> ArchiveResult:
    end: Callable[[bool], None] | None = None
    complete = False
    try:
        if response.head.until_close:
            raise bad_response("an archive without a length, whose end cannot be told from a cut")
        sink, end = begin()
        reader = Reader(sink)
        while True:
            piece = await response.read()
            if not piece:
                break
            await net.call(reader.feed, piece)
        problem = response.header("dsec-error")
        if problem:
            if reader.ended:  # all that could be packed is here, and is kept
                complete = True
            raise error_from_body(200, problem.encode("latin-1"))
        reader.finish()
        complete = True
        told = response.header("dsec-archive")
        answer = decode(told.encode("latin-1")) if told else {}
    finally:
        response.close()
        if end is not None:
            await net.call(end, complete)
    return ArchiveResult(number(answer, "entries"), reader.size, number(answer, "skipped"), number(answer, "changed"))


async def read_files(api: Api, target: str, paths: Iterable[AnyPath]) -> dict[Any, bytes]:
    """Read many files, each given request by as many names as fit."""
    names: dict[bytes, Any] = {}
    found: dict[bytes, bytes] = {}
    size = 0
    for path in paths:
        raw = raw_path(path)
        names[raw] = path
        size += len(raw) + 1
        if size >= MAX_NAMES:
            found |= await _read_some(api, target, list(names)[len(found) :])
            size = 0
    if size:
        found |= await _read_some(api, target, list(names)[len(found) :])
    return {path: found[raw] for raw, path in names.items()}


async def _read_some(api: Api, target: str, names: list[bytes]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    if not names:
        return found

    def begin() -> tuple[Sink, Callable[[bool], None]]:
        found.clear()
        return lambda e: gather(e, found.__setitem__), lambda complete: None

    await get_archive(api, "POST", target, b"\0".join(names) + b"\0", begin)
    missing = [name for name in names if name not in found]
    if missing:
        raise DataLossError(f"{len(missing)} files did not come, the first is {missing[0]!r}", reason="content_mismatch")
    return found


def local_tree(local: AnyPath) -> tuple[bool, Callable[[Packed], Iterator[bytes]]]:
    """Return whether a local path is a directory, and what packs it: its content, or the file under its own name."""
    raw = os.fsencode(local)
    if os.path.isdir(raw):
        return True, lambda packed: coalesced(Packer(packed).tree(raw))
    os.stat(raw)  # raises what is wrong here, not in the middle of a request
    return False, lambda packed: coalesced(Packer(packed).file(raw, os.path.basename(raw)))


def local_file(local: AnyPath, name: bytes) -> Callable[[Packed], Iterator[bytes]]:
    """Return what packs a local file under another name."""
    raw = os.fsencode(local)
    return lambda packed: coalesced(Packer(packed).file(raw, name))


class Download:
    """Puts what comes to a local path: a directory's content into it, a file to it, or into it if it is a directory."""

    def __init__(self, local: AnyPath, *, outside_links: bool) -> None:
        self._local = os.fsencode(local)
        self._outside_links = outside_links
        self._unpacker: Unpacker | None = None
        self._prefix = b""
        self._top: Entry | None = None
        self.skipped = 0

    def begin(self) -> tuple[Sink, Callable[[bool], None]]:
        """Begin, or begin again."""
        self._unpacker, self._prefix, self._top, self.skipped = None, b"", None, 0
        return self._sink, self._end

    def _sink(self, e: Entry) -> Callable[[bytes | None], None] | None:
        if self._unpacker is None:
            if e.name.endswith(b"/"):
                os.makedirs(self._local, exist_ok=True)
                self._prefix, self._top = e.name, e
                self._unpacker = Unpacker(self._local, outside_links=self._outside_links)
                return None
            above, base = os.path.split(self._local)
            if not base or os.path.isdir(self._local):
                above, base = self._local, e.name
            os.makedirs(above or b".", exist_ok=True)
            self._unpacker = Unpacker(above or b".", outside_links=self._outside_links, only=base)
            if b"/" in base or base in (b"", b".", b".."):
                raise unsafe(e.name, "is no name of a file")
        if self._prefix:
            if not e.name.startswith(self._prefix):
                raise unsafe(e.name, "is not below what was asked for")
            e.name = e.name[len(self._prefix) :]
            if e.kind == LINK:
                if not e.link.startswith(self._prefix):
                    raise unsafe(e.name, "links to what is not in the archive")
                e.link = e.link[len(self._prefix) :]
        return self._unpacker.sink(e)

    def _end(self, complete: bool) -> None:
        if self._unpacker is None:
            return
        try:
            if complete:
                self._unpacker.finish()
                if self._top is not None:
                    os.chmod(self._local, self._top.mode & 0o777)
                    os.utime(self._local, ns=(self._top.mtime_ns, self._top.mtime_ns))
        finally:
            self.skipped = self._unpacker.skipped
            self._unpacker.close()
