"""What the platform answers, as plain data.

Messages come from the platform's JSON: 64-bit numbers are strings, bytes are base64, fields with their zero value are
missing. A field of the wrong type is an InternalError (reason ``bad_response``), never a TypeError in the caller's code.
"""

from __future__ import annotations

import re
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any

from ._errors import InternalError

Message = Mapping[str, Any]


class State(str, Enum):
    """Where a sandbox is. ``STOPPED`` and ``FAILED`` are final: nothing of it is left on its node."""

    UNKNOWN = "unknown"
    CREATING = "creating"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        """Whether nothing of the sandbox is left."""
        return self in (State.STOPPED, State.FAILED)

    def to_wire(self) -> str:
        """Return the name of the protobuf enum's value."""
        return f"STATE_{self.name}"


_STATES = {f"STATE_{s.name}": s for s in State}


@dataclass(frozen=True)
class Reason:
    """Why a sandbox is in its state: ``code`` for programs, ``message`` for people."""

    code: str
    message: str
    at: datetime | None


@dataclass(frozen=True)
class Limits:
    """Hard limits of a sandbox, in bytes, cores, tasks, files, bytes per second and connections; 0: none of its own."""

    memory_bytes: int
    cpu_cores: float
    pids: int
    disk_bytes: int
    inodes: int = 0
    network_bytes_per_second: int = 0
    network_connections: int = 0


@dataclass(frozen=True)
class SandboxInfo:
    """One sandbox as the platform sees it: a snapshot, refreshed by ``Sandbox.refresh``.

    Attributes:
        image, workspace, toolkits: pinned to digests.
        idle_timeout_seconds, lifetime_seconds: with defaults filled in.
        expires_at: end of its absolute lifetime.
        idle_expires_at: None while a command runs.
        step_seconds: how long each step of the creation took.
    """

    id: str
    state: State
    reason: Reason | None
    generation: int
    name: str
    labels: dict[str, str]
    env: dict[str, str]
    image: str
    workspace: str
    toolkits: tuple[str, ...]
    limits: Limits
    user: str
    workdir: str
    hostname: str
    network_rules: dict[str, bool]
    idle_timeout_seconds: int
    lifetime_seconds: int
    project: str
    principal: str
    node: str
    created_at: datetime | None
    ready_at: datetime | None
    ended_at: datetime | None
    expires_at: datetime | None
    idle_expires_at: datetime | None
    running_commands: int
    step_seconds: dict[str, float]

    @staticmethod
    def from_wire(message: Message) -> SandboxInfo:
        """Read dsec.v1.Sandbox."""
        spec = sub(message, "spec")
        limits = sub(spec, "limits")
        reason = sub(message, "reason")
        return SandboxInfo(
            id=text(message, "id"),
            state=_STATES.get(text(message, "state"), State.UNKNOWN),
            reason=Reason(text(reason, "code"), text(reason, "message"), time_of(reason, "at")) if reason else None,
            generation=number(message, "generation"),
            name=text(spec, "name"),
            labels=_strings(spec, "labels"),
            env=_strings(spec, "env"),
            image=text(spec, "image"),
            workspace=text(spec, "workspace"),
            toolkits=tuple(str(t) for t in items(spec, "toolkits")),
            limits=Limits(
                number(limits, "memoryBytes"),
                real(limits, "cpuCores"),
                number(limits, "pids"),
                number(limits, "diskBytes"),
                number(limits, "inodes"),
                number(limits, "networkBytesPerSecond"),
                number(limits, "networkConnections"),
            ),
            user=text(spec, "user"),
            workdir=text(spec, "workdir"),
            hostname=text(spec, "hostname"),
            network_rules={str(k): bool(v) for k, v in sub(spec, "networkRules").items()},
            idle_timeout_seconds=number(spec, "idleTimeoutSeconds"),
            lifetime_seconds=number(spec, "lifetimeSeconds"),
            project=text(message, "project"),
            principal=text(message, "principal"),
            node=text(message, "node"),
            created_at=time_of(message, "createdAt"),
            ready_at=time_of(message, "readyAt"),
            ended_at=time_of(message, "endedAt"),
            expires_at=time_of(message, "expiresAt"),
            idle_expires_at=time_of(message, "idleExpiresAt"),
            running_commands=number(message, "runningCommands"),
            step_seconds={str(k): _real("stepSeconds", v) for k, v in sub(message, "stepSeconds").items()},
        )


