"""Services, and what a sandbox may reach."""

from __future__ import annotations

import pytest
from libdsec_api import DSecClient

from libdsec import (
    AlreadyExistsError,
    DSecConfig,
    DSecContainerRunArgs,
    InvalidArgumentError,
    NetworkEndpoint,
    NotFoundError,
)


async def test_services(config: DSecConfig) -> None:
    client = DSecClient(config=config)
    made = await client.services.put("pypi", ["pypi.org:443", "[fd12::1]:80", "10.0.0.0/8"], description="packages")
    assert [str(e) for e in made.endpoints] == ["pypi.org:443", "[fd12::1]:80", "10.0.0.0/8/tcp", "10.0.0.0/8/udp"]
    assert (made.changed_by, made.description) == ("ann", "packages")
    assert made.changed_at is not None
    with pytest.raises(AlreadyExistsError):
        await client.services.put("pypi", ["pypi.org:443"], create_only=True)
    for name in ("npm", "go"):
        await client.services.put(name, [NetworkEndpoint("a.example", 8000, 8010, "udp")])
    assert [s.name for s in await client.services.list()] == ["go", "npm", "pypi"]
    assert str((await client.services.get("go")).endpoints[0]) == "a.example:8000-8010/udp"
    await client.services.remove("go")
    with pytest.raises(NotFoundError):
        await client.services.get("go")
    await client.close()


@pytest.mark.parametrize("bad", ["a.example", "a.example:0", "a.example:9-8", "a.example:65536", "a:1/sctp", "1.2.3.4:x"])
async def test_endpoints_that_are_none(config: DSecConfig, bad: str) -> None:
    client = DSecClient(config=config)
    with pytest.raises(InvalidArgumentError):
        await client.services.put("pypi", [bad])
    with pytest.raises(InvalidArgumentError):
        await client.services.put("pypi", "pypi.org:443")
    await client.close()


async def test_network_of_a_sandbox(config: DSecConfig) -> None:
    client = DSecClient(config=config)
    args = DSecContainerRunArgs(
        "debian:12",
        network_rules={"npm": False},
        inodes_limit=1000,
        network_bytes_per_second=1 << 20,
        network_connections_limit=7,
    )
    assert args.to_spec()["limits"] == {"inodes": "1000", "networkBytesPerSecond": "1048576", "networkConnections": "7"}
    sandbox = await client.run_container(args)
    limits = sandbox.info.limits
    assert (limits.inodes, limits.network_bytes_per_second, limits.network_connections) == (1000, 1 << 20, 7)
    await sandbox.set_network({"pypi": True, "10.1.0.0/16:443": True})
    assert sandbox.info.network_rules == {"pypi": True, "10.1.0.0/16:443": True}
    status = await sandbox.network()
    assert [(r.rule, r.allowed) for r in status.rules] == [("10.1.0.0/16:443", True), ("pypi", True)]
    assert str(status.rules[0].endpoints[0]) == "10.1.0.0/16:443"
    assert (status.addresses, status.connections, status.refused_packets) == (("198.18.0.4",), 2, 9)
    assert (status.refused[0].destination, status.refused[0].reason, status.refused[0].packets) == (
        "10.9.9.9",
        "not_allowed",
        7,
    )
    for bad in ({"pypi": 1}, ["pypi"], {1: True}):
        with pytest.raises(InvalidArgumentError):
            await sandbox.set_network(bad)  # type: ignore[arg-type]
    await client.close()
