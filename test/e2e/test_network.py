"""What sandboxes may reach: rules by service, host and prefix, replaced while they run; names; what was refused."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from network_under_test import Names, Outside, settled
from platform_under_test import BIN, IMAGE, Platform, wait_for

from libdsec import DSecContainerRunArgs, DSecError, FailedPreconditionError, InvalidArgumentError, NotFoundError, Sandbox, UnsupportedError

POINTS = [
    p
    for p in subprocess.run([str(BIN / "dsec"), "edge", "--list-failpoints"], capture_output=True, text=True, check=True).stdout.split()
    if p.startswith(("journal.network:", "network.policy:", "network.hosts:"))
]

GET = """
import socket, sys, time
def get(host, port, path="/", timeout=20):
    s = socket.create_connection((host, port), timeout)
    s.sendall(b"GET %s HTTP/1.0\\r\\n\\r\\n" % path.encode())
    return s, s.makefile("rb")
def fetch(host, port, path="/"):
    s, f = get(host, port, path)
    return len(f.read().split(b"\\r\\n\\r\\n", 1)[1])
def outcome(host, port):
    began = time.monotonic()
    try:
        fetch(host, port)
        return "open"
    except OSError as e:
        assert time.monotonic() - began < 10, "it took too long to be refused"
        return "closed"
"""


@dataclass
class World:
    platform: Platform
    outside: Outside
    names: Names
    moving: str  # a sandbox that may reach moving.example, whose address has changed while it ran


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with Names() as names, Outside() as outside, Platform("--resolver", names.address) as platform:
        platform.start()
        platform.make_environments()
        a, b = outside.addresses
        names.table.update({"one.example": [a], "two.example": [b], "six.example": [outside.address6], "both.example": [a, outside.address6]})
        for name, ports in (("one", "8080"), ("two", "8080-8081")):
            platform.dsec("service", "add", name, f"{name}.example:{ports}")
        names.table["moving.example"] = [a]
        moving = platform.dsec("run", "-d", "--network", "moving.example:8080", IMAGE).stdout.strip()
        program = GET + f'print(outcome("moving.example", 8080), outcome("{b}", 8080))'
        assert platform.dsec("exec", moving, "python3", "-c", program).stdout.split() == ["open", "closed"]
        names.table["moving.example"] = [b]  # seen while the tests run
        yield World(platform, outside, names, moving)


@pytest.fixture
def box(world: World) -> Callable[..., AbstractAsyncContextManager[Sandbox]]:
    """`async with box({"one": True}) as sandbox`: a sandbox with these rules."""

    @asynccontextmanager
    async def make(rules: dict[str, bool], **changes: Any) -> AsyncIterator[Sandbox]:
        args = DSecContainerRunArgs(IMAGE, memory_limit_mb=256, network_rules=rules)
        async with world.platform.client() as client, await client.run_container(replace(args, **changes)) as sandbox:
            yield sandbox

    return make


async def python(sandbox: Sandbox, program: str, **kw: Any) -> str:
    result = await sandbox.exec(["python3", "-c", GET + program], timeout=120, **kw)
    assert result.ok, result.stderr
    return result.stdout.strip()


async def outcomes(sandbox: Sandbox, *places: tuple[str, int]) -> list[str]:
    return (await python(sandbox, "\n".join(f"print(outcome({h!r}, {p}))" for h, p in places))).split()


async def test_what_is_allowed_works_and_all_else_is_closed_at_once(world: World, box: Any) -> None:
    a, b = world.outside.addresses
    async with box({"one": True}) as sandbox:
        assert await outcomes(sandbox, ("one.example", 8080), (a, 8080), (a, 8081), (b, 8080), (world.outside.host, 22), ("two.example", 8080)) == [
            "open", "open", "closed", "closed", "closed", "closed",
        ]  # fmt: skip
        status = await sandbox.network()
        assert [(r.rule, r.addresses, r.error) for r in status.rules] == [("one", (a,), "")]
        assert status.addresses
        refused = {(r.destination, r.port): r for r in status.refused}
        assert refused[a, 8081].reason == refused[b, 8080].reason == "not_allowed", refused
        assert status.refused_packets >= 3
        assert (await sandbox.metrics()).network_refused_packets >= 3
        inspected = world.platform.dsec("inspect", sandbox.id).stdout
        assert '"one"' in inspected
        assert b in inspected
        assert "not_allowed" in world.platform.dsec("network", "inspect", sandbox.id).stdout


async def test_false_beats_true(world: World, box: Any) -> None:
    a, b = world.outside.addresses
    net = a.rsplit(".", 1)[0] + ".0/24"
    async with box({f"{net}:8080": True, a: False, "no-such-service": False}) as sandbox:
        assert await outcomes(sandbox, (a, 8080), (b, 8080), (b, 8081)) == ["closed", "open", "closed"]


async def test_ipv6(world: World, box: Any) -> None:
    six = world.outside.address6
    async with box({f"[{six}]:8080": True, "both.example:8081": True}) as sandbox:
        assert await outcomes(sandbox, (six, 8080), (six, 8081), ("both.example", 8081), (world.outside.host6, 8080)) == ["open", "open", "open", "closed"]


async def test_datagrams(world: World, box: Any) -> None:
    a, b = world.outside.addresses
    program = f"""
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20)
s.sendto(b"hello", ({a!r}, 7001)); print(s.recv(100).decode())
s.settimeout(0.5)
try:
    s.sendto(b"hello", ({b!r}, 7001)); print(s.recv(100))
