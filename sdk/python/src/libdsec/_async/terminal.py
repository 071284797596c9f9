"""Terminals: commands whose input, output and errors are one screen."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from .. import _aio as net
from .._args import window
from .._errors import DSecError
from .api import Api
from .command import Command, Stdin, decoded, input_of


class Terminal(Command):
    """A command at a terminal. Made by ``Sandbox.terminal`` and ``Sandbox.attach``.

    As an async context manager it is killed, if it still runs, at the end of the block. Without, it goes on when its client is
    gone, and can be attached to again.

    Attributes:
        offset: how much output ``read`` has returned: where reading goes on. It may be set, to read from elsewhere.
    """

    def __init__(self, api: Api, sandbox_id: str, command_id: str, stdin_size: int | None = None) -> None:
        super().__init__(api, sandbox_id, command_id, stdin_size)
        self.offset = 0
        self._pieces: AsyncGenerator[bytes, None] | None = None
        self._at = 0  # where _pieces is
        self._reading = net.Lock()

    def __repr__(self) -> str:
        return f"<Terminal {self.id} in {self.sandbox_id}>"

    async def read(self) -> bytes:
        """Return what was written since the last read, waiting for it; ``b""`` at the end of the command.

        A connection that breaks is made anew, and no byte is lost or comes twice; neither when a read is cancelled.

        Raises:
            NotFoundError: what is at ``offset`` is not kept any more (``output_dropped``); the fact ``next_offset`` says where
                it goes on.
        """
        async with self._reading:
            if self._at != self.offset:
                await self._stop_reading()
            if self._pieces is None:
                self._pieces, self._at = self.output("stdout", offset=self.offset, follow=True), self.offset
            try:
                piece = await anext(self._pieces, b"")
            except BaseException:
                self._pieces = None  # it has closed itself
                raise
            self._at += len(piece)
            self.offset = self._at
            return piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield pieces, as ``read`` returns them, until the end of the command."""
        while True:
            piece = await self.read()
            if not piece:
                return
            yield piece

    async def read_text(self) -> AsyncGenerator[str, None]:
        """Yield text, from ``offset`` until the end of the command; a character whose bytes come apart is not torn."""
        async with aclosing(decoded(self, "utf-8", "replace")) as texts:
            async for piece in texts:
                yield piece

    async def write(self, data: Stdin) -> bool:
        """Type ``data``: bytes, or text as UTF-8. Returns False if the command ended before it was given everything.

        It returns when the terminal has taken the bytes: a program that does not read makes it wait. As at every terminal, of a
        line longer than 4,095 bytes that a program reads as a line the rest is dropped by the kernel; not so in raw mode.
        """
        return await self._feed.send(input_of(data) or b"", close=False)

    async def resize(self, rows: int, cols: int) -> None:
        """Set the size of the window; programs in the foreground are told (SIGWINCH). ``rows``, ``cols``: 1 to 65,535 each."""
        message = {"sandboxId": self.sandbox_id, "commandId": self.id, **window(rows, cols)}
        await self._api.call("ResizeTerminal", message)

    async def close(self) -> None:
        """Give back the connection that reads, once a read that is under way is done.

        The command goes on, and so does the next ``read``.
        """
        async with self._reading:
            await self._stop_reading()

    async def _stop_reading(self) -> None:
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            await pieces.aclose()

    async def __aenter__(self) -> Terminal:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            await self.kill()
            await self.close()
        except DSecError as e:
            if exc_type is None:
                raise
            net.log.warning("could not end the terminal %s: %s", self.id, e)
