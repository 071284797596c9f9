"""Data of networks: services, what rules mean, and what was refused."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Union

from ._args import invalid
from ._models import Message, items, number, sub, text, time_of

MAX_PORT = 65535


@dataclass(frozen=True)
class NetworkEndpoint:
    """A host and its ports, as a network rule or service has them.

    Attributes:
        host: a name, an address, or a prefix such as ``"10.0.0.0/8"``.
        port: the first; 0: all, for prefixes only.
        last_port: of a range; 0: the same.
        protocol: ``"tcp"`` or ``"udp"``.
    """

    host: str
    port: int = 0
    last_port: int = 0
    protocol: str = "tcp"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host and self.port else self.host
        ports = f":{self.port}" if self.port else ""
        if self.last_port > self.port:
            ports += f"-{self.last_port}"
        return host + ports + (f"/{self.protocol}" if self.protocol != "tcp" or not self.port else "")


Endpoint = Union[str, NetworkEndpoint]
"""``"host:port"``, ``"host:first-last"``, a prefix with or without ports, all with ``"/tcp"`` or ``"/udp"`` behind."""


@dataclass(frozen=True)
class Service:
    """What a name in network rules stands for, on the whole platform.

    Attributes:
        changed_at, changed_by: when and by which principal it was defined as it is.
    """

    name: str
    endpoints: tuple[NetworkEndpoint, ...]
    description: str = ""
    changed_at: datetime | None = None
    changed_by: str = ""


@dataclass(frozen=True)
class NetworkRule:
    """A sandbox's network rule and what it means now.

    Attributes:
        rule: as it was given.
        addresses: that its names stand for.
        error: why a name stands for nothing new, or ``""``. What it stood for stays.
    """

    rule: str
    allowed: bool
    endpoints: tuple[NetworkEndpoint, ...]
    addresses: tuple[str, ...]
    error: str


@dataclass(frozen=True)
class RefusedTraffic:
    """Packets to one destination that were refused.

    Attributes:
        destination: an address, ``""`` where there is none.
        protocol: ``"tcp"``, ``"udp"``, ``"icmp"``, or a number.
        reason: ``"not_allowed"``, ``"forbidden"``, ``"too_many_connections"`` and others.
    """

    destination: str
    port: int
    protocol: str
    reason: str
    packets: int
    last_at: datetime | None


@dataclass(frozen=True)
class NetworkStatus:
    """What a sandbox may reach now, and what was refused to it.

    Attributes:
        addresses: its own; none where nothing is open.
        connections: to the outside, now.
        refused_packets: in all.
        refused: the latest destinations of them, at most 64, the last one first.
    """

    rules: tuple[NetworkRule, ...]
    addresses: tuple[str, ...]
    connections: int
    refused_packets: int
    refused: tuple[RefusedTraffic, ...]


def rules_message(rules: Mapping[str, bool]) -> dict[str, bool]:
    """Check network rules as far as types go."""
    if not isinstance(rules, Mapping) or not all(isinstance(k, str) and isinstance(v, bool) for k, v in rules.items()):
        raise invalid('network rules must map services, hosts or prefixes to True or False, for example {"pypi": True}')
    return dict(rules)


def endpoint_messages(endpoints: Iterable[Endpoint]) -> list[dict[str, Any]]:
    """Return the JSON form of dsec.v1.NetworkEndpoint of each."""
    if isinstance(endpoints, (str, NetworkEndpoint)):
        raise invalid('endpoints must be a sequence, for example ["pypi.org:443"]')
    found: list[NetworkEndpoint] = []
    for e in endpoints:
        found.extend(_parse(e) if isinstance(e, str) else [e])
    return [{"host": e.host, "port": e.port, "lastPort": e.last_port, "protocol": e.protocol} for e in found]


def _parse(spec: str) -> Sequence[NetworkEndpoint]:
    rest, protocols = spec, tuple[str, ...]()
    for protocol in ("tcp", "udp"):
        if spec.endswith("/" + protocol):
            rest, protocols = spec[: -len(protocol) - 1], (protocol,)
    try:
        ipaddress.ip_network(rest, strict=False)
    except ValueError:
        pass
    else:
        return [NetworkEndpoint(rest, protocol=p) for p in protocols or ("tcp", "udp")]
    host, colon, ports = rest.rpartition(":")
    first, dash, last = ports.partition("-")
    if not colon or not first.isdecimal() or (dash and not last.isdecimal()):
        raise invalid(f"{spec!r} is neither host:port nor a prefix such as 10.0.0.0/8; all may end with /tcp or /udp")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    ends = int(first), int(last or first)
    if not 0 < ends[0] <= ends[1] <= MAX_PORT:
        raise invalid(f"{ports!r} is not a port of 1 to {MAX_PORT}, or a range of them")
    return [NetworkEndpoint(host, *ends, protocols[0] if protocols else "tcp")]


def _endpoints(message: Message) -> tuple[NetworkEndpoint, ...]:
    found = (sub({"": e}, "") for e in items(message, "endpoints"))
    return tuple(NetworkEndpoint(text(e, "host"), number(e, "port"), number(e, "lastPort"), text(e, "protocol")) for e in found)


def service_of(message: Message) -> Service:
    """Read dsec.v1.ServiceDefinition."""
    return Service(
        name=text(message, "name"),
        endpoints=_endpoints(message),
        description=text(message, "description"),
        changed_at=time_of(message, "changedAt"),
        changed_by=text(message, "changedBy"),
    )


def network_status(message: Message) -> NetworkStatus:
    """Read dsec.v1.NetworkStatus."""
    rules = (sub({"": r}, "") for r in items(message, "rules"))
    refused = (sub({"": r}, "") for r in items(message, "refused"))
    return NetworkStatus(
        rules=tuple(
            NetworkRule(
                rule=text(r, "rule"),
                allowed=r.get("allowed") is True,
                endpoints=_endpoints(r),
                addresses=tuple(str(a) for a in items(r, "addresses")),
                error=text(r, "error"),
            )
            for r in rules
        ),
        addresses=tuple(str(a) for a in items(message, "addresses")),
        connections=number(message, "connections"),
        refused_packets=number(message, "refusedPackets"),
        refused=tuple(
            RefusedTraffic(
                destination=text(r, "destination"),
                port=number(r, "port"),
                protocol=text(r, "protocol"),
                reason=text(r, "reason"),
                packets=number(r, "packets"),
                last_at=time_of(r, "lastAt"),
            )
            for r in refused
        ),
    )