except OSError:
    print("nothing")
"""
    async with box({f"{a}:7001/udp": True}) as sandbox:
        assert (await python(sandbox, program)).split() == ["hello", "nothing"]


@pytest.mark.parametrize(
    ("rules", "error", "reason"),
    [
        ({"nowhere": True}, NotFoundError, "unknown_network_service"),
        ({"nowhere.example:80": True}, FailedPreconditionError, "network_name_unresolved"),
        ({"169.254.169.254:80": True}, InvalidArgumentError, "network_rule_forbidden"),
        ({"one": True, "one.example:8080": False}, InvalidArgumentError, "network_rules_conflict"),
    ],
)
async def test_refused_rules(world: World, box: Any, rules: dict[str, bool], error: type[DSecError], reason: str) -> None:
    with pytest.raises(error) as e:
        async with box(rules):
            pass
    assert e.value.reason == reason
    async with box({}) as sandbox:
        with pytest.raises(error) as e:
            await sandbox.set_network(rules)
        assert e.value.reason == reason
        assert sandbox.info.network_rules == {}


async def test_the_node_itself_is_no_destination(world: World, box: Any) -> None:
    with pytest.raises(InvalidArgumentError) as e:
        async with box({f"{world.outside.host}:8080": True}):
            pass
    assert e.value.reason == "network_rule_forbidden"


async def test_inodes_are_not_counted_here(world: World, box: Any) -> None:
    with pytest.raises(UnsupportedError) as e:
        async with box({}, inodes_limit=1000):
            pass
    assert e.value.reason == "inodes_not_limited"


async def test_rules_replaced_while_a_download_runs(world: World, box: Any) -> None:
    a, b = world.outside.addresses
    follow = 'host, port = sys.argv[1], 8080\ns, f = get(host, port, "/stream", 60)\nfor line in f:\n    print(line.decode(), end="", flush=True)\n'
    async with box({"one": True, "two": True}) as sandbox:
        closed = await sandbox.start(["python3", "-c", GET + follow, a])
        goes_on = await sandbox.start(["python3", "-c", GET + follow, b])
        for command in (closed, goes_on):
            while (await command.poll()).stdout_size < 500:
                await asyncio.sleep(0.05)
        await sandbox.set_network({"two": True})
        result = await asyncio.wait_for(closed.wait(), 60)
        assert not result.ok
        assert "ConnectionResetError" in result.stderr
        before = (await goes_on.poll()).stdout_size
        while (await goes_on.poll()).stdout_size < before + 200:
            await asyncio.sleep(0.05)
        assert await outcomes(sandbox, (a, 8080), (b, 8080)) == ["closed", "open"]
        assert b"one.example" not in await sandbox.read_file("/etc/hosts")
        await goes_on.kill()


async def test_a_sandbox_without_rules_gets_some_and_loses_them(world: World, box: Any) -> None:
    a, _ = world.outside.addresses
    async with box({}) as sandbox:
        assert await outcomes(sandbox, (a, 8080)) == ["closed"]
        await sandbox.run_shell("echo 127.0.0.1 mine >> /etc/hosts", check=True)
        await sandbox.set_network({"one.example:8080": True})
        assert await outcomes(sandbox, ("one.example", 8080)) == ["open"]
        await sandbox.set_network({})
        assert await outcomes(sandbox, ("one.example", 8080), (a, 8080)) == ["closed", "closed"]
        assert (await sandbox.read_file("/etc/hosts")).decode().count("mine") == 1


async def test_names_that_are_not_allowed_are_no_names_at_once(box: Any) -> None:
    program = """
