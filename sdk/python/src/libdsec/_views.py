"""Data of views: what a sandbox uses, and what happened to sandboxes and commands."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Union

from ._models import CommandResult, Message, SandboxInfo, items, number, real, text, time_of


@dataclass(frozen=True)
class Metrics:
    """What a sandbox uses, by the kernel's own accounts. Counters begin at its creation.

    Attributes:
        at: when it was measured (UTC).
        generation: of the sandbox.
        cpu_seconds: of its commands.
        cpu_throttled_periods, cpu_throttled_seconds: how often and how long it was held up by ``cpu_limit_cores``.
        memory_bytes: with the page cache that is charged to it; ``memory_anon_bytes`` without.
        memory_limit_hits: how often it ran into ``memory_limit_bytes``; what can be reclaimed is, then.
        oom_kills: processes that were killed because nothing could be.
        pids, pids_limit, pids_limit_hits: tasks (processes and threads), and how often one more was refused.
        network_rx_bytes: received by the sandbox, without its loopback.
        network_refused_packets: see ``Sandbox.network``.
        network_connections: to the outside, now.
        aether_memory_bytes: of the platform's part in the sandbox, which its limit does not count.
        unavailable: names of the attributes that this host cannot measure; they are 0.
    """

    sandbox_id: str
    at: datetime | None
    generation: int
    cpu_seconds: float
    cpu_limit_cores: float
    cpu_throttled_periods: int
    cpu_throttled_seconds: float
    memory_bytes: int
    memory_anon_bytes: int
    memory_peak_bytes: int
    memory_limit_bytes: int
    memory_limit_hits: int
    oom_kills: int
    disk_bytes: int
    disk_limit_bytes: int
    pids: int
    pids_limit: int
    pids_limit_hits: int
    network_rx_bytes: int
    network_tx_bytes: int
    network_rx_packets: int
    network_tx_packets: int
    network_refused_packets: int
    network_connections: int
    aether_memory_bytes: int
    unavailable: tuple[str, ...]

    @staticmethod
    def from_wire(message: Message) -> Metrics:
        """Read dsec.v1.Metrics."""
        figures = {}
        for f in fields(Metrics):
            read = {"int": number, "float": real}.get(str(f.type))
            if read is not None:
                figures[f.name] = read(message, _camel(f.name))
        names = tuple(str(name) for name in items(message, "unavailable"))
        return Metrics(text(message, "sandboxId"), time_of(message, "at"), unavailable=names, **figures)  # type: ignore[arg-type]


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


@dataclass(frozen=True)
class SandboxEvent:
    """A sandbox is as ``info`` says: at the beginning of a watch, and whenever it changes."""

    info: SandboxInfo


@dataclass(frozen=True)
class CommandEndedEvent:
    """A command has ended. ``result`` is without its output: ``Sandbox.command(…).wait()`` has it."""

    sandbox_id: str
    result: CommandResult


@dataclass(frozen=True)
class Synced:
    """All that was there has been told: what follows is new. Comes once more after each time the connection was made anew."""


@dataclass(frozen=True)
class EdgeLost:
    """The sandboxes of a node may change unseen. When it is back, their states are told again, and ends that were missed."""

    node: str


WatchEvent = Union[SandboxEvent, CommandEndedEvent, Synced, EdgeLost]
"""What ``DSecClient.watch`` yields."""
