"""What is not a request: garbage, too much, too slow, without a key, by another user. The platform refuses it and goes on."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from platform_under_test import IMAGE, ROOT, Platform

SERVICE = "/dsec.v1.SandboxService/"


@pytest.fixture(autouse=True)
def still_works(platform: Platform) -> Iterator[None]:
    """After each of the tests: the same edge answers, and a sandbox can be had."""
    edge = platform.edge_pid()
    yield
    assert platform.edge_pid() == edge
    assert platform.dsec("run", "--rm", IMAGE, "echo", "well").stdout == "well\n"


def connect(platform: Platform, timeout: float = 60) -> socket.socket:
    return socket.create_connection(("127.0.0.1", platform.port), timeout=timeout)


def until_closed(s: socket.socket) -> bytes:
    """All that the server says until it ends the connection. Raises TimeoutError if it does not."""
    said = bytearray()
    try:
        while chunk := s.recv(65536):
            said += chunk
    except ConnectionResetError:
        pass  # it did not read all that we sent
    return bytes(said)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def head(platform: Platform, method: str, length: int, key: str | None = None) -> bytes:
    return (
        f"POST {SERVICE}{method} HTTP/1.1\r\nHost: dsec\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {platform.key() if key is None else key}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()


# ---- the API's port


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 4096, b"\xff" * 100_000, b"\r\n\r\n\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64, b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"GET /\n HTTP/1.1\r\nno colon\r\n\r\n",
    ],
    ids=["zeros", "ones", "empty lines", "no version", "other version", "TLS", "HTTP/2 frames", "negative length", "smuggling", "bad head"],
)  # fmt: skip
def test_garbage(platform: Platform, garbage: bytes) -> None:
    with connect(platform) as s:
        try:
            s.sendall(garbage)
            s.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has had enough already
        answer = until_closed(s)
    assert status(answer) in (0, 400, 401, 431, 505), answer
    assert b"goroutine" not in answer and b".go:" not in answer


def test_head_is_bounded(platform: Platform) -> None:
    with connect(platform) as s:
        try:
            s.sendall(b"POST / HTTP/1.1\r\nHost: dsec\r\nX-Long: " + b"x" * (1 << 20) + b"\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert status(until_closed(s)) in (0, 431)
    with connect(platform) as s:
        s.sendall(b"POST / HTTP/1.1\r\nHost: dsec\r\nX-Long: " + b"x" * (100 << 10) + b"\r\n\r\n")
        assert status(until_closed(s)) in (0, 431)


def test_slow_head_is_cut_off(platform: Platform) -> None:
    with connect(platform, timeout=120) as s:
        s.sendall(b"POST / HTTP/1.1\r\nHost: ")
        assert status(until_closed(s)) in (0, 408)  # the time-out of the socket is the bound


@pytest.mark.long
def test_head_byte_by_byte_is_cut_off(platform: Platform) -> None:
    """Progress does not help: the head as a whole has a deadline."""
    with connect(platform) as s:
        s.sendall(b"POST / HTTP/1.1\r\nX-Slow: ")
        s.settimeout(0.25)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                s.sendall(b"x")
                if s.recv(4096) == b"":
                    return
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                return
    raise AssertionError("the connection lives on")


@pytest.mark.long
def test_body_that_stops_is_cut_off(platform: Platform) -> None:
    with connect(platform, timeout=120) as s:
        s.sendall(head(platform, "CreateSandbox", 1000) + b'{"spec":')
        assert status(until_closed(s)) != 200


def test_half_a_body(platform: Platform) -> None:
    body = json.dumps({"spec": {"image": IMAGE, "labels": {"test": "half"}}}).encode()
    for part in (b"", body[: len(body) // 2], body[:-1]):
        with connect(platform) as s:
            s.sendall(head(platform, "CreateSandbox", len(body)) + part)
            s.shutdown(socket.SHUT_WR)
            assert status(until_closed(s)) != 200
        with connect(platform) as s:  # and without waiting for an answer
            s.sendall(head(platform, "CreateSandbox", len(body)) + part)
    assert platform.dsec("ps", "-a", "-q", "-l", "test=half").stdout == ""


def test_oversized_json(platform: Platform) -> None:
    for method, size in (("CreateSandbox", 2 << 20), ("ListSandboxes", 2 << 20), ("Exec", 32 << 20)):
        with connect(platform) as s:  # as it announces itself
            s.sendall(head(platform, method, size))
            answer = until_closed(s)
            assert status(answer) == 429 and b"request_too_large" in answer, answer
        code, answer = chunked(platform, SERVICE + method, b'{"spec":{"image":"' + b"x" * size)  # and where it does not
        assert code == 429, (code, answer)


def test_deep_json(platform: Platform) -> None:
    for body in (b"[" * 500_000, b'{"spec":' * 100_000):
        code, answer = chunked(platform, SERVICE + "CreateSandbox", body)
        assert code == 400 and len(answer) < 2000, (code, answer[:2000])


def chunked(platform: Platform, path: str, body: bytes) -> tuple[int, bytes]:
    """A request that does not say how long it is."""
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {platform.key()}"}
    try:
        try:
            connection.request("POST", path, pieces, headers, encode_chunked=True)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before its end
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# ---- keys


def routes() -> list[tuple[str, str]]:
    """Every route: the procedures of the contract, and those that the server's table adds."""
    contract = (ROOT / "api/dsec/v1/dsec.proto").read_text()
    found = []
    for service, body in re.findall(r"^service (\w+) \{(.*?)^\}", contract, re.MULTILINE | re.DOTALL):
        found += [("POST", f"/dsec.v1.{service}/{procedure}") for procedure in re.findall(r"\brpc (\w+)", body)]
    sandbox, command = "/v1/sandboxes/s" + "a" * 23, "/commands/x/"
    found += [(m, f"{sandbox}/files?path=/etc/passwd") for m in ("GET", "PUT")]
    found += [("GET", sandbox + command + "stdout"), ("GET", sandbox + command + "stderr"), ("PUT", sandbox + command + "stdin")]
    found += [("POST", f"/v1/environments/{kind}/x:1") for kind in ("base", "workspace", "toolkit")]
    return [*found, ("GET", "/"), ("GET", "/debug/pprof/"), ("GET", "/metrics"), ("POST", "/no/such/route")]