began = time.monotonic()
try:
    socket.getaddrinfo("two.example", 80)
    print("found")
except socket.gaierror:
    print("none")
assert time.monotonic() - began < 5
"""
    async with box({"one": True}) as sandbox:
        assert await python(sandbox, program) == "none"


async def test_half_close(world: World, box: Any) -> None:
    a, _ = world.outside.addresses
    program = f"""
s = socket.create_connection(({a!r}, 7000), 20)
for _ in range(100):
    s.sendall(bytes(10_000))
s.shutdown(socket.SHUT_WR)
print(s.makefile().read())
"""
    async with box({f"{a}:7000": True}) as sandbox:
        assert await python(sandbox, program) == "1000000"


async def test_a_gigabyte_through_a_slow_reader(world: World, box: Any) -> None:
    a, _ = world.outside.addresses
    size = 1 << 30
    program = f"""
s, f = get({a!r}, 8080, "/{size}", 60)
while f.readline().strip():
    pass
n, expect = 0, bytes(range(256)) * 256
while n < {size}:
    block = f.read(65536)
    assert block == expect, n
    n += len(block)
    if n % (1 << 26) == 0:
        time.sleep(0.2)
print(n)
"""
    async with box({f"{a}:8080": True}) as sandbox:
        assert await python(sandbox, program) == str(size)


async def test_caps(world: World, box: Any) -> None:
    a, _ = world.outside.addresses
    program = f"""
held = []
try:
    for _ in range(20):
        s, f = get({a!r}, 8080, "/stream")
        assert f.readline(), "closed"
        held.append(s)
except (OSError, AssertionError):
    pass