SHOWN_OUTPUT = 200


@dataclass(repr=False)
class CommandResult:
    """How a command ended, and what it wrote. Output is byte-exact.

    Attributes:
        command_id: names the command in its sandbox.
        exit_code: 0..255; 128 + signal if a signal ended it. 0 while it is running.
        signal, signal_name: the signal that ended it (0, ``""`` if none), for example 9 and ``"SIGKILL"``.
        timed_out: its ``timeout`` or ``no_output_timeout`` passed and its whole process tree was killed.
        no_output: it was ``no_output_timeout``.
        oom_killed: it ran out of the sandbox's memory.
        killed: ended by ``kill``, or because the sandbox ended.
        stdin_broken: it ended or closed its stdin before all input was written (EPIPE).
        stdout_bytes, stderr_bytes: what was kept: all of it, or if ``…_truncated`` the first and the last part.
        stdout_size, stderr_size: bytes that were written.
        stdout_truncated, stderr_truncated: the command wrote more than the platform keeps; the middle was dropped.
        description: what ran, shortened; only in lists.
        tag: as it was given.
        session: the session in which it ran, or ``""``.
        terminal: it has a terminal: all output is ``stdout``.
        stdin_size: bytes of input that the platform has taken.
    """

    command_id: str
    running: bool = False
    exit_code: int = 0
    signal: int = 0
    signal_name: str = ""
    timed_out: bool = False
    oom_killed: bool = False
    killed: bool = False
    stdin_broken: bool = False
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    stdout_size: int = 0
    stderr_size: int = 0
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    description: str = ""
    tag: str = ""
    session: str = ""
    terminal: bool = False
    no_output: bool = False
    stdin_size: int = 0
    _started: str = ""
    _ended: str = ""

    def __repr__(self) -> str:
        shown = []
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bytes) and len(value) > SHOWN_OUTPUT:  # there may be 64 MiB of it
                shown.append(f"{f.name}={value[:SHOWN_OUTPUT]!r}… ({len(value)} bytes)")
            elif value != f.default and f.name[0] != "_":
                shown.append(f"{f.name}={value!r}")
        return f"CommandResult({', '.join(shown)})"

    @property
    def stdout(self) -> str:
        """Standard output as text: UTF-8, with U+FFFD for bytes that are not. Line ends are left alone."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as text, see ``stdout``."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether it ended with exit code 0."""
        return not self.running and self.exit_code == 0

    @property
    def started_at(self) -> datetime | None:
        """When it was started (UTC)."""
        return parse_time(self._started)

    @property
    def ended_at(self) -> datetime | None:
        """When it ended (UTC); None while it is running."""
        return parse_time(self._ended)

    @property
    def duration(self) -> float | None:
        """Seconds between start and end on the node; None while it is running."""
        start, end = parse_time(self._started), parse_time(self._ended)
        return (end - start).total_seconds() if start and end else None


@dataclass
class Output:
    """dsec.v1.Output: the head that came with the answer, and how much more is kept where."""

    data: bytes
    size: int
    head_size: int
    tail_size: int

    @property
    def complete(self) -> bool:
        """Whether ``data`` is all that is kept."""
        return len(self.data) >= self.head_size + self.tail_size

    @staticmethod
    def from_wire(message: Message) -> Output:
        """Read dsec.v1.Output; sizes that contradict each other are an InternalError."""
        data = blob(message, "data")
        size, head = number(message, "size"), number(message, "headSize")
        tail = number(message, "tailSize")
        if size < 0 or head < len(data) or tail < 0 or head + tail > size or (tail == 0 and head != size):
            raise bad_response(f"sizes of output do not fit: {len(data)} {head} {tail} {size}")
        return Output(data, size, head, tail)


