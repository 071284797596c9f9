"""Ports of a sandbox from the command line: port-forward, http and url."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest
from platform_under_test import BIN, IMAGE, Platform, wait_for

ECHO = """
import socket, threading
s = socket.create_server(("127.0.0.1", 7000))
def serve(c):
    data = b""
    while p := c.recv(65536):
        data += p
    c.sendall(data[::-1]); c.close()
while True:
    threading.Thread(target=serve, args=(s.accept()[0],)).start()
"""


@pytest.fixture(scope="module")
def sandbox(platform: Platform) -> Iterator[str]:
    serve = "mkdir /www && echo hello > /www/index.html && cd /www && exec python3 -m http.server --bind 127.0.0.1 8000"
    made = platform.dsec("run", "-d", "-m", "256m", "--ttl", "10m", "--start", serve, "--ready-tcp", "8000", IMAGE).stdout.strip()
    platform.dsec("exec", "-d", made, "python3", "-c", ECHO)
    yield made
    platform.dsec("rm", made, check=False)


class Forward:
    """A port-forward that runs, and where it listens."""

    def __init__(self, platform: Platform, *args: str) -> None:
        self.process = subprocess.Popen([str(BIN / "dsec"), "port-forward", *args], env=platform.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.ports = []
        for _ in args[1:]:
            line = self.process.stdout.readline()
            found = re.fullmatch(r"Forwarding from 127\.0\.0\.1:(\d+) -> \d+\n", line)
            assert found, line or self.process.communicate(timeout=60)
            self.ports.append(int(found[1]))

    def end(self) -> str:
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=60)
        assert self.process.returncode == -signal.SIGINT, err
        return err

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def forward(platform: Platform) -> Iterator[object]:
    made: list[Forward] = []

    def run(*args: str) -> Forward:
        made.append(Forward(platform, *args))
        return made[-1]

    yield run
    for f in made:
        f.close()


def test_forward_http(forward, sandbox: str) -> None:
    f = forward(sandbox, ":8000", "0:7000")
    for _ in range(3):
        with urllib.request.urlopen(f"http://127.0.0.1:{f.ports[0]}/", timeout=60) as answer:
            assert answer.read() == b"hello\n"
    assert f.end() == ""


def test_forward_half_close_and_many(forward, sandbox: str) -> None:
    """The other side sees the end of what was sent, and what it says then arrives whole."""
    f = forward(sandbox, ":7000")
    wait_for("the server inside listens", lambda: exchange(f.ports[0], b"x") == b"x")
    data = os.urandom(3 << 20)
    assert exchange(f.ports[0], data) == data[::-1]
    assert [exchange(f.ports[0], str(i).encode()) for i in range(20)] == [str(i).encode()[::-1] for i in range(20)]


def exchange(port: int, data: bytes) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as c:
            c.sendall(data)
            c.shutdown(socket.SHUT_WR)
            got = b""
            while p := c.recv(1 << 16):
                got += p
            return got
    except OSError:
        return b""


def test_forward_to_a_port_that_nobody_listens_on(forward, sandbox: str) -> None:
    f = forward(sandbox, ":9", ":8000")
    assert exchange(f.ports[0], b"x") == b""
    with urllib.request.urlopen(f"http://127.0.0.1:{f.ports[1]}/", timeout=60) as answer:  # the other one goes on
        assert answer.status == 200
    err = f.end()
    assert err == f"dsec: 127.0.0.1:{f.ports[0]}: nothing listens on port 9\n"


def test_forward_usage(platform: Platform, sandbox: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = platform.dsec("port-forward", sandbox, f"{taken.getsockname()[1]}:8000", check=False)
    assert done.returncode == 1 and "in use" in done.stderr
    done = platform.dsec("port-forward", sandbox, "http", check=False)
    assert done.returncode == 2 and done.stderr.startswith("dsec: ")
    done = platform.dsec("port-forward", "nobody", ":8000", check=False)
    assert done.returncode == 1 and "nobody" in done.stderr


def test_http(platform: Platform, sandbox: str) -> None:
    assert platform.dsec("http", sandbox, ":8000/").stdout == "hello\n"
    answer = json.loads(platform.dsec("http", "--json", sandbox, "HEAD", "localhost:8000/").stdout)
    assert answer["status"] == 200 and answer["headers"]["Content-Length"] == ["6"]
    done = platform.dsec("http", "--fail", sandbox, ":8000/none", check=False)
    assert done.returncode == 22 and "404" in done.stderr
    done = platform.dsec("http", sandbox, ":9/", check=False)
    assert done.returncode == 1 and done.stderr.startswith("dsec: "), done
    done = platform.dsec("http", sandbox, "http://10.0.0.1:8000/", check=False)
    assert done.returncode == 1 and "localhost" in done.stderr


def test_url(platform: Platform, sandbox: str) -> None:
    made = json.loads(platform.dsec("url", "--json", "--expires", "60s", sandbox, "8000").stdout)
    assert made["url"].startswith("http") and made["expiresAt"]
    assert platform.dsec("url", sandbox, "8000").stdout.startswith("http")


def test_views(platform: Platform, sandbox: str) -> None:
    """What else is seen of the inside: metrics, processes, files; and a process that is signalled."""
    [m] = [json.loads(line) for line in platform.dsec("stats", "--no-stream", "--json", sandbox).stdout.splitlines()]
    assert int(m["memoryBytes"]) > 0 and m["sandboxId"] == sandbox
    command = platform.dsec("exec", "-d", sandbox, "sleep", "1000").stdout.strip()
    processes = [json.loads(line) for line in platform.dsec("top", "--json", sandbox).stdout.splitlines()]
    [pid] = [p["pid"] for p in processes if p["argv"] == ["sleep", "1000"]]
    assert platform.dsec("signal", "-s", "INT", sandbox, str(pid)).stdout == f"{pid}\n"
    assert platform.dsec("attach", sandbox, command, check=False).returncode == 130
    platform.dsec("files", "mkdir", "-p", sandbox, "/data/in")
    assert "/data/in" in platform.dsec("files", "stat", sandbox, "/data/in").stdout
    assert platform.dsec("files", "ls", sandbox, "/data").stdout == "in\n"
    assert platform.dsec("files", "stat", sandbox, "/none", check=False).returncode == 1
