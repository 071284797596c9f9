"""Sessions: a shell that keeps its state from one command to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._args import MAX_INLINE_STDIN, command_message, invalid
from .._errors import DSecError, NotFoundError
from .._models import CommandResult, SessionInfo, items, number, session_info, sub
from . import command as commands
from .command import Command, input_of

if TYPE_CHECKING:
    from .api import Api


class Session:
    """A named shell of a sandbox. Made by ``Sandbox.session``, never directly.

    Working directory, variables, functions, options and background jobs last from one command to the next, as at a terminal;
    so do ``set -e`` and ``exit``, which end it. Commands run one at a time, in the order in which they were given.
    As an async context manager it is closed at the end of the block.

    Methods raise beside what those of ``Sandbox`` do: NotFoundError (``session_not_found``), FailedPreconditionError
    (``session_ended``; the message says how).

    Attributes:
        name: names it in its sandbox.
        sandbox_id: the sandbox.
        info: as it was last seen.
    """

    def __init__(self, api: Api, sandbox_id: str, info: SessionInfo) -> None:
        self._api = api
        self.sandbox_id = sandbox_id
        self.name = info.name
        self.info = info

    def __repr__(self) -> str:
        return f"<Session {self.name} of {self.sandbox_id}>"

    async def run(
        self,
        script: str,
        *,
        timeout: float | None = None,
        stdin: bytes | str | None = None,
        check: bool = False,
        command_id: str | None = None,
        tag: str | None = None,
        no_output_timeout: float | None = None,
    ) -> CommandResult:
        """Run a script in the session and wait for its end. See ``Sandbox.run_shell``.

        Its output is what it wrote until then, after what background jobs have written since the command before it. If the
        caller is cancelled or interrupted, or ``timeout`` passes, what the script has started is killed and the session goes
        on with the next command. A shell that cannot be interrupted is killed, and the session has ended: then the result
        has ``killed`` as well as ``timed_out``.

        Args:
            script: at most 16 MiB. ``exit`` ends the session.
            timeout: seconds from when its turn has come.
            stdin: at most 64 KiB. None: /dev/null.
            check, command_id, tag, no_output_timeout: as in ``Sandbox.run_shell``.

        Returns:
            The result, with all output that the platform keeps.
        """
        message = self._message(script, timeout, no_output_timeout, tag)
        given = _whole(stdin)
        name = command_id or commands.new_id()
        return await commands.run(self._api, self.sandbox_id, name, message, given, check=check)

    async def start(
        self,
        script: str,
        *,
        timeout: float | None = None,
        stdin: bytes | str | None = None,
        command_id: str | None = None,
        tag: str | None = None,
        no_output_timeout: float | None = None,
    ) -> Command:
        """Give a script to the session and return at once, also if others are before it. See ``run``."""
        message = self._message(script, timeout, no_output_timeout, tag)
        given = _whole(stdin)
        name = command_id or commands.new_id()
        try:
            answer = await commands.start(self._api, self.sandbox_id, name, message, given, wait=0.0)
        except DSecError as e:
            commands.name_command(e, name)
            raise
        return Command(self._api, self.sandbox_id, name, number(answer, "stdinSize"))

    async def refresh(self) -> SessionInfo:
        """Ask the platform, update ``info`` and return it."""
        for info in await list_sessions(self._api, self.sandbox_id):
            if info.name == self.name:
                self.info = info
                return info
        raise NotFoundError(f"the sandbox has no session {self.name!r}", reason="session_not_found", sandbox_id=self.sandbox_id)

    async def close(self) -> None:
        """End the session with all that it has started. To close it twice is no error."""
        request = {"sandboxId": self.sandbox_id, "name": self.name}
        try:
            await self._api.call("DeleteSession", request, wait=60.0, urgent=True)
        except NotFoundError as e:
            if e.reason != "session_not_found":
                raise

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            await self.close()
        except DSecError:
            if exc_type is None:
                raise

    def _message(self, script: str, timeout: float | None, no_output_timeout: float | None, tag: str | None) -> dict[str, Any]:
        message = command_message(
            argv=None,
            shell=script,
            cwd=None,
            user=None,
            env=None,
            timeout=timeout,
            no_output_timeout=no_output_timeout,
            tag=tag,
        )
        message["session"] = self.name
        return message


def _whole(stdin: bytes | str | None) -> bytes | None:
    """Check input that goes with the request."""
    given = input_of(stdin)
    if given is None:
        return None
    if not isinstance(given, bytes):
        raise invalid("stdin of a command in a session must be bytes or str")
    if len(given) > MAX_INLINE_STDIN:
        raise invalid(f"stdin of a command in a session is at most {MAX_INLINE_STDIN} bytes; put more into a file")
    return given


async def create_session(api: Api, sandbox_id: str, request: dict[str, Any]) -> Session:
    """Create a session, or find it."""
    answer = await api.call("CreateSession", {"sandboxId": sandbox_id, **request}, wait=60.0)
    return Session(api, sandbox_id, session_info(sub(answer, "session")))


async def list_sessions(api: Api, sandbox_id: str) -> list[SessionInfo]:
    """Return the sessions of a sandbox."""
    answer = await api.call("ListSessions", {"sandboxId": sandbox_id})
    return [session_info(sub({"": s}, "")) for s in items(answer, "sessions")]
