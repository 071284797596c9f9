"""libdsec: the client of the dsec sandbox platform.

    import asyncio
    from libdsec import DSecClient, DSecContainerRunArgs

    async def main():
        async with DSecClient() as client:
            args = DSecContainerRunArgs(container_image="debian:12", memory_limit_mb=512, ttl_running_stop=300)
            async with await client.run_container(args, timeout=120) as sandbox:
                result = await sandbox.run_shell("echo hello world")
                print(result.stdout, result.exit_code)

    asyncio.run(main())

``libdsec.sync`` has the same names without ``await``.

What surprises: a command's ``timeout`` is enforced by the platform and gives a result with ``timed_out``, not an
exception; cancelling ``run_shell`` kills the command; output is bytes (``stdout_bytes``), ``stdout`` is their text.
"""

from ._args import DSecContainerRunArgs, ExecProbe, HttpProbe, TcpProbe
from ._async.client import DSecClient, RunResult
from ._async.command import Command, Stdin
from ._async.files import FileWatch
from ._async.networks import Services
from ._async.ports import Forward, HttpBody, HttpResponse, Port, PortStream
from ._async.sandbox import Sandbox
from ._async.session import Session
from ._async.terminal import Terminal
from ._async.transfer import Content, FileReader
from ._async.views import Process
from ._async.watch import Completed, Watch
from ._config import DSecConfig
from ._errors import (
    AlreadyExistsError,
    AuthenticationError,
    CanceledError,
    CommandFailedError,
    DataLossError,
    DSecError,
    DSecTimeoutError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
)
from ._files import FileChange, FileEntry, FileEvent, FileEventKind, FilePath, FileType
from ._models import ArchiveResult, CommandResult, FileInfo, Limits, Node, Reason, SandboxInfo, SessionInfo, State, SystemInfo
from ._networks import Endpoint, NetworkEndpoint, NetworkRule, NetworkStatus, RefusedTraffic, Service
from ._version import VERSION as __version__
from ._views import CommandEndedEvent, EdgeLost, Metrics, SandboxEvent, Synced, WatchEvent

__all__ = [
    # the client
    "DSecClient",
    "DSecConfig",
    "DSecContainerRunArgs",
    "RunResult",
    "Sandbox",
    "Session",
    "Command",
    "Terminal",
    "FileReader",
    "Forward",
    "HttpResponse",
    "Port",
    "PortStream",
    "FileWatch",
    "Process",
    "Services",
    "Watch",
    # what methods take
    "Content",
    "Endpoint",
    "ExecProbe",
    "HttpBody",
    "HttpProbe",
    "TcpProbe",
    "FileChange",
    "FilePath",
    "Stdin",
    # data
    "ArchiveResult",
    "CommandEndedEvent",
    "CommandResult",
    "Completed",
    "EdgeLost",
    "FileEntry",
    "FileEvent",
    "FileEventKind",
    "FileInfo",
    "FileType",
    "Limits",
    "Metrics",
    "NetworkEndpoint",
    "NetworkRule",
    "NetworkStatus",
    "Node",
    "Reason",
    "RefusedTraffic",
    "SandboxEvent",
    "SandboxInfo",
    "Service",
    "SessionInfo",
    "State",
    "Synced",
    "SystemInfo",
    "WatchEvent",
    # errors
    "DSecError",
    "AlreadyExistsError",
    "AuthenticationError",
    "CanceledError",
    "CommandFailedError",
    "DataLossError",
    "DSecTimeoutError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
]
