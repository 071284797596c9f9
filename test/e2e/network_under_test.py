"""A network beside the host, joined to it by a veth with private addresses, with servers in it; and a name server. Nothing of it is
on the internet."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Self

from platform_under_test import wait_for

SERVER = r"""
import socket, sys, threading, time

def http(c):
    with c:
        f = c.makefile("rb")
        path = f.readline().split()[1].decode()
        while f.readline().strip():
            pass
        if path == "/stream":  # a line now and then, for ever
            c.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            while True:
                c.sendall(b"tick\n")
                time.sleep(0.02)
        size = int(path[1:] or 6) if path[1:].isdigit() else 6
        c.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        block = bytes(range(256)) * 256
        while size > 0:
            c.sendall(block[:size])
            size -= min(size, len(block))

def count(c):  # says how much it got, after the other end has closed its half
    with c:
        n = 0
        while data := c.recv(1 << 16):
            n += len(data)
        c.sendall(b"%d\n" % n)

def serve(address, port, handle):
    s = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    def run():
        while True:
            c, _ = s.accept()
            threading.Thread(target=quiet, args=(handle, c), daemon=True).start()
    threading.Thread(target=run, daemon=True).start()

def quiet(handle, c):
    try:
        handle(c)
    except OSError:
        pass

def echo(address, port):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind((address, port))
    def run():
        while True:
            data, peer = s.recvfrom(65536)
            s.sendto(data, peer)
    threading.Thread(target=run, daemon=True).start()

for address in sys.argv[1:]:
    for port in (8080, 8081):
        serve(address, port, http)
    serve(address, 7000, count)
    if ":" not in address:
        echo(address, 7001)
print("ready", flush=True)
threading.Event().wait()
"""


def ip(*args: str, check: bool = True) -> None:
    subprocess.run(["ip", *args], check=check, capture_output=not check)


class Outside:
    """Servers at `addresses` (two of IPv4, one of IPv6): HTTP on 8080 and 8081, a counter on 7000, echo of datagrams on 7001."""

    def __init__(self) -> None:
        self.name = f"dsec-t-{secrets.token_hex(3)}"
        self.link = self.name[-6:]
        net = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}"
        self.host, self.addresses = f"{net}.1", [f"{net}.2", f"{net}.3"]
        self.host6, self.address6 = f"fdf2:{self.link[:4]}::1", f"fdf2:{self.link[:4]}::2"

    def __enter__(self) -> Self:
        ip("netns", "add", self.name)
        ip("link", "add", f"h{self.link}", "type", "veth", "peer", "name", f"n{self.link}", "netns", self.name)
        for address in (f"{self.host}/24", f"{self.host6}/64"):
            ip("addr", "add", address, "dev", f"h{self.link}", *(["nodad"] if ":" in address else []))
        ip("link", "set", f"h{self.link}", "up")
        for address in [*(f"{a}/24" for a in self.addresses), f"{self.address6}/64"]:
            ip("-n", self.name, "addr", "add", address, "dev", f"n{self.link}", *(["nodad"] if ":" in address else []))
        for link in (f"n{self.link}", "lo"):
            ip("-n", self.name, "link", "set", link, "up")
        command = ["ip", "netns", "exec", self.name, sys.executable, "-c", SERVER, *self.addresses, self.address6]
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
        ip("netns", "del", self.name, check=False)
        ip("link", "del", f"h{self.link}", check=False)


class Names:
    """A name server on the loopback. `table` is what names stand for; `silent` says nothing at all."""

    def __init__(self, **table: list[str]) -> None:
        self.table = table
        self.silent = False
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _run(self) -> None:
        while True:
            try:
                query, peer = self.socket.recvfrom(1500)
            except OSError:
                return
            if not query:  # the socket has been shut down
                return
            if not self.silent:
                self.socket.sendto(self._answer(query), peer)

    def _answer(self, query: bytes) -> bytes:
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        question = query[12 : at + 5]
        (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
        name = ".".join(labels).lower()
        family = {1: socket.AF_INET, 28: socket.AF_INET6}.get(kind)
        found = [a for a in self.table.get(name, []) if family is not None and (":" in a) == (family == socket.AF_INET6)]
        answers = b""
        for address in found:
            data = socket.inet_pton(family, address)  # type: ignore[arg-type]
            answers += b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, 1, len(data)) + data
        code = 0x8180 if name in self.table else 0x8183
        return query[:2] + struct.pack("!HHHHH", code, 1, len(found), 0, 0) + question + answers


def settled(check: object, seconds: float = 60) -> None:
    """Waits until check() is true: what depends on a refresh of names."""
    wait_for("it has settled", check, seconds)  # type: ignore[arg-type]
