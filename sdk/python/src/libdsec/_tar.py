"""Packs local trees, and contents at hand, as tar archives.

What is written is ustar with POSIX extended headers where something does not fit, and holes in GNU's form 1.0; ``_untar``
reads that.

It is not the standard library's tarfile: that takes 100 microseconds a file, and cannot write holes.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ._errors import FailedPreconditionError, InvalidArgumentError

BLOCK = 512
PIECE = 256 << 10
END = bytes(2 * BLOCK)
MAX_EXTENDED = 1 << 20
MAX_SEGMENTS = 1 << 16
MAX_SIZE = 1 << 44
MAX_DEPTH = 512
_MAX_OCTAL = 0o77777777777
_MAX_ID = 0o7777777

FILE, LINK, SYMLINK, DIRECTORY, FIFO = b"0", b"1", b"2", b"5", b"6"


@dataclass
class Entry:
    """One entry of an archive. ``data`` are offsets and lengths of a file's data, None if it has no holes."""

    name: bytes
    kind: bytes = FILE
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    size: int = 0
    mtime_ns: int = 0
    link: bytes = b""
    xattrs: list[tuple[bytes, bytes]] = field(default_factory=list)
    data: list[tuple[int, int]] | None = None


def padding(size: int) -> int:
    """Return how many zeros fill up the last block of so many bytes."""
    return -size % BLOCK


def _record(key: bytes, value: bytes) -> bytes:
    rest = len(key) + len(value) + 3
    size = rest + 1
    while size != rest + len(str(size)):
        size = rest + len(str(size))
    return b"%d %s=%s\n" % (size, key, value)


def _block(name: bytes, kind: bytes, mode: int, uid: int, gid: int, size: int, mtime: int, link: bytes = b"") -> bytes:
    head = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0" % (name[:100].ljust(100, b"\0"), mode, uid, gid, size, mtime)
    tail = kind + link[:100].ljust(100, b"\0") + b"ustar\x0000"
    total = sum(head) + sum(tail) + 256  # the sum's own field counts as spaces
    return b"%b%06o\0 %b%b" % (head, total, tail, _REST)


_REST = bytes(BLOCK - 265)


def _time(ns: int) -> bytes:
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    whole, rest = divmod(ns, 10**9)
    return (f"{sign}{whole}.{rest:09d}" if rest else f"{sign}{whole}").encode()


def header(e: Entry) -> bytes:
    """Return an entry's header, with the map of its holes."""
    records: list[bytes] = []
    name, stored, table = e.name, e.size if e.kind == FILE else 0, b""
    if e.data is not None:
        lines = [len(e.data) + 1, *(n for pair in e.data for n in pair), e.size, 0]
        table = b"".join(b"%d\n" % n for n in lines)
        table += bytes(padding(len(table)))
        stored = len(table) + sum(n for _, n in e.data)
        records += [_record(b"GNU.sparse.major", b"1"), _record(b"GNU.sparse.minor", b"0")]
        records += [_record(b"GNU.sparse.name", name), _record(b"GNU.sparse.realsize", b"%d" % e.size)]
        name = b"GNUSparseFile.0/" + name.rpartition(b"/")[2]
    elif len(name) > 100:
        records.append(_record(b"path", name))
    if len(e.link) > 100:
        records.append(_record(b"linkpath", e.link))
    uid, gid, size, mtime = e.uid, e.gid, stored, e.mtime_ns // 10**9
    if uid > _MAX_ID:
        records.append(_record(b"uid", b"%d" % uid))
        uid = 0
    if gid > _MAX_ID:
        records.append(_record(b"gid", b"%d" % gid))
        gid = 0
    if size > _MAX_OCTAL:
        records.append(_record(b"size", b"%d" % size))
        size = 0
    if e.mtime_ns % 10**9 or not 0 <= mtime <= _MAX_OCTAL:
        records.append(_record(b"mtime", _time(e.mtime_ns)))
        mtime = min(max(mtime, 0), _MAX_OCTAL)
    records += [_record(b"SCHILY.xattr." + k, v) for k, v in e.xattrs]
    block = _block(name, e.kind, e.mode, uid, gid, size, mtime, e.link)
    if not records:
        return block + table
    extended = b"".join(records)
    if len(extended) > MAX_EXTENDED:
        raise InvalidArgumentError(
            f"{e.name!r} has more extended attributes than an archive can hold", reason="too_many_attributes"
        )
    short = b"PaxHeaders.0/" + e.name.rstrip(b"/").rpartition(b"/")[2]
    return b"".join((_block(short, b"x", 0o644, 0, 0, len(extended), 0), extended, bytes(padding(len(extended))), block, table))


