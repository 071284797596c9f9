"""Files of a sandbox but for their content: what there is, what becomes of it, what happens to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Union

from .. import _aio as net
from .._errors import DSecError, FailedPreconditionError, NotFoundError, UnavailableError, about
from .._files import FileChange, FileEntry, FileEvent, FileEventKind, FilePath, path_field, path_fields
from .._models import bad_response, items, sub
from .._retry import Backoff
from .._wire import error_from_failure
from .api import Api

CHANGE_TIMEOUT = 3600.0


class FileWatch:
    """What happens in a directory: an async context manager and an async iterator of events.

    Everything after the beginning of the block is seen. It ends by an error: NotFoundError when the directory is gone,
    ResourceExhaustedError when there is too much to watch, UnavailableError when the connection broke. Leaving the block
    leaves nothing behind.
    """

    def __init__(self, api: Api, request: dict[str, Any]) -> None:
        self._api = api
        self._request = request
        self._messages: AsyncGenerator[dict[str, Any], None] | None = None
        self._pending: list[FileEvent] = []

    async def _open(self) -> None:
        backoff = Backoff(self._api.config.retry_seconds, None, net.monotonic)
        while True:
            messages = self._api.server_stream("WatchFiles", self._request, wait=0.0)
            with about(self._request["sandboxId"]):
                try:
                    first = await anext(messages)
                    if first.get("ready") is not True:
                        raise bad_response("a watch that does not begin")
                except StopAsyncIteration:
                    raise bad_response("a watch that does not begin") from None
                except DSecError as e:
                    pause = backoff.delay(e)
                else:
                    self._messages = messages
                    return
            await net.sleep(pause)

    async def aclose(self) -> None:
        """End the watch."""
        messages, self._messages = self._messages, None
        if messages is not None:
            await messages.aclose()

    async def __aenter__(self) -> FileWatch:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> FileWatch:
        return self

    async def __anext__(self) -> FileEvent:
        while not self._pending:
            if self._messages is None:
                raise StopAsyncIteration
            with about(self._request["sandboxId"]):
                try:
                    message = await anext(self._messages)
                except StopAsyncIteration:
                    raise UnavailableError("the platform ended the watch; begin a new one", reason="stream_cut") from None
            if message.get("overflow") is True:
                self._pending.append(FileEvent(FileEventKind.OVERFLOW, "", is_directory=False))
            self._pending += [FileEvent.from_wire(sub({"": e}, "")) for e in items(message, "events")]
            self._pending.reverse()
        return self._pending.pop()


class FileOperations:
    """The part of a Sandbox that is about files.

    Paths are absolute; ``user`` is with whose rights, None for those of the sandbox's user.
    """

    _api: Api

    @property
    def id(self) -> str:
        """Name of the sandbox."""
        raise NotImplementedError

    async def list_files(self, path: FilePath, *, depth: int = 1, user: str | None = None) -> AsyncIterator[FileEntry]:
        """Yield the entries of a directory as they are found, in no order.

        It is never short without an error, however many there are, and holds only a few of them at a time. A directory that
        may not be read is an error. Links are told, not followed; /proc, /sys and the like are not entered.

        Args:
            path: a directory.
            depth: how many levels; 1: its own entries, -1: all below.
            user: with whose rights.

        Raises:
            NotFoundError: no such directory.
            UnavailableError: the connection broke in the middle; list again.
        """
        request: dict[str, Any] = {"sandboxId": self.id, **path_field(path), "depth": depth}
        if user:
            request["user"] = user
        backoff = Backoff(self._api.config.retry_seconds, None, net.monotonic)
        begun = False
        while True:
            with about(self.id):
                try:
                    async with aclosing(self._api.server_stream("ListFiles", request, wait=0.0)) as messages:
                        async for message in messages:
                            for entry in items(message, "files"):
                                begun = True
                                yield FileEntry.from_wire(sub({"": entry}, ""))
                    return
                except DSecError as e:
                    if begun:
                        raise
                    pause = backoff.delay(e)
            await net.sleep(pause)

    async def stat_files(
        self, paths: Iterable[FilePath], *, follow: bool = False, user: str | None = None
    ) -> list[Union[FileEntry, DSecError]]:
        """Return what is known of each path (at most 10,000), or the error that tells why nothing is.

        Args:
            paths: files of any type.
            follow: links at the end of a path, too.
            user: with whose rights.
        """
        request: dict[str, Any] = {"sandboxId": self.id, **path_fields(paths), "follow": follow}
        if user:
            request["user"] = user
        with about(self.id):
            answer = await self._api.call("StatFiles", request)
        results: list[Union[FileEntry, DSecError]] = []
        for item in items(answer, "results"):
            result = sub({"": item}, "")
            failure = sub(result, "failure")
            results.append(error_from_failure(dict(failure)) if failure else FileEntry.from_wire(sub(result, "file")))
        if len(results) != len(request.get("paths") or request.get("rawPaths") or ()):
            raise bad_response("results of other files than were asked for")
        return results

    async def stat_file(self, path: FilePath, *, follow: bool = False, user: str | None = None) -> FileEntry:
        """Return what is known of a file; NotFoundError if there is none. See ``stat_files``."""
        result = (await self.stat_files([path], follow=follow, user=user))[0]
        if isinstance(result, DSecError):
            raise result
        return result

    async def file_exists(self, path: FilePath, *, user: str | None = None) -> bool:
        """Whether there is a file of any type at ``path``; a link that leads nowhere is none. ``user``: with whose rights."""
        try:
            await self.stat_file(path, follow=True, user=user)
        except NotFoundError as e:
            if e.reason != "file_not_found":  # the sandbox, or the user
                raise
            return False
        except FailedPreconditionError as e:
            if e.reason != "not_directory":
                raise
            return False
        return True

    async def change_files(
        self, changes: Sequence[FileChange], *, user: str | None = None, timeout: float = CHANGE_TIMEOUT
    ) -> None:
        """Make many changes (at most 10,000) in one request, in order, up to the first that fails.

        The error of one that fails has its position as ``facts["index"]``; those before it were made. Repeated, where a
        connection breaks, only if all of them can be repeated.

        Args:
            changes: see ``FileChange``.
            user: with whose rights, and whose what is made will be.
            timeout: seconds for all of it, after which the platform stops in the middle.
        """
        request: dict[str, Any] = {"sandboxId": self.id, "changes": [c.message for c in changes]}
        if user:
            request["user"] = user
        once = not all(c.repeatable for c in changes)
        with about(self.id):
            await self._api.call("ChangeFiles", request, wait=timeout, once=once)

    async def make_directory(
        self, path: FilePath, *, mode: int | None = None, parents: bool = False, user: str | None = None
    ) -> None:
        """Make a directory.

        Args:
            path: where.
            mode: permission bits. None: 0755.
            parents: also those above it; no error if it exists.
            user: with whose rights, and whose it will be.

        Raises:
            AlreadyExistsError: without ``parents``.
            NotFoundError: there is no directory above it, without ``parents``.
        """
        await self.change_files([FileChange.make_directory(path, mode=mode, parents=parents)], user=user)

    async def move_file(
        self,
        source: FilePath,
        target: FilePath,
        *,
        exclusive: bool = False,
        user: str | None = None,
        timeout: float = CHANGE_TIMEOUT,
    ) -> None:
        """Rename a file or directory. What has the new name is replaced, if it is a file or an empty directory.

        Where it cannot be renamed (another file system, or a directory of the image) it is copied exactly, under the new name
        only when complete, and then removed.

        Args:
            source, target: the old and the new name; never a directory to move into.
            exclusive: AlreadyExistsError if something has the new name.
            user: with whose rights.
            timeout: seconds for a move that has to copy.
        """
        await self.change_files([FileChange.move(source, target, exclusive=exclusive)], user=user, timeout=timeout)

    async def copy_file(
        self,
        source: FilePath,
        target: FilePath,
        *,
        recursive: bool = False,
        exclusive: bool = False,
        user: str | None = None,
        timeout: float = CHANGE_TIMEOUT,
    ) -> None:
        """Copy a file, or a tree, with modes, times, extended attributes, links and holes; as root with owners.

        Args:
            source: a link is followed; with ``recursive`` it is copied.
            target: the new name. A file there is replaced at once and whole; into a directory a tree is merged.
            recursive: also a directory with all below it.
            exclusive: AlreadyExistsError if something has the new name.
            user: with whose rights, and whose the copy will be.
            timeout: seconds for all of it.
        """
        change = FileChange.copy(source, target, recursive=recursive, exclusive=exclusive)
        await self.change_files([change], user=user, timeout=timeout)

    async def remove_file(
        self,
        path: FilePath,
        *,
        recursive: bool = False,
        missing_ok: bool = False,
        user: str | None = None,
        timeout: float = CHANGE_TIMEOUT,
    ) -> None:
        """Remove a file or an empty directory; with ``recursive`` also a directory with all below it.

        Args:
            path: what; a link itself, not what it leads to.
            recursive: also a directory that is not empty.
            missing_ok: no error if there is none.
            user: with whose rights.
            timeout: seconds for all of it.

        Raises:
            NotFoundError: without ``missing_ok``.
            FailedPreconditionError: ``directory_not_empty``, without ``recursive``.
        """
        await self.change_files(
            [FileChange.remove(path, recursive=recursive, missing_ok=missing_ok)], user=user, timeout=timeout
        )

    async def chmod(self, path: FilePath, mode: int, *, recursive: bool = False, user: str | None = None) -> None:
        """Set permission bits of ``path``, ``mode`` for example ``0o755``, with the rights of ``user``.

        With ``recursive`` of all below it, too, without following links.
        """
        await self.change_files([FileChange.chmod(path, mode, recursive=recursive)], user=user)

    async def chown(self, path: FilePath, owner: str, *, recursive: bool = False) -> None:
        """Set the owner of ``path``: name, uid, ``"name:group"`` or ``"uid:gid"``; with ``recursive`` of all below it, too."""
        await self.change_files([FileChange.chown(path, owner, recursive=recursive)])

    async def symlink(self, target: FilePath, path: FilePath, *, user: str | None = None) -> None:
        """Make a symbolic link at ``path`` that holds ``target``, which need not exist; it will belong to ``user``."""
        await self.change_files([FileChange.symlink(target, path)], user=user)

    async def hardlink(self, target: FilePath, path: FilePath, *, user: str | None = None) -> None:
        """Give the file ``target`` another name, ``path``, with the rights of ``user``."""
        await self.change_files([FileChange.hardlink(target, path)], user=user)

    def watch_files(self, path: FilePath, *, recursive: bool = False, user: str | None = None) -> FileWatch:
        """Watch a directory: ``async with sandbox.watch_files("/src", recursive=True) as events``.

        A directory that appears is watched from then on, and what it holds already is told as created. At most 8 watches of a
        sandbox at once, of 32,768 directories together.

        Args:
            path: a directory.
            recursive: also all directories below it, but for those that ``user`` may not read.
            user: with whose rights.

        Returns:
            A FileWatch. It begins, and raises what is wrong, when its ``async with`` block does.
        """
        request: dict[str, Any] = {"sandboxId": self.id, **path_field(path), "recursive": recursive}
        if user:
            request["user"] = user
        return FileWatch(self._api, request)
