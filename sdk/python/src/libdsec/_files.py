"""What is known of files in a sandbox, and changes to them."""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Union

from ._args import invalid
from ._models import Message, number, text, time_of

FilePath = Union[str, bytes, "os.PathLike[str]"]
"""A path inside a sandbox, absolute. A name that is not UTF-8 is given as bytes, or as ``os.fsdecode`` escapes it."""


class FileType(str, Enum):
    """What a file is."""

    UNKNOWN = "unknown"
    REGULAR = "regular"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    CHARACTER_DEVICE = "character_device"
    BLOCK_DEVICE = "block_device"


_TYPES = {f"FILE_TYPE_{t.name}": t for t in FileType}


@dataclass(frozen=True)
class FileEntry:
    """A file in a sandbox, as ``lstat`` tells of it.

    Attributes:
        path: absolute; in a listing relative to the directory. Bytes that are not UTF-8 are escaped as by ``os.fsdecode``,
            and ``os.fsencode`` gives them back.
        size: bytes.
        mode: permission bits and setuid, setgid, sticky.
        uid, gid: owner, as seen inside.
        modified_at: last change of its content (UTC).
        link_target: what a symbolic link holds, else ``""``.
        allocated_bytes: on disk: less than ``size`` where there are holes.
        links: how many names it has.
        inode: number of the file in its file system: names of one file have the same.
    """

    path: str
    type: FileType
    size: int
    mode: int
    uid: int
    gid: int
    modified_at: datetime | None
    link_target: str
    allocated_bytes: int
    links: int
    inode: int

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.type is FileType.REGULAR

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return self.type is FileType.DIRECTORY

    @property
    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return self.type is FileType.SYMLINK

    @staticmethod
    def from_wire(message: Message) -> FileEntry:
        """Read dsec.v1.FileInfo."""
        return FileEntry(
            path=_name(message, "path", "rawPath"),
            type=_TYPES.get(text(message, "type"), FileType.UNKNOWN),
            size=number(message, "size"),
            mode=number(message, "mode"),
            uid=number(message, "uid"),
            gid=number(message, "gid"),
            modified_at=time_of(message, "modifiedAt"),
            link_target=_name(message, "linkTarget", "rawLinkTarget"),
            allocated_bytes=number(message, "allocatedBytes"),
            links=number(message, "links"),
            inode=number(message, "inode"),
        )


def _name(message: Message, key: str, raw: str) -> str:
    escaped = text(message, raw)
    return b64decode(escaped).decode("utf-8", "surrogateescape") if escaped else text(message, key)


class FileEventKind(str, Enum):
    """What happened. After ``OVERFLOW`` events were lost: look again at what matters."""

    UNKNOWN = "unknown"
    CREATED = "created"
    CHANGED = "changed"
    REMOVED = "removed"
    MOVED_FROM = "moved_from"
    MOVED_TO = "moved_to"
    ATTRIBUTES = "attributes"
    OVERFLOW = "overflow"


_KINDS = {f"FILE_EVENT_KIND_{k.name}": k for k in FileEventKind}


@dataclass(frozen=True)
class FileEvent:
    """Something that happened in a watched directory. ``path`` is relative to it; ``""`` is itself."""

    kind: FileEventKind
    path: str
    is_directory: bool

    @staticmethod
    def from_wire(message: Message) -> FileEvent:
        """Read dsec.v1.FileEvent."""
        kind = _KINDS.get(text(message, "kind"), FileEventKind.UNKNOWN)
        return FileEvent(kind, _name(message, "path", "rawPath"), message.get("directory") is True)


def path_bytes(path: FilePath) -> bytes:
    """Return a path as its bytes. Names that are not UTF-8 are given as bytes, or as what listings tell of them."""
    raw = os.fspath(path)
    if isinstance(raw, str):
        try:
            raw = raw.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise invalid(f"the path {path!r} is not valid Unicode", "invalid_path") from None
    if not raw or b"\0" in raw:
        raise invalid(f"the path {path!r} is empty or holds a NUL", "invalid_path")
    return raw