print(len(held))
"""
    async with box({f"{a}:8080": True}, network_connections_limit=5) as sandbox:
        assert await python(sandbox, program) == "5"
        assert any(r.reason == "too_many_connections" for r in (await sandbox.network()).refused)
        async with asyncio.timeout(60):
            while (await sandbox.network()).connections:  # those of the program before are on their way out
                await asyncio.sleep(0.05)
        held = await sandbox.start(["python3", "-c", GET + f"s, f = get({a!r}, 8080, '/stream')\nwhile f.readline(): print('tick', flush=True)"])
        while (await held.poll()).stdout_size < 10 and (await held.poll()).running:
            await asyncio.sleep(0.05)
        assert ((await sandbox.network()).connections, (await sandbox.metrics()).network_connections) == (1, 1)
        await held.kill()
    timed = f'began = time.monotonic(); fetch({a!r}, 8080, "/3000000"); print(time.monotonic() - began)'
    async with box({f"{a}:8080": True}, network_bytes_per_second=1 << 20) as sandbox:
        assert float(await python(sandbox, timed)) > 1.5  # without the cap: some milliseconds


async def test_sandboxes_do_not_reach_each_other_or_the_host(world: World, box: Any) -> None:
    a, _ = world.outside.addresses
    async with box({"0.0.0.0/0": True, "::/0": True}) as one, box({"0.0.0.0/0": True, "::/0": True}) as two:
        await two.start(["python3", "-m", "http.server", "8080", "--bind", "::"])
        places = [(address, 8080) for address in (await two.network()).addresses]
        assert places
        places += [(world.outside.host, world.platform.port), ("127.0.0.1", world.platform.port), ("169.254.169.254", 80), ("198.18.0.1", 8080)]
        assert await outcomes(one, *places) == ["closed"] * len(places)
        assert await outcomes(one, (a, 8080)) == ["open"]
        assert any(r.reason == "forbidden" for r in (await one.network()).refused)


def test_names_that_change(world: World) -> None:
    """The new address is open, the old one for a while; /etc/hosts has the new one only."""
    p, (a, b) = world.platform, world.outside.addresses
    settled(lambda: set(json.loads(p.dsec("network", "inspect", "--json", world.moving).stdout)["rules"][0]["addresses"]) == {a, b})
    program = GET + "\n".join(f'print(outcome("{host}", 8080))' for host in ("moving.example", a, b))
    assert p.dsec("exec", world.moving, "python3", "-c", program).stdout.split() == ["open"] * 3
    hosts = p.dsec("exec", world.moving, "cat", "/etc/hosts").stdout
    assert f"{b}\tmoving.example" in hosts
    assert f"{a}\tmoving.example" not in hosts


@pytest.mark.limit(240)
def test_edge_killed_while_rules_are_replaced() -> None:
    """At every point: the rules in force afterwards are the old ones or the new ones, wholly, and what the platform says they are."""
    assert POINTS
    with Names() as names, Outside() as outside, Platform("--resolver", names.address) as p:
        a, b = outside.addresses
        names.table.update({"one.example": [a], "two.example": [b]})
        points = p.base / "points"
        points.touch()
        p.start(DSEC_FAILPOINT=f"@{points}")
        p.make_environments()

        def other_than(pid: int | None) -> bool:
            return p.edge_pid() not in (None, pid)

        def arm(point: str) -> int | None:
            """Another edge serves, which has the point. No sandbox is there whose rules it would restore."""
            points.write_text(point)
            old = p.edge_pid()
            p.kill_edge()
            wait_for("another edge", partial(other_than, old))
            wait_for("it serves", lambda: p.dsec("ps", "-q", check=False).returncode == 0)
            points.write_text("")
            return p.edge_pid()

        def answers(id: str) -> bool:
            return p.dsec("exec", id, "true", check=False).returncode == 0

        for point in POINTS:
            armed = arm(point)
            id = p.dsec("run", "-d", "--network", "one.example:8080", IMAGE).stdout.strip()
            p.dsec("network", "set", id, "two.example:8080", check=False, timeout=60)
            wait_for(f"the edge died at {point}", partial(other_than, armed))
            wait_for("an edge answers", partial(answers, id))
            status = p.dsec("network", "inspect", "--json", id).stdout
            new = "two.example" in status
            assert new != ("one.example" in status), point
            assert new or point == "journal.network:before", point
            program = GET + f'print(outcome("{a}", 8080), outcome("{b}", 8080))'
            assert p.dsec("exec", id, "python3", "-c", program).stdout.split() == (["closed", "open"] if new else ["open", "closed"]), point
            hosts = p.dsec("exec", id, "cat", "/etc/hosts").stdout
            assert (f"{b}\ttwo.example" in hosts, f"{a}\tone.example" in hosts) == (new, not new), point
            p.dsec("rm", id)
