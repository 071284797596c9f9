"""Reads the tar archives that come from sandboxes, and unpacks them to local trees.

A sandbox may be hostile: nothing outside of the target is ever written or followed, whatever the names and links in an
archive are, and what is announced is bounded before it is made. Archives are read in the form that aether writes, and in
no other.
"""

from __future__ import annotations

import errno
import os
import secrets
import sys
from collections.abc import Callable, Generator

from ._errors import DataLossError, UnsupportedError
from ._tar import BLOCK, DIRECTORY, FIFO, FILE, LINK, MAX_DEPTH, MAX_EXTENDED, MAX_SEGMENTS, MAX_SIZE, SYMLINK, Entry, padding


def bad_archive(what: str) -> DataLossError:
    """Make the error for an archive that is none."""
    return DataLossError(f"the archive that came from the sandbox is broken: {what}", reason="bad_archive")


def unsafe(name: bytes, what: str) -> DataLossError:
    """Make the error for an entry that would leave the target."""
    return DataLossError(
        f"the archive's entry {name[:256]!r} {what}; nothing outside of the target was written", reason="unsafe_entry"
    )


# A sink takes an entry and returns what takes its content and, at its end, None.
Sink = Callable[[Entry], "Callable[[bytes | None], None] | None"]


class Reader:
    """Reads an archive that comes in pieces of any size, and gives its entries to a sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._steps = self._run()
        self._buffer = b""
        self._at = 0
        self._wanted = next(self._steps)
        self.ended = False
        self.size = 0

    def feed(self, piece: bytes) -> None:
        """Take the next piece."""
        self.size += len(piece)
        if self.ended:
            return
        self._buffer = self._buffer[self._at :] + piece if self._at < len(self._buffer) else piece
        self._at = 0
        try:
            # A negative wish is for at most so many bytes: content, which is passed on as it comes.
            while True:
                have = len(self._buffer) - self._at
                n = self._wanted if self._wanted >= 0 else min(have, -self._wanted)
                if have < n or (n == 0 and self._wanted < 0):
                    return
                chunk = self._buffer[self._at : self._at + n]
                self._at += n
                self._wanted = self._steps.send(chunk)
        except StopIteration:
            self.ended = True

    def finish(self) -> None:
        """Raise DataLossError if the archive is not complete."""
        if not self.ended:
            raise bad_archive("it ends before its end marker")

    def _run(self) -> Generator[int, bytes, None]:
        extended: dict[bytes, bytes] = {}
        while True:
            block = yield BLOCK
            if block == bytes(BLOCK):
                return
            e = _parse(block)
            if e.kind == b"x":
                if e.size > MAX_EXTENDED:
                    raise bad_archive("an extended header is too long")
                raw = (yield e.size + padding(e.size)) if e.size else b""
                extended = _records(raw[: e.size])
                continue
            if e.kind not in (FILE, LINK, SYMLINK, DIRECTORY, FIFO):
                raise bad_archive(f"an entry of type {e.kind!r}, which no sandbox sends")
            stored = e.size if e.kind == FILE else 0
            if extended:
                stored = _apply(e, extended, stored)
            pad = padding(stored)
            if e.data is not None:
                left = yield from self._map(e, stored)
                if left != sum(n for _, n in e.data):
                    raise bad_archive("the map of holes does not fit the content")
                stored = left
            extended = {}
            if e.size > MAX_SIZE:
                raise bad_archive("a file that is larger than any file can be")
            take = self._sink(e)
            while stored:
                piece = yield -stored
                stored -= len(piece)
                if take is not None:
                    take(piece)
            if take is not None:
                take(None)
            if pad:
                yield pad

    def _map(self, e: Entry, stored: int) -> Generator[int, bytes, int]:
        """Read the map of holes before a file's content; returns how much content follows."""
        text = b""
        numbers: list[int] = []
        wanted = 1
        while len(numbers) < wanted:
            if stored < BLOCK or len(text) > 40 * BLOCK:
                raise bad_archive("the map of holes is cut")
            text += yield BLOCK
            stored -= BLOCK
            *lines, text = text.split(b"\n")
            for line in lines:
                if len(numbers) < wanted:
                    if not line.isdigit() or len(line) > 18:
                        raise bad_archive("the map of holes holds no numbers")
                    numbers.append(int(line))
                    if len(numbers) == 1:
                        wanted = 1 + 2 * numbers[0]
                        if numbers[0] > MAX_SEGMENTS:
                            raise bad_archive("too many holes")
        e.data = []
        end = 0
        for offset, length in zip(numbers[1::2], numbers[2::2], strict=True):
            if offset < end or offset + length > e.size:
                raise bad_archive("the map of holes is out of order")
            end = offset + length
            if length:
                e.data.append((offset, length))
        return stored