def ask(platform: Platform, method: str, path: str, authorization: str | None, body: bytes = b"{}") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=60)
    try:
        headers = {"Content-Type": "application/json"} | ({} if authorization is None else {"Authorization": authorization})
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_no_route_without_a_key(platform: Platform) -> None:
    key = platform.key()
    wrong = [None, "", "Bearer", "Bearer ", "Bearer x", f"Bearer {key[:-1]}", f"Bearer {key}x", f"Basic {key}", key, f"Bearer {key} {key}"]
    assert len(routes()) > 20
    answers = set()
    for method, path in routes():
        for authorization in wrong:
            code, answer = ask(platform, method, path, authorization)
            assert code == 401, (method, path, authorization, answer)
            answers.add(answer)
    # The same whatever was asked: it tells nothing of what is there. Only where no key was given it may say so.
    assert len(answers) <= 3, answers
    assert not [a for a in answers if key[:12].encode() in a or b"sandbox" in a]


def test_unknown_route(platform: Platform) -> None:
    authorization = f"Bearer {platform.key()}"
    for method, path in (("POST", "/no/such/route"), ("POST", SERVICE + "NoSuch"), ("GET", "/"), ("GET", "/debug/pprof/heap"), ("DELETE", SERVICE + "Exec")):
        code, answer = ask(platform, method, path, authorization)
        assert code in (404, 405) or (path.endswith("/") and code == 400), (path, code, answer)
        assert len(answer) < 500 and json.loads(answer)["code"], answer
    for path in ("/v1/../etc/passwd", "//etc/passwd", SERVICE + "../SystemService/GetInfo"):
        code, answer = ask(platform, "POST", path, authorization)
        assert code == 400, (path, code, answer)


# ---- the sockets of the host


def sockets_below(directory: Path) -> list[Path]:
    found = (Path(top) / name for top, _, names in os.walk(directory) for name in names)
    return [path for path in found if stat.S_ISSOCK(path.lstat().st_mode)]


def test_sockets_are_out_of_reach_of_other_users(platform: Platform) -> None:
    sandbox = platform.dsec("run", "-d", IMAGE).stdout.strip()
    try:
        sockets = sockets_below(platform.run) + sockets_below(platform.data)
        assert sockets, "an edge listens somewhere"
        attempt = (
            "import socket, sys\n"
            "for path in sys.argv[1:]:\n"
            "    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):\n"
            "        try:\n"
            "            socket.socket(socket.AF_UNIX, kind).connect(path)\n"
            "            print('reached', path)\n"
            "        except OSError as e:\n"
            "            print(type(e).__name__, path)\n"
        )
        for who in ([], ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]):
            done = subprocess.run([*who, "/usr/bin/python3", "-c", attempt, *map(str, sockets)], capture_output=True, text=True, check=True, cwd="/", timeout=60)
            said = {line.split()[0] for line in done.stdout.splitlines()}
            # As root they are reached: it is the same attempt, and it works.
            assert said == {"PermissionError"} if who else "reached" in said, done.stdout
        done = subprocess.run(["setpriv", "--reuid", "65534", "--clear-groups", "ls", str(platform.run), str(platform.data)], capture_output=True, text=True, check=False, timeout=60)
        assert done.stdout == "" and done.returncode != 0, done
        abstract = [line for line in Path("/proc/net/unix").read_text().splitlines() if "@" in line and any(n in line for n in platform.names())]
        assert abstract == []  # no file mode guards those
    finally:
        platform.dsec("rm", sandbox)


def test_garbage_on_the_sockets_of_the_host(platform: Platform) -> None:
    """Only root gets there. Even so it ends nothing but its own connection."""
    sandbox = platform.dsec("run", "-d", IMAGE).stdout.strip()
    try:
        heard = set()
        for path in sockets_below(platform.run):
            for garbage in (b"\0" * 4096, b"\xff" * 100_000, b"GET / HTTP/1.1\r\n\r\n"):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
                    s.settimeout(5)
                    try:
                        s.connect(str(path))
                        heard.add(path)
                        s.sendall(garbage)
                    except OSError:
                        continue  # of another kind, or it has had enough
        assert heard, "somebody listens there"
        assert platform.dsec("exec", sandbox, "echo", "well").stdout == "well\n"
    finally:
        platform.dsec("rm", sandbox)
