"""Commands: started with an id of the client's making, waited for, fed, fetched and killed by it.

The id is what makes a broken connection harmless: the request is repeated, and finds the command that the first attempt
started. One request waits ``command_poll_seconds`` for the end; then the next one takes over, so that no hidden limit
ends a command of many hours.
"""

from __future__ import annotations

import codecs
import secrets
from binascii import b2a_base64
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Union

from .. import _aio as net
from .._args import MAX_INLINE_STDIN, invalid, utf8
from .._errors import (
    CanceledError,
    CommandFailedError,
    DSecError,
    DSecTimeoutError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from .._http1 import Head
from .._models import CommandResult, Output, bad_response, command_result, number
from .._retry import Backoff
from .._wire import decode
from .api import Api
from .transfer import Download

if TYPE_CHECKING:
    from typing import TypeGuard

STDIN_BLOCK = 1 << 20
MAX_ANSWER = 1 << 20

# What says that input was lost on the platform, or never wanted: to go on would feed the command something else.
LOST_INPUT = ("stdin_gap", "no_stdin")

# A kill may overtake the request that starts the command, on another connection; then it is tried again.
KILL_DELAYS = (0.05, 0.2, 0.5)

Stdin = Union[bytes, bytearray, memoryview, str, AsyncIterable[bytes]]
"""What can be a command's standard input: bytes, text (as UTF-8), or pieces as they are made."""

Input = Union[bytes, AsyncIterable[bytes]]
"""The same, once it has been checked."""


def new_id() -> str:
    """Return a fresh id for a command or an idempotency key."""
    return secrets.token_hex(16)


class Command:
    """A command that was started and not waited for.

    Attributes:
        id: names it in its sandbox.
        sandbox_id: the sandbox.
    """

    def __init__(self, api: Api, sandbox_id: str, command_id: str, stdin_size: int | None = None) -> None:
        self._api = api
        self._feed = Feed(api, sandbox_id, command_id, stdin_size)
        self.sandbox_id = sandbox_id
        self.id = command_id
        self.known_since = 0.0  # Unix time, with doubt: it did not end before. For DSecClient.as_completed

    def __repr__(self) -> str:
        return f"<Command {self.id} in {self.sandbox_id}>"

    async def wait(self, *, check: bool = False) -> CommandResult:
        """Wait for the end and return the result with all output that is kept.

        Cancelling the wait leaves the command running: use ``kill``.

        Raises:
            CommandFailedError: ``check`` is true and the exit code is not 0.
        """
        while True:
            message = await self._get(self._api.poll_seconds)
            if not message.get("running"):
                return await finish(self._api, self.sandbox_id, message, check=check)

    async def poll(self) -> CommandResult:
        """Return the state as it is now, with the head (64 KiB) of its output so far."""
        return command_result(await self._get(0))[0]

    async def kill(self, signal: int = 0) -> None:
        """End the whole process tree; a ``signal`` other than 0 goes to the command's process group instead.

        A signal is sent once: after UnavailableError or DSecTimeoutError it may have arrived, or not.
        """
        await kill(self._api, self.sandbox_id, self.id, signal)

    async def write_stdin(self, data: Stdin, *, close: bool = True) -> bool:
        """Write ``data`` to standard input of a command started with ``stdin_open=True``, and close it.

        With ``close=False`` more may be written by further calls. What is written goes behind what the platform had when this
        object was made, or first wrote: only one at a time may do so.

        Returns False if the command ended or closed its input before everything was written.

        Raises:
            FailedPreconditionError: an earlier write failed or was interrupted (``stdin_interrupted``): how much of it
                the command got is not known.
        """
        return await self._feed.send(input_of(data) or b"", close=close)

    async def output(
        self,
        stream: str = "stdout",
        *,
        offset: int = 0,
        tail: int | None = None,
        tail_lines: int | None = None,
        since: datetime | float | None = None,
        follow: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """Yield what is kept of an output, and with ``follow`` what comes until the command ends.

        Where several arguments say where it begins, the last of these places counts. A connection that breaks is made anew, for
        up to ``retry_seconds`` without any answer, and the output goes on where it was.

        Args:
            stream: ``"stdout"`` or ``"stderr"``.
            offset: in bytes.
            tail: at most so many bytes before what is there now.
            tail_lines: the same in lines.
            since: what was written from then on: a datetime with a time zone, or seconds since 1970. The platform knows times
                to one second, or 1/64 of the time in which the command has been writing; output may begin so much earlier.
            follow: go on to the command's end.

        Raises:
            NotFoundError: the middle of a long output is not kept (reason ``output_dropped``); the fact ``next_offset`` says
                where it goes on.
        """
        if stream not in ("stdout", "stderr"):
            raise invalid("stream must be stdout or stderr")
        first = f"?offset={_count(offset, 'offset')}"
        if tail is not None:
            first += f"&tail={_count(tail, 'tail')}"
        if tail_lines is not None:
            first += f"&tail_lines={_count(tail_lines, 'tail_lines')}"
        if since is not None:
            first += f"&since={_milliseconds(since)}"
        async with aclosing(_output(self._api, self.sandbox_id, self.id, stream, first, follow)) as pieces:
            async for piece in pieces:
                yield piece

    async def iter_stdout(self, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield standard output as it is written, from a byte offset, until the command ends."""
        async with aclosing(self.output("stdout", offset=offset, follow=True)) as pieces:
            async for piece in pieces:
                yield piece

    async def iter_text(
        self, stream: str = "stdout", *, offset: int = 0, encoding: str = "utf-8", errors: str = "replace"
    ) -> AsyncGenerator[str, None]:
        """Yield an output as text as it is written, until the command ends; a character whose bytes come apart is not torn.

        Args:
            stream: ``"stdout"`` or ``"stderr"``.
            offset: in bytes.
            encoding, errors: as of ``bytes.decode``.
        """
        async with (
            aclosing(self.output(stream, offset=offset, follow=True)) as pieces,
            aclosing(decoded(pieces, encoding, errors)) as texts,
        ):
            async for piece in texts:
                yield piece

    async def iter_stderr(self, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield standard error, see ``iter_stdout``."""
        async with aclosing(self.output("stderr", offset=offset, follow=True)) as pieces:
            async for piece in pieces:
                yield piece

    async def _get(self, wait: float) -> dict[str, Any]:
        return await get_command(self._api, self.sandbox_id, self.id, wait)


async def decoded(pieces: AsyncIterable[bytes], encoding: str, errors: str) -> AsyncGenerator[str, None]:
    """Decode a stream of bytes, whose pieces begin and end anywhere."""
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    async for piece in pieces:
        if text := decoder.decode(piece):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


async def run(
    api: Api, sandbox_id: str, command_id: str, command: dict[str, Any], stdin: Input | None, *, check: bool
) -> CommandResult:
    """Run a command to its end. If the caller is interrupted, the command's process tree is killed.

    So it is if its input fails, for whatever reason: nobody would ever close that input. If the platform cannot be
    reached, the command runs on, and the error's facts say which it is.
    """
    kill_surely = partial(_kill_surely, api, sandbox_id, command_id)
    begun = feeding = False
    fed = True
    try:
        message = await start(api, sandbox_id, command_id, command, stdin, wait=api.poll_seconds)
        begun = True
        if needs_feeding(stdin):
            feeding = True
            fed = await Feed(api, sandbox_id, command_id).send(stdin, close=True)
            feeding = False
        while message.get("running"):
            message = await get_command(api, sandbox_id, command_id, api.poll_seconds)
        return await finish(api, sandbox_id, message if fed else {**message, "stdinBroken": True}, check=check)
    except DSecError as e:
        if feeding:
            await net.shielded(partial(kill_surely, ()), api.config.cleanup_seconds)
        name_command(e, command_id)
        raise
    except net.FAILURES:
        await net.shielded(partial(kill_surely, () if begun else KILL_DELAYS), api.config.cleanup_seconds)
        raise


def name_command(error: DSecError, command_id: str) -> None:
    """Say in an error's facts which command it leaves behind, where it may be running."""
    if isinstance(error, (UnavailableError, DSecTimeoutError)):
        error.facts.setdefault("command_id", command_id)


def needs_feeding(stdin: Input | None) -> TypeGuard[Input]:
    """Whether input is sent after the command's start; what is short goes with it."""
    if isinstance(stdin, bytes):
        return len(stdin) > MAX_INLINE_STDIN
    return stdin is not None


async def start(
    api: Api, sandbox_id: str, command_id: str, command: dict[str, Any], stdin: Input | None, *, wait: float
) -> dict[str, Any]:
    """Start a command, wait up to ``wait`` seconds for its end unless it is to be fed; returns CommandResult's message."""
    if needs_feeding(stdin):
        command = {**command, "stdinFollows": True}
        wait = 0.0
    elif isinstance(stdin, bytes):
        command = {**command, "stdin": b2a_base64(stdin, newline=False).decode("ascii")}
    request = {"sandboxId": sandbox_id, "commandId": command_id, "command": command, "waitSeconds": wait}
    return _result(await api.call("Exec", request, wait=wait, patient=True))


def input_of(stdin: object) -> Input | None:
    """Check what was given as input; text becomes bytes."""
    if isinstance(stdin, str):
        return utf8("the text for stdin", stdin)
    if stdin is None or isinstance(stdin, (bytes, AsyncIterable)):
        return stdin
    if isinstance(stdin, (bytearray, memoryview)):
        return bytes(stdin)
    raise invalid("stdin must be bytes, str or an asynchronous iterator of bytes")


async def get_command(api: Api, sandbox_id: str, command_id: str, wait: float) -> dict[str, Any]:
    """Wait up to ``wait`` seconds for a command's end; returns CommandResult's message."""
    request = {"sandboxId": sandbox_id, "commandId": command_id, "waitSeconds": wait}
    return _result(await api.call("GetCommand", request, wait=wait, patient=True))


def _result(answer: dict[str, Any]) -> dict[str, Any]:
    result = answer.get("result")
    if not isinstance(result, dict):
        raise bad_response("it holds no result")
    return result


async def finish(api: Api, sandbox_id: str, message: dict[str, Any], *, check: bool) -> CommandResult:
    """Turn the message of a command that has ended into its result, with the rest of its output."""
    result, stdout, stderr = command_result(message)
    if not stdout.complete:
        result.stdout_bytes = await _fetch(api, sandbox_id, result.command_id, "stdout", stdout)
    if not stderr.complete:
        result.stderr_bytes = await _fetch(api, sandbox_id, result.command_id, "stderr", stderr)
    if check and not result.ok:
        raise CommandFailedError(_failure(result), result=result, sandbox_id=sandbox_id)
    return result


def _failure(result: CommandResult) -> str:
    if result.no_output:
        how = "wrote nothing for too long and was killed"
    elif result.timed_out:
        how = "ran out of time and was killed"
    elif result.oom_killed:
        how = "ran out of the sandbox's memory and was killed"
    elif result.signal:
        how = f"was ended by {result.signal_name or result.signal}"
    else:
        how = f"exited with {result.exit_code}"
    tail = result.stderr_bytes[-1000:].decode("utf-8", "replace").strip()
    return f"the command {how}" + (f"; its standard error ends with: {tail}" if tail else "")


async def _fetch(api: Api, sandbox_id: str, command_id: str, name: str, output: Output) -> bytes:
    """Get what is kept beyond the head that came with the answer; between head and tail the middle may be missing."""
    parts = [output.data]
    ranges = [
        (len(output.data), output.head_size - len(output.data)),
        (output.size - output.tail_size, output.tail_size),
    ]
    for offset, length in ranges:
        if length == 0:
            continue
        download = Download(api, _output_target(sandbox_id, command_id, name), offset, length)
        have = 0
        try:
            while True:
                piece = await download.read()
                if not piece:
                    break
                parts.append(piece)
                have += len(piece)
        finally:
            download.close()
        if have != length:
            raise bad_response(f"{name} of {length} bytes from {offset} on has only {have}")
    return b"".join(parts)


def _output_target(sandbox_id: str, command_id: str, name: str) -> Callable[[int], str]:
    return lambda offset: f"/v1/sandboxes/{sandbox_id}/commands/{command_id}/{name}?offset={offset}"


def _count(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 60:
        raise invalid(f"{name} must be a number of at least 0")
    return value


def _milliseconds(since: object) -> int:
    if isinstance(since, datetime):
        if since.tzinfo is None:
            raise invalid("since must be a datetime with a time zone, or seconds since 1970")
        since = since.timestamp()
    if not isinstance(since, (int, float)) or isinstance(since, bool) or not 0 <= since < 1 << 40:
        raise invalid("since must be a datetime with a time zone, or seconds since 1970")
    return int(since * 1000)


async def _output(
    api: Api, sandbox_id: str, command_id: str, name: str, first: str, follow: bool
) -> AsyncGenerator[bytes, None]:
    """Yield an output. Where it begins the first answer says; the further ones go on behind what was got.

    No request waits longer than ``poll_seconds`` in silence: then it is asked again, and a connection that has died is
    noticed.
    """
    path = f"/v1/sandboxes/{sandbox_id}/commands/{command_id}/{name}"
    begun = False

    def target(offset: int) -> str:
        query = f"?offset={offset}" if begun else first
        return path + query + (f"&follow=1&wait={api.poll_seconds:g}" if follow else "")

    def start(head: Head) -> None:
        nonlocal begun
        if not begun:
            text = head.headers.get("dsec-offset", "")
            if not text.isdigit():
                raise bad_response("it does not say where the output begins")
            download.position, begun = int(text), True

    stall = api.config.command_poll_seconds + api.config.stall_timeout if follow else None
    download = Download(api, target, 0, None, start, follow=follow, stall=stall)
    try:
        while True:
            piece = await download.read()
            if not piece:
                return
            yield piece
    finally:
        download.close()


class Feed:
    """Writes a command's standard input in blocks, each at its offset, so that a repetition writes nothing twice.

    The first offset is what the platform has; None: it is asked.
    """

    def __init__(self, api: Api, sandbox_id: str, command_id: str, offset: int | None = 0) -> None:
        self._api = api
        self._sandbox_id = sandbox_id
        self._command_id = command_id
        self._lock = net.Lock()
        self._offset = offset
        self._under_way = False

    async def send(self, data: Input, *, close: bool) -> bool:
        """Write after what was written before; False if the command ended or closed its input before the end."""
        async with self._lock:
            if self._offset is None:
                message = await get_command(self._api, self._sandbox_id, self._command_id, 0)
                self._offset = number(message, "stdinSize")
            async for block, final in _blocks(data):
                if self._under_way:
                    raise FailedPreconditionError(
                        "an earlier write was interrupted, and how much of it the command got is not known; kill the command",
                        reason="stdin_interrupted",
                        sandbox_id=self._sandbox_id,
                    )
                self._under_way = True
                taken = await _put_stdin(
                    self._api, self._sandbox_id, self._command_id, self._offset, block, close=close and final
                )
                self._under_way = False
                if not taken:
                    return False
                self._offset += len(block)
        return True


async def _blocks(data: Input) -> AsyncIterator[tuple[memoryview, bool]]:
    """Yield blocks of input, and whether each is the last."""
    if isinstance(data, bytes):
        view = memoryview(data)
        for start in range(0, max(len(view), 1), STDIN_BLOCK):
            yield view[start : start + STDIN_BLOCK], start + STDIN_BLOCK >= len(view)
        return
    async for piece in data:
        if not isinstance(piece, (bytes, bytearray, memoryview)):
            raise invalid("the iterator for stdin must give bytes")
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), STDIN_BLOCK):
            yield view[start : start + STDIN_BLOCK], False
    yield memoryview(b""), True


async def _put_stdin(api: Api, sandbox_id: str, command_id: str, offset: int, block: memoryview, *, close: bool) -> bool:
    """Write one block; False if the command no longer takes it."""
    target = f"/v1/sandboxes/{sandbox_id}/commands/{command_id}/stdin?offset={offset}" + ("&close=1" if close else "")

    async def body() -> AsyncIterator[memoryview]:
        yield block

    backoff = Backoff(api.config.retry_seconds, None, net.monotonic)
    while True:
        try:
            response = await api.bytes_request("PUT", target, body=body, length=len(block), wait=30.0)
            answer = await response.read_all(MAX_ANSWER)
            return _written(response.head.headers.get("dsec-offset"), answer, offset + len(block))
        except (NotFoundError, FailedPreconditionError) as e:
            if e.reason in LOST_INPUT:
                raise
            return False  # it has ended, or closed its input; its result says which
        except DSecTimeoutError:
            # A command may take its time to read. As long as it runs, so does this.
            if not (await get_command(api, sandbox_id, command_id, 0)).get("running"):
                return False
            continue
        except CanceledError as e:  # the connection broke further on
            pause = backoff.delay(UnavailableError(e.message, reason=e.reason, sandbox_id=sandbox_id))
        except DSecError as e:
            pause = backoff.delay(e)
        await net.sleep(pause)


def _written(header: str | None, body: bytes, expected: int) -> bool:
    """Whether the answer to a write says that all of it was taken."""
    value: object = header
    if value is None and body.strip():
        value = decode(body).get("offset")
    if value is None:
        return True
    try:
        return int(str(value)) >= expected
    except ValueError:
        raise bad_response("an offset that is no number") from None


async def kill(api: Api, sandbox_id: str, command_id: str, signal: int, *, until: float | None = None) -> None:
    """End a command's process tree, or send a signal to its process group."""
    if not isinstance(signal, int) or not 0 <= signal <= 64:
        raise invalid("signal must be a number between 0 and 64")
    request: dict[str, Any] = {"sandboxId": sandbox_id, "commandId": command_id}
    if signal:
        request["signal"] = signal
    # To kill twice does no harm; a handler of a signal would run twice.
    await api.call("KillCommand", request, urgent=True, once=signal != 0, until=until)


async def _kill_surely(api: Api, sandbox_id: str, command_id: str, delays: tuple[float, ...], until: float) -> None:
    for delay in delays:
        try:
            return await kill(api, sandbox_id, command_id, 0, until=until)
        except NotFoundError:
            await net.sleep(delay)
    try:
        await kill(api, sandbox_id, command_id, 0, until=until)
    except (NotFoundError, FailedPreconditionError):
        return None  # it never began, or is gone