def _number(raw: bytes) -> int:
    try:
        return int(raw.strip(b"\0 ") or b"0", 8)
    except ValueError:
        raise bad_archive("a header holds no number") from None


def _parse(block: bytes) -> Entry:
    if _number(block[148:156]) != sum(block) - sum(block[148:156]) + 256:
        raise bad_archive("a header's checksum is wrong")
    name, link = block[:100].rstrip(b"\0"), block[157:257].rstrip(b"\0")
    if b"\0" in name or b"\0" in link:
        raise bad_archive("a name with a NUL")
    return Entry(
        name, block[156:157], _number(block[100:108]) & 0o7777, _number(block[108:116]), _number(block[116:124]),
        _number(block[124:136]), _number(block[136:148]) * 10**9, link,
    )  # fmt: skip


def _records(raw: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    while raw:
        digits, _, _ = raw[:21].partition(b" ")
        size = int(digits) if digits.isdigit() else 0
        key, equals, value = raw[len(digits) + 1 : size - 1].partition(b"=")
        if not equals or size > len(raw) or raw[size - 1 : size] != b"\n":
            raise bad_archive("a record of an extended header")
        found[key] = value
        raw = raw[size:]
    return found


def _apply(e: Entry, extended: dict[bytes, bytes], stored: int) -> int:
    """Put extended records into an entry; returns how much is stored of it."""
    try:
        e.name = extended.get(b"path", e.name)
        e.link = extended.get(b"linkpath", e.link)
        if b"size" in extended and e.kind == FILE:
            stored = e.size = int(extended[b"size"])
        e.uid, e.gid = int(extended.get(b"uid", e.uid)), int(extended.get(b"gid", e.gid))
        if b"mtime" in extended:
            e.mtime_ns = _parse_time(extended[b"mtime"])
        if b"GNU.sparse.realsize" in extended:
            e.size, e.name, e.data = int(extended[b"GNU.sparse.realsize"]), extended[b"GNU.sparse.name"], []
    except (ValueError, KeyError):
        raise bad_archive("a record of an extended header") from None
    if stored < 0 or e.size < 0 or b"\0" in e.name or b"\0" in e.link:
        raise bad_archive("a record of an extended header")
    prefix = b"SCHILY.xattr."
    e.xattrs = [(k[len(prefix) :], v) for k, v in extended.items() if k.startswith(prefix)]
    return stored


def _parse_time(raw: bytes) -> int:
    whole, _, rest = raw.partition(b".")
    seconds, ns = int(whole), int((rest + b"000000000")[:9])
    if abs(seconds) > 1 << 40:
        raise ValueError(raw)
    return seconds * 10**9 + (-ns if whole.startswith(b"-") else ns)


def gather(e: Entry, keep: Callable[[bytes, bytes], None]) -> Callable[[bytes | None], None] | None:
    """Collect a file's content in memory, for ``keep``."""
    if e.kind != FILE:
        return None
    parts: list[bytes] = []

    def take(piece: bytes | None) -> None:
        if piece is not None:
            parts.append(piece)
        elif e.data is None:
            keep(e.name, b"".join(parts))
        else:
            whole, content, at = bytearray(e.size), b"".join(parts), 0
            for offset, length in e.data:
                whole[offset : offset + length] = content[at : at + length]
                at += length
            keep(e.name, bytes(whole))

    return take


class Unpacker:
    """Makes the entries of an archive below a local directory, or the one file of an archive under a given name.

    Every name is looked up one part at a time from the directory's own descriptor, and no link is followed: those that the
    archive makes lead nowhere while it is unpacked. Links that point outside of the target are left out and counted
    unless ``outside_links``. Owners and set-user-id bits are not restored.
    """

    def __init__(self, target: bytes, *, outside_links: bool = False, only: bytes | None = None) -> None:
        if os.open not in os.supports_dir_fd or os.mkdir not in os.supports_dir_fd:
            raise UnsupportedError("trees cannot be downloaded on this system; download files one by one", reason="no_dir_fd")
        self._only = only
        self._outside_links = outside_links
        self._temp = b".dsec-%s-" % secrets.token_hex(8).encode()
        self._count = 0
        self._dirs: list[tuple[bytes, int, Entry | None]] = [(b"", os.open(target, _DIRECTORY_FLAGS & ~_NOFOLLOW), None)]
        self._open: tuple[int, bytes] | None = None  # the file under way and its temporary name
        self.entries = 0
        self.skipped = 0

    def sink(self, e: Entry) -> Callable[[bytes | None], None] | None:
        """Make an entry; returns what takes its content."""
        parts = [p for p in e.name.split(b"/") if p not in (b"", b".")]
        if e.name.startswith(b"/") or b".." in parts:
            raise unsafe(e.name, "leads out of the target")
        if len(parts) > MAX_DEPTH:
            raise unsafe(e.name, "is too deep")
        if self._only is not None:
            if self.entries or e.kind == DIRECTORY or len(parts) != 1:
                raise unsafe(e.name, "is not the file that was asked for")
            parts = [self._only]
        if not parts:
            return None
        self.entries += 1
        if e.kind == DIRECTORY:
            self._enter(parts, e)
            return None
        self._enter(parts[:-1], None)
        try:
            return self._make(e, parts)
        except OSError as error:
            error.filename = os.fsdecode(e.name)
            raise

    def _make(self, e: Entry, parts: list[bytes]) -> Callable[[bytes | None], None] | None:
        base, at = parts[-1], self._dirs[-1][1]
        if e.kind == FILE:
            return self._file(e, base, at)
        temp = self._temporary()
        if e.kind == LINK:
            self._link(e, temp, at)
        elif e.kind == FIFO:
            os.mkfifo(temp, 0o600, dir_fd=at)
            os.chmod(temp, e.mode & 0o777, dir_fd=at)  # nobody else knows the name
            os.utime(temp, ns=(e.mtime_ns, e.mtime_ns), dir_fd=at)
        elif self._outside_links or _stays_inside(e.link, len(parts) - 1):
            os.symlink(e.link, temp, dir_fd=at)
            os.utime(temp, ns=(e.mtime_ns, e.mtime_ns), dir_fd=at, follow_symlinks=False)
        else:
            self.entries -= 1
            self.skipped += 1
            return None
        self._publish(temp, base, at)
        return None

    def _temporary(self) -> bytes:
        self._count += 1
        return self._temp + b"%d" % self._count

    def _publish(self, temp: bytes, base: bytes, at: int) -> None:
        try:
            os.rename(temp, base, src_dir_fd=at, dst_dir_fd=at)
        except IsADirectoryError:
            try:
                os.rmdir(base, dir_fd=at)
                os.rename(temp, base, src_dir_fd=at, dst_dir_fd=at)
            except OSError:
                os.unlink(temp, dir_fd=at)
                raise
        try:
            os.unlink(temp, dir_fd=at)  # still there if both were names of one file already
        except FileNotFoundError:
            pass

    def _file(self, e: Entry, base: bytes, at: int) -> Callable[[bytes | None], None]:
        temp = self._temporary()
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NOFOLLOW, 0o600, dir_fd=at)
        self._open = fd, temp
        segments = iter(e.data or [])
        left = 0  # of the segment under way

        def take(piece: bytes | None) -> None:
            nonlocal left
            if piece is None:
                self._complete(e, fd)
                self._open = None
                os.close(fd)
                self._publish(temp, base, at)
                return
            view = memoryview(piece)
            while view:
                if e.data is not None and left == 0:
                    offset, left = next(segments)
                    os.lseek(fd, offset, os.SEEK_SET)
                n = os.write(fd, view if e.data is None else view[:left])
                view = view[n:]
                left -= n

        return take

    @staticmethod
    def _complete(e: Entry, fd: int) -> None:
        if e.data is not None:
            os.ftruncate(fd, e.size)
        _set_xattrs(fd, e)
        os.fchmod(fd, e.mode & 0o777)
        os.utime(fd, ns=(e.mtime_ns, e.mtime_ns))

    def _link(self, e: Entry, temp: bytes, at: int) -> None:
        parts = [p for p in e.link.split(b"/") if p not in (b"", b".")]
        if e.link.startswith(b"/") or b".." in parts or not parts:
            raise unsafe(e.name, "links to what is not in the archive")
        source = os.dup(self._dirs[0][1])
        try:
            for part in parts[:-1]:
                above, source = source, -1
                try:
                    source = os.open(part, _DIRECTORY_FLAGS, dir_fd=above)
                finally:
                    os.close(above)
            os.link(parts[-1], temp, src_dir_fd=source, dst_dir_fd=at, follow_symlinks=False)
        except (NotADirectoryError, FileNotFoundError):
            raise unsafe(e.name, "links to what is not in the archive") from None
        finally:
            if source >= 0:
                os.close(source)

    def _enter(self, parts: list[bytes], entry: Entry | None) -> None:
        """Go to a directory, making what is missing."""
        same = 0
        while same < len(parts) and same + 1 < len(self._dirs) and self._dirs[same + 1][0] == parts[same]:
            same += 1
        self._leave(same + 1)
        for i in range(same, len(parts)):
            above = self._dirs[-1][1]
            self._dirs.append((parts[i], self._step(above, parts, i, entry is not None and i == len(parts) - 1), None))
        if entry is not None and parts:
            name, fd, _ = self._dirs[-1]
            self._dirs[-1] = name, fd, entry

    def _step(self, above: int, parts: list[bytes], i: int, own: bool) -> int:
        part = parts[i]
        for _ in range(2):
            try:
                return os.open(part, _DIRECTORY_FLAGS, dir_fd=above)
            except FileNotFoundError:
                os.mkdir(part, 0o700 if own else 0o777, dir_fd=above)
            except OSError as e:
                if e.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                if not own:
                    raise unsafe(
                        b"/".join(parts), f"leads through {os.fsdecode(part)!r}, which is a link or no directory"
                    ) from None
                os.unlink(part, dir_fd=above)
        return os.open(part, _DIRECTORY_FLAGS, dir_fd=above)

    def _leave(self, count: int) -> None:
        """Close directories until so many are left, and give them their attributes."""
        while len(self._dirs) > count:
            _, fd, entry = self._dirs.pop()
            try:
                if entry is not None:
                    _set_xattrs(fd, entry)
                    os.fchmod(fd, entry.mode & 0o777)
                    os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(fd)

    def finish(self) -> None:
        """Give the last directories their attributes."""
        self._leave(1)

    def close(self) -> None:
        """Let go of everything; a file under way is removed."""
        if self._open is not None:
            fd, temp = self._open
            self._open = None
            os.close(fd)
            try:
                os.unlink(temp, dir_fd=self._dirs[-1][1])
            except OSError:
                pass
        while self._dirs:
            os.close(self._dirs.pop()[1])


_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NOFOLLOW | getattr(os, "O_CLOEXEC", 0)


def _stays_inside(target: bytes, depth: int) -> bool:
    """Whether a symbolic link in a directory so deep in the target leads to somewhere in it.

    Only leading ".." count on real directories: one further behind may come after another link, and lead anywhere.
    """
    parts = [p for p in target.split(b"/") if p not in (b"", b".")]
    leading = 0
    while leading < len(parts) and parts[leading] == b"..":
        leading += 1
    return not target.startswith(b"/") and leading <= depth and b".." not in parts[leading:]


def _set_xattrs(fd: int, e: Entry) -> None:
    for name, value in e.xattrs:
        if sys.platform == "linux" and name.startswith(b"user."):
            try:
                os.setxattr(fd, name, value)
            except OSError:  # the local file system has none
                break