def path_field(path: FilePath, field: str = "path") -> dict[str, Any]:
    """Return the field of a message that holds a path: ``field``, or where it is not UTF-8 its raw form."""
    raw = path_bytes(path)
    try:
        return {field: raw.decode()}
    except UnicodeDecodeError:
        return {f"raw{field[0].upper()}{field[1:]}": b64encode(raw).decode()}


def path_fields(paths: Iterable[FilePath]) -> dict[str, Any]:
    """Return the field of a message that holds many paths."""
    raw = [path_bytes(p) for p in paths]
    try:
        return {"paths": [p.decode() for p in raw]}
    except UnicodeDecodeError:
        return {"rawPaths": [b64encode(p).decode() for p in raw]}


def permissions(mode: int) -> int:
    """Check permission bits."""
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o7777:
        raise invalid("mode must be permission bits between 0 and 0o7777")
    return mode


@dataclass(frozen=True)
class FileChange:
    """One change of files, for ``Sandbox.change_files``. Made by the static methods.

    Attributes:
        message: dsec.v1.FileChange.
        repeatable: made twice, it is as if it was made once.
    """

    message: dict[str, Any]
    repeatable: bool

    @staticmethod
    def make_directory(path: FilePath, *, mode: int | None = None, parents: bool = False) -> FileChange:
        """Make a directory; with ``parents`` also those above it, and no error if it exists. See ``Sandbox.make_directory``."""
        body: dict[str, Any] = {**path_field(path), "parents": parents}
        if mode is not None:
            body["mode"] = permissions(mode)
        return FileChange({"makeDirectory": body}, parents)

    @staticmethod
    def move(source: FilePath, target: FilePath, *, exclusive: bool = False) -> FileChange:
        """Rename a file or directory; ``target`` is its new name, not a directory to move into. See ``Sandbox.move_file``."""
        return FileChange({"move": {**path_field(source, "from"), **path_field(target, "to"), "exclusive": exclusive}}, False)

    @staticmethod
    def copy(source: FilePath, target: FilePath, *, recursive: bool = False, exclusive: bool = False) -> FileChange:
        """Copy a file or, with ``recursive``, a tree. See ``Sandbox.copy_file``."""
        body = {**path_field(source, "from"), **path_field(target, "to"), "recursive": recursive, "exclusive": exclusive}
        return FileChange({"copy": body}, not exclusive)

    @staticmethod
    def remove(path: FilePath, *, recursive: bool = False, missing_ok: bool = False) -> FileChange:
        """Remove a file, an empty directory or, with ``recursive``, a tree. See ``Sandbox.remove_file``."""
        return FileChange({"remove": {**path_field(path), "recursive": recursive, "missingOk": missing_ok}}, missing_ok)

    @staticmethod
    def chmod(path: FilePath, mode: int, *, recursive: bool = False) -> FileChange:
        """Set permission bits. See ``Sandbox.chmod``."""
        return FileChange({"setMode": {**path_field(path), "mode": permissions(mode), "recursive": recursive}}, True)

    @staticmethod
    def chown(path: FilePath, owner: str, *, recursive: bool = False) -> FileChange:
        """Set the owner: name, uid, ``"name:group"`` or ``"uid:gid"``. See ``Sandbox.chown``."""
        return FileChange({"setOwner": {**path_field(path), "owner": str(owner), "recursive": recursive}}, True)

    @staticmethod
    def symlink(target: FilePath, path: FilePath) -> FileChange:
        """Make a symbolic link at ``path`` that holds ``target``."""
        return FileChange({"makeLink": {**path_field(target, "target"), **path_field(path)}}, False)

    @staticmethod
    def hardlink(target: FilePath, path: FilePath) -> FileChange:
        """Give the file ``target`` another name, ``path``."""
        return FileChange({"makeLink": {**path_field(target, "target"), **path_field(path), "hard": True}}, False)