_NO_OUTPUT = Output(b"", 0, 0, 0)


def command_result(message: Message) -> tuple[CommandResult, Output, Output]:
    """Read dsec.v1.CommandResult. The two Outputs say what of the output is still to be fetched."""
    get = message.get
    out, err = get("stdout"), get("stderr")
    stdout = Output.from_wire(_mapping("stdout", out)) if out else _NO_OUTPUT
    stderr = Output.from_wire(_mapping("stderr", err)) if err else _NO_OUTPUT
    result = CommandResult(
        command_id=text(message, "commandId"),
        running=get("running") is True,
        exit_code=number(message, "exitCode"),
        signal=number(message, "signal"),
        signal_name=text(message, "signalName"),
        timed_out=get("timedOut") is True,
        oom_killed=get("oomKilled") is True,
        killed=get("killed") is True,
        stdin_broken=get("stdinBroken") is True,
        stdout_bytes=stdout.data,
        stderr_bytes=stderr.data,
        stdout_size=stdout.size,
        stderr_size=stderr.size,
        stdout_truncated=stdout.tail_size > 0,
        stderr_truncated=stderr.tail_size > 0,
        description=text(message, "description"),
        tag=text(message, "tag"),
        session=text(message, "session"),
        terminal=get("terminal") is True,
        no_output=get("noOutput") is True,
        stdin_size=number(message, "stdinSize"),
        _started=text(message, "startedAt"),
        _ended=text(message, "endedAt"),
    )
    return result, stdout, stderr


@dataclass(frozen=True)
class SessionInfo:
    """A session as it was seen.

    Attributes:
        name: names it in its sandbox.
        shell: ``"bash"``, or ``"sh"`` where there is no bash.
        ended: its shell has ended.
        exit_code, signal: how it ended; 0 while it lives.
        reason: why it ended: ``"exited"``, ``"killed"``, ``"timeout"`` (a command could not be interrupted), ``"oom"``,
            ``"broken"`` (the shell closed the descriptors by which it is driven), ``"unresponsive"`` (it ran nothing more of
            what it was given, as after ``set -n``); ``""`` while it lives.
        running_command: the command's id, or ``""``.
        waiting_commands: how many wait behind it.
    """

    name: str
    shell: str
    ended: bool
    exit_code: int
    signal: int
    reason: str
    running_command: str
    waiting_commands: int


def session_info(message: Message) -> SessionInfo:
    """Read dsec.v1.Session."""
    return SessionInfo(
        name=text(message, "name"),
        shell=text(message, "shell"),
        ended=message.get("ended") is True,
        exit_code=number(message, "exitCode"),
        signal=number(message, "signal"),
        reason=text(message, "reason"),
        running_command=text(message, "runningCommand"),
        waiting_commands=number(message, "waitingCommands"),
    )


@dataclass(frozen=True)
class Node:
    """One node of the platform."""

    id: str
    healthy: bool
    reason: str
    sandboxes: int
    capacity: int
    memory_bytes: int
    memory_available_bytes: int
    cpus: float
    backends: tuple[str, ...]


@dataclass(frozen=True)
class SystemInfo:
    """Who the platform takes the caller for, and what it consists of."""

    version: str
    principal: str
    project: str
    nodes: tuple[Node, ...]

    @staticmethod
    def from_wire(message: Message) -> SystemInfo:
        """Read dsec.v1.GetInfoResponse."""
        nodes = tuple(
            Node(
                id=text(n, "id"),
                healthy=n.get("healthy") is True,
                reason=text(n, "reason"),
                sandboxes=number(n, "sandboxes"),
                capacity=number(n, "capacity"),
                memory_bytes=number(n, "memoryBytes"),
                memory_available_bytes=number(n, "memoryAvailableBytes"),
                cpus=real(n, "cpus"),
                backends=tuple(str(b) for b in items(n, "backends")),
            )
            for n in (_mapping("nodes", n) for n in items(message, "nodes"))
        )
        return SystemInfo(text(message, "version"), text(message, "principal"), text(message, "project"), nodes)


