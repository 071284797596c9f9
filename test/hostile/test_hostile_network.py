"""Sandboxes to which rules open the whole world, and what they still do not reach; floods; and the relay killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from pathlib import Path

import pytest
from attacked import Box, wait_for
from network_under_test import Outside
from platform_under_test import Platform

from libdsec.sync import Command

WORLD = {"0.0.0.0/0": True, "::/0": True}

TRY = """
import errno, socket, sys, time
def attempt(host, port):
    s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    s.settimeout(20)
    began = time.monotonic()
    try:
        s.connect((host, port))
        s.sendall(b"GET /6 HTTP/1.0\\r\\n\\r\\n")
        return "reached" if s.recv(1) else "closed"
    except OSError as e:
        return "timeout" if isinstance(e, TimeoutError) else "closed"
    finally:
        s.close()
def shout(host, port):
    s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        for _ in range(3):
            s.sendto(b"hello", (host, port))
    except OSError:
        pass
"""


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    with Outside() as o:
        yield o


NewBox = Callable[..., AbstractContextManager[Box]]


class Trap:
    """Listens at a port of all addresses of the host, with TCP and UDP, and notes who comes."""

    def __init__(self) -> None:
        self.tcp = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        self.udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.udp.bind(("::", self.port))
        self.caught: list[object] = []
        for wait in (self.tcp.accept, lambda: self.udp.recvfrom(100)):
            threading.Thread(target=self._run, args=(wait,), daemon=True).start()

    def _run(self, wait: Callable[[], tuple[object, object]]) -> None:
        with suppress(OSError):
            while True:
                self.caught.append(wait()[1])

    def close(self) -> None:
        for s in (self.tcp, self.udp):
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()


def host_addresses() -> list[str]:
    shown = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, check=True).stdout)
    return [a["local"] for link in shown for a in link["addr_info"] if not a["local"].startswith("fe80")]


def relay_pid(platform: Platform) -> int | None:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            args = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if len(args) > 2 and args[1] == b"relay" and any(str(platform.run).encode() in a for a in args):
                return int(entry.name)
    return None


def test_the_platform_is_no_destination(new_box: NewBox, outside: Outside) -> None:
    """Neither the host at any of its addresses, nor the relay, nor the router, nor what is undeniable."""
    with closing(Trap()) as trap, new_box(network_rules=WORLD) as box:
        at = [*host_addresses(), "127.0.0.2", "0.0.0.0", "198.18.0.1", "fd64:7365:6300::1", "::ffff:127.0.0.1"]
        assert outside.host in at
        places = [(a, trap.port) for a in at] + [(a, 7) for a in ("127.0.0.1", "::1", "198.18.0.1")]
        places += [("169.254.169.254", 80), ("100.100.100.200", 80), ("168.63.129.16", 80), ("fd00:ec2::254", 80), ("224.0.0.1", 80), ("255.255.255.255", 80)]
        code = TRY + "\n".join(f"shout({h!r}, {p})\nprint(attempt({h!r}, {p}))" for h, p in places)
        assert box.python(code).split() == ["closed"] * len(places)
        assert box.python(TRY + f"print(attempt({outside.addresses[0]!r}, 8080), attempt({outside.address6!r}, 8080))") == "reached reached"
        assert not trap.caught
        refused = {(r.destination, r.reason) for r in box.sandbox.network().refused}
        assert {(outside.host, "forbidden"), ("169.254.169.254", "forbidden")} <= refused


def test_sandboxes_are_no_destination_of_one_another(new_box: NewBox) -> None:
    serve = """
import socket, threading, time
t = socket.create_server(("::", 4242), family=socket.AF_INET6, dualstack_ipv6=True)
u = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); u.bind(("::", 4242))
def run(wait):
    while True: wait(); print("caught", flush=True)
for w in (t.accept, lambda: u.recvfrom(9)): threading.Thread(target=run, args=(w,)).start()
print("listening", flush=True)
"""
    with new_box(network_rules=WORLD) as a, new_box(network_rules=WORLD) as b:
        server = b.sandbox.start(["python3", "-c", serve])
        assert next(iter(server.iter_stdout())) == b"listening\n"
        addresses = b.sandbox.network().addresses
        assert len(addresses) == 2
        code = TRY + "\n".join(f"shout({h!r}, 4242)\nprint(attempt({h!r}, 4242))" for h in addresses)
        assert a.python(code).split() == ["closed"] * 2
        assert b.python(TRY + "print(attempt('127.0.0.1', 4242))") == "closed"  # it is reached there, and says nothing
        wait_for("only its own was caught", lambda: server.poll().stdout_size == len("listening\ncaught\n"))
        assert any(r.destination in addresses and r.reason == "forbidden" for r in a.sandbox.network().refused)
        server.kill()


def test_root_inside_changes_nothing_of_its_link(new_box: NewBox, outside: Outside) -> None:
    a, _ = outside.addresses
    code = """
import errno, fcntl, socket, struct
def tried(what, f):
    try:
        f(); print(what, "ok")
    except OSError as e:
        print(what, errno.errorcode[e.errno])
