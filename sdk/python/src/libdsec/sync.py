"""The synchronous client: the same names and the same behaviour as in ``libdsec``, without ``await``.

    from libdsec.sync import DSecClient, DSecContainerRunArgs

    with DSecClient() as client:
        with client.run_container(DSecContainerRunArgs("debian:12")) as sandbox:
            print(sandbox.run_shell("echo hello world").stdout)

It is thread-safe. Ctrl-C in the main thread kills the command that is waited for, as cancellation does there.
"""

from ._args import DSecContainerRunArgs, ExecProbe, HttpProbe, TcpProbe
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
from ._sync.client import DSecClient, RunResult
from ._sync.command import Command, Stdin
from ._sync.files import FileWatch
from ._sync.networks import Services
from ._sync.ports import Forward, HttpBody, HttpResponse, Port, PortStream
from ._sync.sandbox import Sandbox
from ._sync.session import Session
from ._sync.terminal import Terminal
from ._sync.transfer import Content, FileReader
from ._sync.views import Process
from ._sync.watch import Completed, Watch
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
