"""The synchronous client: the same names and the same behaviour as in ``libdsec``, without ``await``.

    from libdsec.sync import DSecClient, DSecContainerRunArgs

    with DSecClient() as client:
        with client.run_container(DSecContainerRunArgs("debian:12")) as sandbox:
            print(sandbox.run_shell("echo hello world").stdout)

It is thread-safe. Ctrl-C in the main thread kills the command that is waited for, as cancellation does there.
"""

from ._args import DSecContainerRunArgs
from ._config import DSecConfig
from ._models import CommandResult, FileInfo, SandboxInfo, State, SystemInfo
from ._sync.client import DSecClient, RunResult
from ._sync.command import Command
from ._sync.sandbox import Sandbox
from ._sync.transfer import FileReader

__all__ = [
    "Command",
    "CommandResult",
    "DSecClient",
    "DSecConfig",
    "DSecContainerRunArgs",
    "FileInfo",
    "FileReader",
    "RunResult",
    "Sandbox",
    "SandboxInfo",
    "State",
    "SystemInfo",
]
