"""Contents of a sandbox's files: one, many at once, and whole trees."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

from .. import _aio as net
from .._args import invalid
from .._errors import about
from .._files import permissions
from .._models import ArchiveResult
from .._tar import pack_contents
from .api import Api
from .transfer import Content, FileReader, open_file, quoted, upload
from .tree import Download, Files, contents_of, get_archive, local_file, local_tree, put_archive, raw_path, read_files


class FileContents:
    """The part of a sandbox that moves contents."""

    _api: Api

    @property
    def id(self) -> str:
        """Its name for ever."""
        raise NotImplementedError

    async def read_file(
        self,
        path: str | bytes | os.PathLike[str],
        offset: int = 0,
        length: int | None = None,
        *,
        user: str | None = None,
    ) -> bytes:
        """Return a file's content, or ``length`` bytes of it from ``offset`` (fewer where it ends before).

        Args:
            path: absolute; names that are not UTF-8 may be given as bytes.
            offset, length: bytes.
            user: with whose rights. None: the sandbox's.

        Raises:
            NotFoundError: no such file.
            PermissionDeniedError: the user may not read it.
        """
        async with await self.open_read(path, offset, length, user=user) as reader:
            return await reader.read()

    async def open_read(
        self,
        path: str | bytes | os.PathLike[str],
        offset: int = 0,
        length: int | None = None,
        *,
        user: str | None = None,
    ) -> FileReader:
        """Return a file that is open for reading piece by piece. See ``read_file``.

        A broken connection is taken up where it broke, unless the file has changed (UnavailableError, ``file_changed``).
        """
        if offset < 0 or (length is not None and length < 0):
            raise invalid("offset and length must not be negative")
        with about(self.id):
            return await open_file(self._api, self._file_target(path, user), offset, length)

    async def iter_file(
        self, path: str | bytes | os.PathLike[str], offset: int = 0, *, user: str | None = None
    ) -> AsyncIterator[bytes]:
        """Yield a file's content in pieces of at most about 256 KiB. See ``read_file``."""
        async with await self.open_read(path, offset, user=user) as reader:
            async for piece in reader:
                yield piece

    async def write_file(
        self,
        path: str | bytes | os.PathLike[str],
        data: Content,
        *,
        mode: int | None = None,
        user: str | None = None,
        make_parents: bool = False,
        exclusive: bool = False,
        offset: int | None = None,
        truncate: bool = False,
    ) -> None:
        """Write a file; what was there before is replaced at once and whole, or not at all.

        With ``offset`` the file itself is written to, and what is not written to stays as it is.

        Args:
            path: absolute; names that are not UTF-8 may be given as bytes.
            data: bytes, str (written as UTF-8), a local file as ``pathlib.Path``, or an asynchronous iterator of bytes.
            mode: permission bits, for example ``0o755``. None: 0644.
            user: who writes and owns it. None: the sandbox's.
            make_parents: create missing directories.
            exclusive: the file must not exist yet.
            offset: where to write to it, in bytes.
            truncate: with ``offset``: the file ends after the last byte written.

        Raises:
            ResourceExhaustedError: the sandbox's disk is full (``quota_exceeded``, ``no_space``, ``no_inodes``).
            AlreadyExistsError: with ``exclusive``.
            PermissionDeniedError: the user may not write there.
            DataLossError: the content did not arrive as it was sent.
        """
        target = self._write_target(path, user, mode, make_parents)
        if exclusive:
            target += "&exclusive=1"
        if offset is not None:
            if offset < 0:
                raise invalid("offset must not be negative")
            target += f"&offset={offset}" + ("&truncate=1" if truncate else "")
        elif truncate:
            raise invalid("truncate needs an offset; without one the file is replaced as a whole")
        with about(self.id):
            await upload(self._api, target, data, repeatable=not exclusive)

    async def write_files(self, files: Files, *, mode: int = 0o644, user: str | None = None) -> ArchiveResult:
        """Write many files in one request, making missing directories.

        Each file is replaced at once and whole. If something goes wrong, those before it are written.

        Args:
            files: paths (absolute) with their contents, or tuples of path, content and perhaps mode.
            mode: permission bits where none are given.
            user: who writes and owns them. None: the sandbox's.

        Returns:
            How many, and the size of the archive that carried them.

        Raises:
            InvalidArgumentError: with reason ``unsafe_entry``, if a link is on the way below the deepest directory that
                all files have in common.
            ResourceExhaustedError, PermissionDeniedError: as ``write_file``.
        """
        base, contents = contents_of(files, mode)
        target = self._archive_target(base, user) + "&parents=1&now=1"
        with about(self.id):
            return await put_archive(self._api, target, lambda packed: pack_contents(contents, packed))

    async def read_files(self, paths: Iterable[str | bytes | os.PathLike[str]], *, user: str | None = None) -> dict[Any, bytes]:
        """Return the contents of many files by their paths (absolute), in one request. See ``read_file``.

        Raises:
            NotFoundError: one does not exist; the text says which, and how many others could not be read.
        """
        target = f"/v1/sandboxes/{self.id}/archive"
        with about(self.id):
            return await read_files(self._api, f"{target}?user={quoted(user)}" if user else target, paths)

    async def upload(
        self,
        local: str | os.PathLike[str],
        remote: str | bytes | os.PathLike[str],
        *,
        user: str | None = None,
        keep_owners: bool = False,
    ) -> ArchiveResult:
        """Copy a local directory's content into a directory of the sandbox, or a local file to a path.

        Modes, times, links, ``user.`` attributes and holes are kept; links are never followed but for ``local`` itself.
        What is there is replaced file by file; directories are merged.

        Args:
            local: directory or file.
            remote: absolute; missing directories are made. A file goes into one that ends with "/".
            user: who writes and owns it. None: the sandbox's.
            keep_owners: keep the numbers of users and groups instead; only for root.

        Returns:
            What was sent; ``skipped`` counts local devices and sockets.

        Raises:
            FailedPreconditionError: a local file became shorter meanwhile (reason ``file_changed``), or a directory that is
                not empty is where a file should go (``directory_not_empty``).
            ResourceExhaustedError, PermissionDeniedError, InvalidArgumentError: as ``write_files``.
        """
        where = raw_path(remote)
        is_tree, make = await net.call(local_tree, local)
        if not is_tree and not where.endswith(b"/"):
            where, _, name = where.rpartition(b"/")
            make = local_file(local, name)
        target = self._archive_target(where or b"/", user) + "&parents=1" + ("&keep_owners=1" if keep_owners else "")
        with about(self.id):
            return await put_archive(self._api, target, make)

    async def download(
        self,
        remote: str | bytes | os.PathLike[str],
        local: str | os.PathLike[str],
        *,
        user: str | None = None,
        outside_links: bool = False,
    ) -> ArchiveResult:
        """Copy the content of a sandbox's directory into a local one, or a file to a local path (into one that is a directory).

        Modes, times, links, ``user.`` attributes and holes are kept, owners are not. Nothing outside of ``local`` is
        written or followed, whatever the sandbox sends. A link at ``remote`` itself is followed.

        Args:
            remote: absolute.
            local: missing directories are made.
            user: with whose rights it is read. None: the sandbox's.
            outside_links: keep symbolic links that lead out of ``local``; else they are left out and counted in ``skipped``.

        Returns:
            What came; ``changed`` counts files that changed while they were read.

        Raises:
            NotFoundError, PermissionDeniedError: also when all but some files has been copied; the text says which.
            FailedPreconditionError: a file became shorter while it was read (reason ``file_changed``).
            DataLossError: what came is no archive, or holds what leads out of ``local`` (reason ``unsafe_entry``).
            UnsupportedError: the local system cannot do it safely.
        """
        download = Download(local, outside_links=outside_links)
        with about(self.id):
            result = await get_archive(
                self._api, "GET", self._archive_target(raw_path(remote), user) + "&follow=1", b"", download.begin
            )
        return replace(result, skipped=result.skipped + download.skipped)

    def _archive_target(self, path: bytes, user: str | None) -> str:
        target = f"/v1/sandboxes/{self.id}/archive?path={quoted(path)}"
        return f"{target}&user={quoted(user)}" if user else target

    async def append_file(
        self,
        path: str | bytes | os.PathLike[str],
        data: Content,
        *,
        mode: int | None = None,
        user: str | None = None,
        make_parents: bool = False,
    ) -> None:
        """Add to the end of a file, which is made if there is none. See ``write_file``.

        It is never repeated: what had arrived when a connection broke is in the file.
        """
        target = self._write_target(path, user, mode, make_parents) + "&append=1"
        with about(self.id):
            await upload(self._api, target, data, repeatable=False, once=True)

    def _write_target(
        self, path: str | bytes | os.PathLike[str], user: str | None, mode: int | None, make_parents: bool
    ) -> str:
        target = self._file_target(path, user)
        if mode is not None:
            target += f"&mode={permissions(mode):04o}"
        return f"{target}&parents=1" if make_parents else target

    def _file_target(self, path: str | bytes | os.PathLike[str], user: str | None) -> str:
        target = f"/v1/sandboxes/{self.id}/files?path={quoted(path)}"
        return f"{target}&user={quoted(user)}" if user else target