def netlink(kind, flags, body):
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    s.send(struct.pack("IHHII", 16 + len(body), kind, flags | 5, 1, 0) + body)
    e = struct.unpack("i", s.recv(4096)[16:20])[0]
    if e: raise OSError(-e, "")
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
tried("mac", lambda: fcntl.ioctl(s, 0x8924, struct.pack("16sH14s", b"eth0", 1, bytes(14))))
tried("mtu", lambda: fcntl.ioctl(s, 0x8922, struct.pack("16si12x", b"eth0", 1500)))
tried("address", lambda: netlink(20, 0x400, struct.pack("BBBBI", 2, 32, 0, 0, 2) + struct.pack("HH4s", 8, 2, b"\\x0a\\0\\0\\1")))
tried("route", lambda: netlink(24, 0x400, struct.pack("BBBBBBBBI", 2, 0, 0, 0, 254, 3, 0, 1, 0)))
tried("neighbour", lambda: netlink(28, 0x400, struct.pack("BxxxiHBB", 2, 2, 128, 0, 0)))
tried("down", lambda: netlink(16, 0, struct.pack("BxHiII", 0, 0, 2, 0, 1)))
tried("packets", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
tried("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255))
tried("mark", lambda: s.setsockopt(1, 36, 0x64736563))
tried("transparent", lambda: s.setsockopt(0, 19, 1))
"""
    with new_box(network_rules={f"{a}:7001/udp": True}) as box:
        outcomes = dict(line.split() for line in box.python(code).splitlines())
        assert len(outcomes) == 10
        assert set(outcomes.values()) <= {"EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT"}, outcomes
        # IP_FREEBIND needs no right, and gives a socket another's address: the kernel has no way for what it sends.
        spoof = f"""
import socket
for source in ("10.9.9.9", "198.18.0.99", "{outside.host}"):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(0, 15, 1)
    s.bind((source, 5555))
    try: s.sendto(b"hello", ({a!r}, 7001)); print("sent")
    except OSError: pass
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20)
s.sendto(b"hello", ({a!r}, 7001)); print(s.recv(9).decode())
"""
        assert box.python(spoof) == "hello"


def test_floods_of_one_are_counted_and_harm_no_other(new_box: NewBox, platform: Platform, outside: Outside) -> None:
    """Refused packets to ever more destinations, and connections without end: what is kept of them is bounded."""
    a, b = outside.addresses
    packets = """
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setblocking(False)
for i in range(20000):
    try: s.sendto(b"x", (f"10.{i % 200}.{i // 200}.9", 1 + i))
    except OSError: pass
print("done")
"""
    connections = f"""
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = []
for i in range(1500):
    s = socket.socket(); s.setblocking(False); s.connect_ex(({a!r}, 7000)); held.append(s)
import time
alive = 0
for s in held:
    s.setblocking(True); s.settimeout(20)
    try:
        s.sendall(b"x"); s.shutdown(1)
        alive += s.makefile().read() == "1\\n"
    except OSError: pass
print(alive)
"""
    with new_box(network_rules={f"{a}:7000": True}) as greedy, new_box(network_rules={f"{b}:8080": True}) as quiet:
        assert greedy.python(packets) == "done"
        status = greedy.sandbox.network()
        assert status.refused_packets >= 1000
        assert 0 < len(status.refused) <= 64
        flood = greedy.sandbox.start(["python3", "-c", connections])
        for _ in range(3):
            assert quiet.python(TRY + f"print(attempt({b!r}, 8080))") == "reached"
        result = flood.wait()
        assert result.exit_code == 0, result.stderr
        assert 0 < int(result.stdout) <= 1500
        assert greedy.python(TRY + f"print(attempt({a!r}, 7001))") == "closed"
        assert quiet.sandbox.network().refused_packets == 0
        quiet.assert_well()


def test_relay_killed(new_box: NewBox, platform: Platform, outside: Outside) -> None:
    """Its connections are reset, later ones are carried by the next. Nothing is open meanwhile, also where the edge dies, too."""
    a, b = outside.addresses
    follow = f"""
import socket
s = socket.create_connection(({a!r}, 8080), 20); s.sendall(b"GET /stream HTTP/1.0\\r\\n\\r\\n")
while s.recv(100): print("tick", flush=True)
"""
    with new_box(network_rules={f"{a}:8080": True}) as box:

        def reached(host: str) -> bool:
            return box.python(TRY + f"print(attempt({host!r}, 8080))") == "reached"

        for victims in ("relay", "edge", "both"):
            command = box.sandbox.start(["python3", "-c", follow])
            receives(command, 50)
            old = relay_pid(platform)
            assert old is not None
            if victims != "relay":
                platform.kill_edge()
            if victims != "edge":
                os.kill(old, signal.SIGKILL)
                result = command.wait()
                assert "ConnectionResetError" in result.stderr, result
            else:
                receives(command, 100)
                command.kill()
            wait_for("it is open again", partial(reached, a))
            assert not reached(b)
            assert (relay_pid(platform) == old) == (victims == "edge")


def receives(command: Command, more: int) -> None:
    before = command.poll().stdout_size
    wait_for("it receives", lambda: command.poll().stdout_size > before + more)