@dataclass(frozen=True)
class FileInfo:
    """A regular file as it was when it was opened.

    Attributes:
        size: bytes of the whole file.
        mode: permission bits, for example ``0o644``; None if the platform did not say.
        mtime: last change (UTC); None if the platform did not say.
        uid, gid: owner, as seen inside the sandbox; None if the platform did not say.
    """

    size: int
    mode: int | None
    mtime: datetime | None
    uid: int | None
    gid: int | None


@dataclass(frozen=True)
class ArchiveResult:
    """What was sent or received as an archive.

    Attributes:
        entries: files, directories and links.
        size: bytes of the archive.
        skipped: what no archive holds (devices, sockets), and links that were left out.
        changed: files that changed while they were read, and became no shorter.
    """

    entries: int
    size: int
    skipped: int
    changed: int


def bad_response(what: str) -> InternalError:
    """Make the error for an answer that is not what the contract says."""
    return InternalError(
        f"the platform's answer cannot be understood ({what}); client and platform may differ in version",
        reason="bad_response",
    )


def text(message: Message, key: str) -> str:
    """Return a string field, ``""`` if it is missing."""
    value = message.get(key, "")
    if not isinstance(value, str):
        raise bad_response(f"{key} is not a string")
    return value


def number(message: Message, key: str) -> int:
    """Return an integer field, which JSON carries as number or string; 0 if it is missing."""
    value = message.get(key, 0)
    if isinstance(value, int):
        return value
    try:
        return int(value) if isinstance(value, str) else int(_real(key, value))
    except (ValueError, OverflowError):
        raise bad_response(f"{key} is not a number") from None


def real(message: Message, key: str) -> float:
    """Return a floating-point field, 0 if it is missing."""
    return _real(key, message.get(key, 0))


def _real(key: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise bad_response(f"{key} is not a number") from None


def items(message: Message, key: str) -> list[Any]:
    """Return a repeated field."""
    value = message.get(key, [])
    if not isinstance(value, list):
        raise bad_response(f"{key} is not a list")
    return value


def sub(message: Message, key: str) -> Message:
    """Return a message field, empty if it is missing."""
    return _mapping(key, message.get(key) or {})


def _mapping(key: str, value: object) -> Message:
    if not isinstance(value, dict):
        raise bad_response(f"{key} is not an object")
    return value


def _strings(message: Message, key: str) -> dict[str, str]:
    return {str(k): str(v) for k, v in sub(message, key).items()}


def blob(message: Message, key: str) -> bytes:
    """Return a bytes field."""
    value = text(message, key)
    try:
        data = a2b_base64(value)
    except (Base64Error, ValueError):
        raise bad_response(f"{key} is not base64") from None
    # The decoder passes over what is not of its alphabet; the length gives that away.
    if len(data) != len(value) // 4 * 3 - value[-2:].count("=") or len(value) % 4:
        raise bad_response(f"{key} is not base64")
    return data


def time_of(message: Message, key: str) -> datetime | None:
    """Return a Timestamp field."""
    return parse_time(text(message, key))


_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


def parse_time(value: str) -> datetime | None:
    """Parse RFC 3339, truncated to microseconds. None for the empty string."""
    if not value:
        return None
    match = _TIME.fullmatch(value)
    if match is None:
        raise bad_response(f"{value[:40]!r} is not a time")
    stamp, fraction, zone = match.groups()
    try:
        moment = datetime.fromisoformat(stamp + ("+00:00" if zone == "Z" else zone))
        return moment.astimezone(timezone.utc) + timedelta(microseconds=int((fraction or "0").ljust(9, "0")[:6]))
    except (ValueError, OverflowError):
        raise bad_response(f"{value[:40]!r} is not a time") from None
