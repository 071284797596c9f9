"""One sandbox: commands, files, its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import _aio as net
from .._args import checked_tag, command_message, invalid, optional_text, session_message, window
from .._errors import DSecError, NotFoundError
from .._models import CommandResult, SandboxInfo, SessionInfo, State, command_result, items, number, sub
from . import command as commands
from .command import Command, Stdin, input_of
from .contents import FileContents
from .files import FileOperations
from .networks import Networking
from .ports import DEFAULT_TIMEOUT, HttpBody, HttpResponse, Port, fetch
from .session import Session, create_session, list_sessions
from .terminal import Terminal
from .views import Views

if TYPE_CHECKING:
    from .client import DSecClient

STOP_WAIT = 60.0
SKEW = 600.0  # by how much this machine's clock may be wrong


class Sandbox(FileContents, FileOperations, Views, Networking):
    """A sandbox of the platform. Made by ``DSecClient.run_container`` and ``get_sandbox``, never directly.

    As an async context manager it is stopped at the end of the block. All methods may be used at the same time.

    Every method raises, beside what it names: NotFoundError (no such sandbox, or another project's),
    FailedPreconditionError (it has ended; ``reason`` says why), UnavailableError, DSecTimeoutError (reason
    ``no_answer``), AuthenticationError, PermissionDeniedError, InternalError.

    Attributes:
        info: the sandbox as it was last seen, see ``refresh``.
        index: position in the request where it is a result of ``run_containers``, else None.
    """

    def __init__(self, client: DSecClient, info: SandboxInfo) -> None:
        self._client = client
        self._api = client._api
        self.info = info
        self.index: int | None = None

    @property
    def id(self) -> str:
        """Its name for ever."""
        return self.info.id

    @property
    def state(self) -> State:
        """Its state as it was last seen."""
        return self.info.state

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.info.state.value}>"

    async def run_shell(
        self,
        script: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Stdin | None = None,
        check: bool = False,
        command_id: str | None = None,
        tag: str | None = None,
        no_output_timeout: float | None = None,
        trusted: bool = False,
    ) -> CommandResult:
        """Run a script with ``bash -c`` (``sh -c`` where there is no bash) and wait for its end.

        The command ends when the shell ends; what it left in the background lives on. If the caller is cancelled
        or interrupted, the whole process tree is killed.

        Args:
            script: at most 16 MiB.
            timeout: seconds after which the platform kills the whole process tree (``timed_out``). None: no limit.
            cwd: working directory, absolute. None: the sandbox's.
            user: name, uid, ``"name:group"`` or ``"uid:gid"``. None: the sandbox's.
            env: variables beside the sandbox's.
            stdin: bytes, str or an asynchronous iterator of bytes. None: /dev/null.
            check: raise if the exit code is not 0.
            command_id: ``[a-zA-Z0-9_-]{1,64}``; a command of this id that was started before is waited for
                instead. None: a fresh one.
            tag: ``[a-zA-Z0-9_.-]{1,64}``, for ``list_commands`` and ``attach``; several commands may have the same.
            no_output_timeout: seconds without a byte of output after which the platform kills the whole process tree
                (``timed_out`` and ``no_output``). None: no limit.
            trusted: everything else in the sandbox is stopped while it runs, and shell and tools come from the platform: for
                the truth about a sandbox whose root is hostile. The shell is busybox's ``sh``; what is not one of its
                tools is not found, unless by its path in the sandbox. ``env`` is all of the environment, ``user`` is root
                or a number, ``cwd`` is ``/`` and ``timeout`` 600 if they are None. Files are the sandbox's: a path may lead
                through its links, and a FIFO keep who opens it waiting. What it left running is killed at its end.

        Returns:
            The result, with all output that the platform keeps (64 MiB).

        Raises:
            CommandFailedError: with ``check``.
            InvalidArgumentError: before any request where that can be told.
            FailedPreconditionError: for a trusted command, something in the sandbox did not stop (``not_stopped``).
            UnsupportedError: the node has no tools for trusted commands (``no_trusted_tools``).
        """
        message = command_message(
            argv=None,
            shell=script,
            cwd=cwd,
            user=user,
            env=env,
            timeout=timeout,
            no_output_timeout=no_output_timeout,
            tag=tag,
            trusted=trusted,
        )
        name = command_id or commands.new_id()
        return await commands.run(self._api, self.id, name, message, input_of(stdin), check=check)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Stdin | None = None,
        check: bool = False,
        command_id: str | None = None,
        tag: str | None = None,
        no_output_timeout: float | None = None,
        trusted: bool = False,
    ) -> CommandResult:
        """Run a program with its arguments as they are, without a shell, and wait for its end. See ``run_shell``.

        A ``trusted`` program is a tool of the platform's, by its name alone, for example ``["sha256sum", "/etc/passwd"]``.

        Args:
            argv: the program, by its path or as found in ``PATH``, and its arguments; each at most 128 KiB.
            timeout, cwd, user, env, stdin, check, command_id, tag, no_output_timeout, trusted: as in ``run_shell``.

        Raises:
            NotFoundError, FailedPreconditionError: the program does not exist, or cannot be executed.
        """
        message = command_message(
            argv=argv,
            shell=None,
            cwd=cwd,
            user=user,
            env=env,
            timeout=timeout,
            no_output_timeout=no_output_timeout,
            tag=tag,
            trusted=trusted,
        )
        name = command_id or commands.new_id()
        return await commands.run(self._api, self.id, name, message, input_of(stdin), check=check)

    async def start(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin_open: bool = False,
        command_id: str | None = None,
        tag: str | None = None,
        no_output_timeout: float | None = None,
        trusted: bool = False,
    ) -> Command:
        """Start a script (str) or a program (sequence) and return at once.

        Args:
            command: as in ``run_shell`` or ``exec``.
            timeout, cwd, user, env, command_id, tag, no_output_timeout, trusted: as in ``run_shell``.
            stdin_open: its input comes by ``Command.write_stdin``; else it is /dev/null.
        """
        script = command if isinstance(command, str) else None
        argv = None if isinstance(command, str) else command
        message = command_message(
            argv=argv,
            shell=script,
            cwd=cwd,
            user=user,
            env=env,
            timeout=timeout,
            no_output_timeout=no_output_timeout,
            tag=tag,
            trusted=trusted,
        )
        if stdin_open:
            message["stdinFollows"] = True
        begun = time.time()
        started = Command(self._api, self.id, *await self._start(command_id, message))
        if command_id is None:  # else it may have been started before
            started.known_since = begun - SKEW
        return started

    async def _start(self, command_id: str | None, message: dict[str, Any]) -> tuple[str, int]:
        """Start a command; returns its id, and how much input it has had: it may have been started before."""
        name = command_id or commands.new_id()
        try:
            answer = await commands.start(self._api, self.id, name, message, None, wait=0.0)
        except DSecError as e:
            commands.name_command(e, name)
            raise
        return name, number(answer, "stdinSize")

    async def terminal(
        self,
        command: str | Sequence[str] | None = None,
        *,
        rows: int | None = None,
        cols: int | None = None,
        term: str | None = None,
        timeout: float | None = None,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        command_id: str | None = None,
        tag: str | None = None,
        no_output_timeout: float | None = None,
    ) -> Terminal:
        """Start a command at a terminal and return at once.

        Standard input, output and error are one terminal: programs edit lines, show colours, fill the screen; Ctrl-C is
        ``write(b"\\x03")``.

        Args:
            command: a script (str), a program (sequence), or None for the user's login shell.
            rows, cols: size of the window, 1 to 65,535. None: 24 and 80.
            term: what kind of terminal, ``$TERM``. None: what the environment says, else ``xterm-256color``.
            timeout, cwd, user, env, command_id, tag, no_output_timeout: as in ``run_shell``. ``LANG`` is ``C.UTF-8`` unless the
                environment says otherwise.

        Raises:
            ResourceExhaustedError: the sandbox, or its node, has no terminal left (``no_terminals``).
        """
        message = command_message(
            argv=None if isinstance(command, str) else command,
            shell=command if isinstance(command, str) else None,
            cwd=cwd,
            user=user,
            env=env,
            timeout=timeout,
            no_output_timeout=no_output_timeout,
            tag=tag,
        )
        message["terminal"] = {**window(rows, cols)}
        if term is not None:
            optional_text("term", term)
            message["terminal"]["term"] = term
        return Terminal(self._api, self.id, *await self._start(command_id, message))

    async def session(
        self,
        name: str | None = None,
        *,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Session:
        """Create a session, or return the one of this name that lives: a shell that keeps its state between commands.

        Args:
            name: ``[a-zA-Z0-9_-]{1,64}``. None: a fresh one. One that has ended is replaced.
            cwd, user, env: what a new one begins with. None: the sandbox's.

        Raises:
            ResourceExhaustedError: there are 64 (``sandbox_resources``).
        """
        return await create_session(
            self._api, self.id, session_message(commands.new_id() if name is None else name, cwd, user, env)
        )

    async def list_sessions(self) -> list[SessionInfo]:
        """Return the sessions, and the last 16 that have ended and were not closed."""
        return await list_sessions(self._api, self.id)

    def command(self, command_id: str) -> Command:
        """Return a handle on the command ``command_id``, perhaps of somebody else's. Makes no request: see ``attach``."""
        return Command(self._api, self.id, command_id)

    async def attach(self, command_id: str | None = None, *, tag: str | None = None) -> Command:
        """Return a handle on a command that was started before, perhaps by somebody else: a ``Terminal`` if it has one.

        Its output can be read from any offset that is kept, however many others do so. Input goes behind what was written;
        whoever wrote before must do so no more.

        Args:
            command_id: which; or
            tag: the newest command that has it.

        Raises:
            NotFoundError: there is none, or it is no longer remembered (``command_not_found``).
        """
        if (command_id is None) == (tag is None):
            raise invalid("either command_id or tag must be given")
        if command_id is None:
            found = await self.list_commands(tag=tag)
            if not found:
                raise NotFoundError(
                    f"no command of sandbox {self.id} has the tag {tag!r}", reason="command_not_found", sandbox_id=self.id
                )
            state = found[0]
        else:
            state = command_result(await commands.get_command(self._api, self.id, command_id, 0))[0]
        kind = Terminal if state.terminal else Command
        return kind(self._api, self.id, state.command_id, state.stdin_size)

    async def list_commands(
        self, *, tag: str | None = None, session: str | None = None, running: bool = False
    ) -> list[CommandResult]:
        """Return the commands that the platform remembers, newest first, without their output.

        Args:
            tag: only those that have it.
            session: only those of this session.
            running: only those that run.
        """
        request: dict[str, Any] = {"sandboxId": self.id}
        if tag is not None:
            request["tag"] = checked_tag(tag)
        if session is not None:
            request.update(session=session_message(session, None, None, None)["name"])
        if running:
            request["running"] = True
        answer = await self._api.call("ListCommands", request)
        return [command_result(sub({"": c}, ""))[0] for c in items(answer, "commands")]

    async def kill(self, command_id: str, signal: int = 0) -> None:
        """End the whole process tree of ``command_id``; a ``signal`` other than 0 goes to its process group instead, once.

        Of a terminal the group is the one in the foreground.
        """
        await commands.kill(self._api, self.id, command_id, signal)

    def port(self, number: int) -> Port:
        """Return the TCP port ``number``, 1 to 65535, of the sandbox's loopback. Makes no request."""
        return Port(self._api, self.id, number)

    async def http(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: HttpBody | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        verify: bool = True,
        follow_redirects: bool = False,
    ) -> HttpResponse:
        """Send an HTTP request from the sandbox's position in the network: its loopback, and what else it can reach.

        Args:
            method: of HTTP.
            url: ``http://`` or ``https://``; names are looked up in the sandbox's /etc/hosts.
            headers: additional ones. ``Authorization`` goes to the server.
            body: bytes, str (UTF-8) or an asynchronous iterator of bytes.
            timeout: seconds until the answer begins, and the longest pause in its body.
            verify: the certificate of ``https://``, by the node's authorities.
            follow_redirects: at most 20.

        Returns:
            The answer, whatever its status, as soon as its head has come.

        Raises:
            FailedPreconditionError: nothing listens there (``port_refused``), or the host cannot be reached.
            UnavailableError: what listens there gave no valid answer (``port_bad_response``).
        """
        return await fetch(self._api, self.id, method, url, headers, body, timeout, verify, follow_redirects)

    async def refresh(self) -> SandboxInfo:
        """Ask the platform, update ``info`` and return it."""
        answer = await self._api.call("GetSandbox", {"id": self.id})
        self.info = SandboxInfo.from_wire(sub(answer, "sandbox"))
        return self.info

    async def stop(self, *, wait: bool = True) -> None:
        """End the sandbox, in whatever state it is. Stopping twice, or what has ended, is no error.

        Args:
            wait: return when nothing of it is left, else when the platform has accepted it. If the wait is
                interrupted, the sandbox ends all the same.
        """
        try:
            await self._delete(wait=wait)
        except net.INTERRUPTS:
            await net.shielded(lambda end: self._delete(wait=False, until=end), self._api.config.cleanup_seconds)
            raise
        self._client._forget(self.id)

    async def _delete(self, *, wait: bool, until: float | None = None) -> None:
        request: dict[str, Any] = {"id": self.id, "wait": wait}
        try:
            grace = STOP_WAIT if wait else 0.0
            answer = await self._api.call("DeleteSandbox", request, wait=grace, urgent=True, until=until)
        except NotFoundError:
            return  # it has ended so long ago that the platform has forgotten it
        if answer.get("sandbox"):
            self.info = SandboxInfo.from_wire(sub(answer, "sandbox"))

    def detach(self) -> None:
        """Let the sandbox outlive this client's failure, see ``DSecClient``. Its own times to live go on counting."""
        self._client._forget(self.id)

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            await self.stop()
        except DSecError as e:
            if exc_type is None:
                raise
            # What went wrong in the block matters more; the sandbox's time to live takes care of it.
            net.log.warning("could not stop %s: %s", self.id, e)