@dataclass
class Packed:
    """What was packed, to compare with what was unpacked."""

    entries: int = 0
    size: int = 0
    skipped: int = 0

    def sent(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Pass pieces on and count them."""
        for piece in pieces:
            self.size += len(piece)
            yield piece


def pack_contents(files: Iterable[tuple[bytes, bytes, int]], packed: Packed) -> Iterator[bytes]:
    """Yield the archive of files given as name, content and mode, in pieces of about 256 KiB."""
    parts: list[bytes] = []
    size = 0
    for name, content, mode in files:
        if len(name) <= 100:
            parts.append(_block(name, FILE, mode, 0, 0, len(content), 0))
        else:
            parts.append(header(Entry(name, FILE, mode, size=len(content))))
        parts.append(content)
        parts.append(bytes(padding(len(content))))
        packed.entries += 1
        size += len(content) + BLOCK
        if size >= PIECE:
            yield b"".join(parts)
            parts.clear()
            size = 0
    parts.append(END)
    yield b"".join(parts)


class Packer:
    """Packs a local tree, or one file, without following links."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed
        self._links: dict[tuple[int, int], bytes] = {}

    def tree(self, root: bytes) -> Iterator[bytes]:
        """Yield the archive of a directory's content."""
        yield from self._directory(root, b"", 0)
        yield END

    def file(self, path: bytes, name: bytes) -> Iterator[bytes]:
        """Yield the archive of one file, link or FIFO, under a name."""
        yield from self._one(path, name, os.stat(path))
        yield END

    def _directory(self, path: bytes, prefix: bytes, depth: int) -> Iterator[bytes]:
        if depth > MAX_DEPTH:
            raise InvalidArgumentError(f"{os.fsdecode(path)} is more than {MAX_DEPTH} directories deep", reason="too_deep")
        with os.scandir(path) as found:
            names = sorted(entry.name for entry in found)
        for base in names:
            full = os.path.join(path, base)
            st = os.lstat(full)
            yield from self._one(full, prefix + base, st)
            if stat.S_ISDIR(st.st_mode):
                yield from self._directory(full, prefix + base + b"/", depth + 1)

    def _one(self, path: bytes, name: bytes, st: os.stat_result) -> Iterator[bytes]:
        kind = _KINDS.get(stat.S_IFMT(st.st_mode))
        if kind is None:  # a device or a socket
            self._packed.skipped += 1
            return
        e = Entry(name, kind, stat.S_IMODE(st.st_mode), st.st_uid, st.st_gid, 0, st.st_mtime_ns)
        self._packed.entries += 1
        if kind != DIRECTORY and st.st_nlink > 1:
            first = self._links.setdefault((st.st_dev, st.st_ino), name)
            if first is not name:
                e.kind, e.link = LINK, first
                yield header(e)
                return
        if kind == FILE:
            yield from self._content(path, e)
            return
        if kind == SYMLINK:
            e.link = os.readlink(path)
        elif kind == DIRECTORY:
            e.name += b"/"
            e.xattrs = _xattrs(path)
        yield header(e)

    def _content(self, path: bytes, e: Entry) -> Iterator[bytes]:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as f:
            st = os.fstat(fd)
            e.size, e.mtime_ns, e.xattrs = st.st_size, st.st_mtime_ns, _xattrs(fd)
            if getattr(st, "st_blocks", st.st_size) * 512 < st.st_size:
                e.data = _segments(fd, st.st_size)
            parts = [header(e)]
            held = stored = 0
            for offset, length in [(0, e.size)] if e.data is None else e.data:
                f.seek(offset)
                stored += length
                while length:
                    piece = f.read(min(length, PIECE))
                    if not piece:
                        raise FailedPreconditionError(
                            f"{os.fsdecode(path)} became shorter while it was read", reason="file_changed"
                        )
                    length -= len(piece)
                    parts.append(piece)
                    held += len(piece)
                    if held >= PIECE:
                        yield b"".join(parts)
                        parts.clear()
                        held = 0
            parts.append(bytes(padding(stored)))
            yield b"".join(parts)


_KINDS = {stat.S_IFREG: FILE, stat.S_IFLNK: SYMLINK, stat.S_IFDIR: DIRECTORY, stat.S_IFIFO: FIFO}


def _xattrs(where: bytes | int) -> list[tuple[bytes, bytes]]:
    if sys.platform != "linux":
        return []
    try:
        return [(os.fsencode(k), os.getxattr(where, k)) for k in os.listxattr(where) if k.startswith("user.") and "=" not in k]
    except OSError:  # the file system has none
        return []


def _segments(fd: int, size: int) -> list[tuple[int, int]] | None:
    """Return where the data of a file with holes is, None if that cannot be told."""
    if not hasattr(os, "SEEK_DATA"):
        return None
    found: list[tuple[int, int]] = []
    offset = 0
    while offset < size:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:  # only a hole is left
                break
            return None
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if end <= start or len(found) == MAX_SEGMENTS - 1:
            return None
        found.append((start, end - start))
        offset = end
    return found


def coalesced(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces to ones of about 256 KiB."""
    parts: list[bytes] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size >= PIECE:
            yield b"".join(parts)
            parts.clear()
            size = 0
    if parts:
        yield b"".join(parts)
