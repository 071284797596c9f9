"""What may be asked for, checked before any request is made.

The platform checks everything again; what is checked here are mistakes of types and signs, so that they surface at
the line that made them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._errors import InvalidArgumentError

MIB = 1 << 20
MAX_INLINE_STDIN = 64 << 10
MAX_WINDOW = 65535
TAG = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
SESSION = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class HttpProbe:
    """A sandbox is ready when a server on its loopback answers.

    Attributes:
        port: on the loopback.
        path: as it stands in a URL.
        status: the one that counts; None: any of 200 to 399.
        interval: seconds between tries, at least 0.05. None: the platform's default (0.25).
        try_timeout: seconds for one try. None: the platform's default (5).
    """

    port: int
    path: str = "/"
    status: int | None = None
    interval: float | None = None
    try_timeout: float | None = None

    def to_message(self) -> dict[str, Any]:
        """Return the JSON form of dsec.v1.Probe."""
        positive_int("ready_when.status", self.status)
        optional_text("ready_when.path", self.path)
        http = {"port": _port(self.port), "path": self.path, "status": self.status or 0}
        return {"http": http, **_pace(self.interval, self.try_timeout)}


@dataclass(frozen=True)
class TcpProbe:
    """A sandbox is ready when a port on its loopback accepts a connection. Attributes as of HttpProbe."""

    port: int
    interval: float | None = None
    try_timeout: float | None = None

    def to_message(self) -> dict[str, Any]:
        """Return the JSON form of dsec.v1.Probe."""
        return {"tcpPort": _port(self.port), **_pace(self.interval, self.try_timeout)}


@dataclass(frozen=True)
class ExecProbe:
    """A sandbox is ready when a command exits with 0.

    Attributes:
        command: a script (str) or a program with its arguments (sequence).
        interval, try_timeout: as of HttpProbe.
    """

    command: str | Sequence[str]
    interval: float | None = None
    try_timeout: float | None = None

    def to_message(self) -> dict[str, Any]:
        """Return the JSON form of dsec.v1.Probe."""
        return {"exec": plain_command(self.command), **_pace(self.interval, self.try_timeout)}


def _port(value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 16:
        raise invalid(f"a port is a whole number between 1 and 65535, not {value!r}", "invalid_port")
    return value


def _pace(interval: float | None, try_timeout: float | None) -> dict[str, Any]:
    positive("ready_when.interval", interval)
    positive("ready_when.try_timeout", try_timeout)
    pace = {"intervalSeconds": interval, "tryTimeoutSeconds": try_timeout}
    return {k: v for k, v in pace.items() if v is not None}


def plain_command(command: str | Sequence[str]) -> dict[str, Any]:
    """Return the JSON form of a script (str) or a program (sequence)."""
    if isinstance(command, str):
        return command_message(argv=None, shell=command, cwd=None, user=None, env=None, timeout=None)
    return command_message(argv=command, shell=None, cwd=None, user=None, env=None, timeout=None)


@dataclass
class DSecContainerRunArgs:
    """Describes a container sandbox.

    Checked when it is made, and again when it is used.

    Attributes:
        container_image: Base environment, ``"name:tag"`` or ``"name@sha256:…"``. Required.
        workspace: Environment laid above the base, or None.
        toolkits: Environments above the workspace, later ones above earlier ones.
        memory_limit_mb: Hard limit of memory in MiB, at least 16. None: the platform's default (2 GiB).
        cpu_cores_limit: Cores, for example 0.5 or 4: a weight, and a hard cap where it is below the node's CPUs.
        pids_limit: Tasks (processes and threads).
        disk_limit_mb: Hard quota of the writable layer in MiB.
        ttl_running_stop: Idle time in seconds after which the sandbox is stopped; a running command is activity.
            None: the platform's default (1 h).
        lifetime: Seconds after which it is stopped whatever it does. None: the platform's default (24 h).
        inodes_limit: Files in the writable layer. None: as many as the disk has room for.
        network_bytes_per_second: To the outside, and as many from there. None: no cap.
        network_connections_limit: To the outside at a time. None: the platform's default (1024).
        network_rules: What it may reach -> True; False denies, whatever else is allowed. Keys are names of services
            (``DSecClient.services``), ``"host:port"`` or prefixes such as ``"10.0.0.0/8:443"``. What is not named is denied.
        init_user: Default user of commands: a name, a uid, ``"name:group"`` or ``"uid:gid"``. None: the image's, else root.
        workdir: Default working directory of commands, absolute. None: the image's, else ``/``.
        env: Environment variables of commands.
        labels: Key -> value, for ``list_sandboxes``.
        name: Free text for people, at most 128 bytes.
        hostname: None: the sandbox's id.
        start: A script (str) or program (sequence) that is started once the sandbox runs, as the command ``"start"``. It
            runs beside all others, in the foreground of itself: with ``ready_when`` its end is the create's failure.
        ready_when: HttpProbe, TcpProbe or ExecProbe: the sandbox is not ready before it has succeeded
            (``probe_failed`` if it does not within the create's timeout).

    Raises:
        InvalidArgumentError: also a ValueError; the text names the argument.
    """

    container_image: str
    workspace: str | None = None
    toolkits: Sequence[str] = ()
    memory_limit_mb: int | None = None
    cpu_cores_limit: float | None = None
    pids_limit: int | None = None
    disk_limit_mb: int | None = None
    ttl_running_stop: float | None = None
    lifetime: float | None = None
    network_rules: Mapping[str, bool] = field(default_factory=dict)
    init_user: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    hostname: str | None = None
    start: str | Sequence[str] | None = None
    ready_when: HttpProbe | TcpProbe | ExecProbe | None = None
    inodes_limit: int | None = None
    network_bytes_per_second: int | None = None
    network_connections_limit: int | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check all fields; raises InvalidArgumentError."""
        if not isinstance(self.container_image, str) or not self.container_image:
            raise invalid('container_image is required, for example "debian:12"')
        for name in ("workspace", "init_user", "workdir", "name", "hostname"):
            optional_text(name, getattr(self, name))
        if isinstance(self.toolkits, str) or not all(isinstance(t, str) and t for t in self.toolkits):
            raise invalid("toolkits must be a sequence of names")
        for name in (
            "memory_limit_mb",
            "pids_limit",
            "disk_limit_mb",
            "inodes_limit",
            "network_bytes_per_second",
            "network_connections_limit",
        ):
            positive_int(name, getattr(self, name))
        positive("cpu_cores_limit", self.cpu_cores_limit)
        positive("ttl_running_stop", self.ttl_running_stop)
        positive("lifetime", self.lifetime)
        string_map("env", self.env)
        string_map("labels", self.labels)
        if not isinstance(self.network_rules, Mapping) or not all(
            isinstance(k, str) and isinstance(v, bool) for k, v in self.network_rules.items()
        ):
            raise invalid('network_rules must map services, hosts or prefixes to True or False, for example {"pypi": True}')
        if self.start is not None:
            plain_command(self.start)
        if self.ready_when is not None:
            if not isinstance(self.ready_when, (HttpProbe, TcpProbe, ExecProbe)):
                raise invalid("ready_when must be an HttpProbe, a TcpProbe or an ExecProbe")
            self.ready_when.to_message()
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise invalid(f"workdir {self.workdir!r} must be an absolute path")

    def to_spec(self) -> dict[str, Any]:
        """Return the JSON form of dsec.v1.SandboxSpec; what is unset is left out."""
        self.validate()
        limits = {
            "memoryBytes": _scaled(self.memory_limit_mb, MIB),
            "cpuCores": self.cpu_cores_limit,
            "pids": _scaled(self.pids_limit, 1),
            "diskBytes": _scaled(self.disk_limit_mb, MIB),
            "inodes": _scaled(self.inodes_limit, 1),
            "networkBytesPerSecond": _scaled(self.network_bytes_per_second, 1),
            "networkConnections": _scaled(self.network_connections_limit, 1),
        }
        spec: dict[str, Any] = {
            "image": self.container_image,
            "workspace": self.workspace,
            "toolkits": list(self.toolkits),
            "limits": {k: v for k, v in limits.items() if v is not None},
            "idleTimeoutSeconds": seconds_text(self.ttl_running_stop),
            "lifetimeSeconds": seconds_text(self.lifetime),
            "labels": dict(self.labels),
            "env": dict(self.env),
            "user": self.init_user,
            "workdir": self.workdir,
            "networkRules": dict(self.network_rules),
            "hostname": self.hostname,
            "name": self.name,
            "start": None if self.start is None else plain_command(self.start),
            "readyWhen": None if self.ready_when is None else self.ready_when.to_message(),
        }
        return {k: v for k, v in spec.items() if v}


def command_message(
    *,
    argv: Sequence[str] | None,
    shell: str | None,
    cwd: str | None,
    user: str | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
    no_output_timeout: float | None = None,
    tag: str | None = None,
    trusted: bool = False,
) -> dict[str, Any]:
    """Return the JSON form of dsec.v1.Command without its stdin; raises InvalidArgumentError."""
    message: dict[str, Any] = {}
    if argv is not None:
        if isinstance(argv, (str, bytes)) or not all(isinstance(a, str) for a in argv) or not argv:
            raise invalid('argv must be a sequence of strings that is not empty, for example ["ls", "-l"]')
        if any("\0" in a for a in argv):
            raise invalid("an argument holds a NUL, which no program can receive", "invalid_command")
        message["argv"] = list(argv)
    if shell is not None:
        if not isinstance(shell, str) or not shell:
            raise invalid("the script must be a string that is not empty")
        if "\0" in shell:
            raise invalid("the script holds a NUL, which no shell can receive", "invalid_command")
        message["shell"] = shell
    if cwd is not None:
        optional_text("cwd", cwd)
        message["cwd"] = cwd
    if user is not None:
        optional_text("user", user)
        message["user"] = user
    if env:
        string_map("env", env)
        message["env"] = dict(env)
    if timeout is not None:
        positive("timeout", timeout)
        message["timeoutSeconds"] = timeout
    if no_output_timeout is not None:
        positive("no_output_timeout", no_output_timeout)
        message["noOutputTimeoutSeconds"] = no_output_timeout
    if tag is not None:
        message["tag"] = checked_tag(tag)
    if trusted:
        message["trusted"] = True
    return message


def session_message(name: str | None, cwd: str | None, user: str | None, env: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the fields of dsec.v1.CreateSessionRequest; raises InvalidArgumentError."""
    message: dict[str, Any] = {}
    if name is not None:
        if not isinstance(name, str) or not SESSION.fullmatch(name):
            raise invalid(f"a session's name must be letters, digits, _ and -, at most 64, not {name!r}", "invalid_session")
        message["name"] = name
    if cwd is not None:
        optional_text("cwd", cwd)
        message["cwd"] = cwd
    if user is not None:
        optional_text("user", user)
        message["user"] = user
    if env:
        string_map("env", env)
        message["env"] = dict(env)
    return message


def checked_tag(tag: str) -> str:
    """Refuse what can be no command's tag."""
    if not isinstance(tag, str) or not TAG.fullmatch(tag):
        raise invalid(f"tag must be letters, digits and _.-, at most 64, not {tag!r}", "invalid_tag")
    return tag


def window(rows: int | None, cols: int | None) -> dict[str, int]:
    """Return the size of a terminal as part of a message; None is left out."""
    size = {}
    for name, value in (("rows", rows), ("cols", cols)):
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_WINDOW:
            raise invalid(f"{name} must be a whole number between 1 and {MAX_WINDOW}, not {value!r}", "invalid_terminal")
        size[name] = value
    return size


def invalid(message: str, reason: str = "invalid_argument") -> InvalidArgumentError:
    """Make an InvalidArgumentError."""
    return InvalidArgumentError(message, reason=reason)


def utf8(name: str, value: str) -> bytes:
    """Return text as UTF-8, which has no lone surrogates."""
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise invalid(f"{name} holds a lone surrogate; give bytes", "invalid_text") from None


def positive(name: str, value: object) -> None:
    """Refuse what is not None and not a finite number above 0."""
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise invalid(f"{name} must be a number, not {value!r}")
    if value <= 0:
        raise invalid(f"{name} must be greater than 0, not {value!r}")


def positive_int(name: str, value: object) -> None:
    """Refuse what is not None and not an int above 0."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(f"{name} must be a whole number, not {value!r}")
    if not 0 < value < 1 << 43:
        raise invalid(f"{name} must be greater than 0 (and below 2^43), not {value!r}")


def optional_text(name: str, value: object) -> None:
    """Refuse what is not None and not a string that is not empty and holds no NUL."""
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise invalid(f"{name} must be a string that is not empty and holds no NUL, or None")


def string_map(name: str, value: object) -> None:
    """Refuse what is not a mapping of strings to strings."""
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and k and isinstance(v, str) for k, v in value.items()):
        raise invalid(f"{name} must map strings to strings")


def seconds_text(value: float | None) -> str | None:
    """Return whole seconds, rounded up, as protobuf's JSON writes 64-bit numbers."""
    return None if value is None else str(math.ceil(value))


def _scaled(value: int | None, unit: int) -> str | None:
    return None if value is None else str(value * unit)
