"""Servers inside a sandbox: HTTP, WebSocket, raw connections, browsers' URLs, and when a sandbox is ready."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from platform_under_test import IMAGE, Platform, wait_for

import libdsec.sync
from libdsec import (
    DSecContainerRunArgs,
    DSecError,
    ExecProbe,
    FailedPreconditionError,
    HttpProbe,
    InvalidArgumentError,
    Sandbox,
    TcpProbe,
    UnavailableError,
)

New = Callable[..., AbstractAsyncContextManager[Sandbox]]

# One server for all: HTTP with some special paths, on 8000; raw TCP with a first line that says what to do, on 9000.
SERVER = r"""
import base64, hashlib, json, os, socket, struct, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class H(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *a): pass
    def reply(self, body, status=200, **headers):
        self.send_response(status)
        for k, v in headers.items(): self.send_header(k.replace("_", "-"), v)
        self.send_header("Content-Length", str(len(body))); self.end_headers()
        if self.command != "HEAD": self.wfile.write(body)
    def any(self):
        n = int(self.headers.get("Content-Length") or 0); body = self.rfile.read(n)
        if self.headers.get("Transfer-Encoding") == "chunked":
            while True:
                size = int(self.rfile.readline(), 16); body += self.rfile.read(size); self.rfile.readline()
                if not size: break
        path = self.path.split("?")[0]
        if path == "/sse":
            self.send_response(200); self.send_header("Content-Type", "text/event-stream"); self.send_header("Connection", "close"); self.end_headers()
            for i in range(3):
                self.wfile.write(b"data: %d\n\n" % i); self.wfile.flush(); go.wait() if i == 0 else None
            self.close_connection = True; return
        if path == "/go": go.set(); return self.reply(b"ok")
        if path == "/redirect": return self.reply(b"", 302, Location="/echo?redirected")
        if path == "/big":
            self.send_response(200); self.send_header("Content-Length", str(1 << 30)); self.end_headers()
            block = bytes(range(256)) * 4096
            for _ in range(1 << 10): self.wfile.write(block)
            return
        if path == "/ws": return self.ws()
        self.reply(json.dumps({"method": self.command, "path": self.path, "headers": dict(self.headers), "body": body.decode("latin-1")}).encode(),
                   Set_Cookie="own=1; Domain=localhost; Path=/", Dsec_Error="forged")
    def ws(self):
        accept = base64.b64encode(hashlib.sha1((self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest())
        self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"); self.wfile.flush()
        while True:
            head = self.rfile.read(2)
            if len(head) < 2: break
            n = head[1] & 127; mask = self.rfile.read(4); data = bytes(b ^ mask[i % 4] for i, b in enumerate(self.rfile.read(n)))
            self.wfile.write(bytes([head[0], n]) + data); self.wfile.flush()
            if head[0] & 15 == 8: break
        self.close_connection = True
    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = do_OPTIONS = any

def raw(c):
    f = c.makefile("rb"); word = f.readline().strip()
    if word == b"echo":
        data = f.read(); c.sendall(data)
    elif word == b"first":
        c.sendall(b"first"); c.shutdown(socket.SHUT_WR); open("/tmp/got", "wb").write(f.read())
    elif word == b"reset":
        c.sendall(b"x"); f.readline(); c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)); f.close()
    elif word == b"drip":
        while True: c.sendall(b"x" * 1000); time.sleep(0.05)
    elif word == b"hold": f.read()
    c.close()

def serve():
    l = socket.create_server(("127.0.0.1", 9000))
    while True:
        c, _ = l.accept(); threading.Thread(target=raw, args=(c,), daemon=True).start()

go = threading.Event()
threading.Thread(target=serve, daemon=True).start()
ThreadingHTTPServer(("127.0.0.1", 8000), H).serve_forever()
"""
READY = {"start": ["python3", "-c", SERVER], "ready_when": TcpProbe(9000, interval=0.05)}


async def test_http(new_sandbox: New, platform: Platform) -> None:
    async with new_sandbox(**READY) as sandbox:
        port = sandbox.port(8000)
        async with await port.http("POST", "/a%2Fb/../c//?x=%2F&y", headers={"Authorization": "Basic abc", "X-A": "b"}, body="text") as answer:
            seen = await answer.json()
            assert answer.status == 200
            assert answer.headers["set-cookie"] == "own=1; Domain=localhost; Path=/"
        assert seen["method"] == "POST"
        assert seen["path"] == "/a%2Fb/../c//?x=%2F&y"
        assert seen["body"] == "text"
        headers = {k.lower(): v for k, v in seen["headers"].items()}
        assert headers["authorization"] == "Basic abc"
        assert headers["host"] == "localhost:8000"
        assert headers["x-forwarded-prefix"] == f"/v1/sandboxes/{sandbox.id}/ports/8000/http"
        assert not [k for k in headers if k.startswith("dsec")]
        assert platform.key() not in json.dumps(seen)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"0123456789" * 100

        async with await port.http("PUT", "/up", body=pieces()) as answer:
            assert len((await answer.json())["body"]) == 100_000
        async with await port.http("HEAD", "/x") as answer:
            assert answer.status == 200
            assert await answer.read() == b""
        # Events come as they are written: the server waits after the first.
        async with await port.http("GET", "/sse") as answer:
            events = answer.iter_bytes()
            assert await anext(events) == b"data: 0\n\n"
            async with await port.http("GET", "/go"):
                pass
            assert b"".join([piece async for piece in events]) == b"data: 1\n\ndata: 2\n\n"
        # Any client with the key can do the same; the answer cannot act on the API's origin.
        url = urlsplit(port.url("/plain"))
        plain = http.client.HTTPConnection(url.netloc, timeout=60)
        plain.request("GET", url.path, headers={"Authorization": f"Bearer {platform.key()}"})
        got = plain.getresponse()
        assert platform.key() not in got.read().decode()
        assert got.headers["Set-Cookie"] is None
        assert got.headers["Dsec-Error"] is None
        assert got.headers["Content-Security-Policy"] == "sandbox"
        plain.close()


async def test_http_from_the_sandboxs_position(new_sandbox: New) -> None:
    async with new_sandbox(**READY) as sandbox:
        async with await sandbox.http("GET", "http://localhost:8000/redirect") as answer:
            assert answer.status == 302
        async with await sandbox.http("GET", "http://127.0.0.1:8000/redirect", follow_redirects=True) as answer:
            assert (await answer.json())["path"] == "/echo?redirected"
            assert answer.url == "http://127.0.0.1:8000/echo?redirected"
        await sandbox.run_shell("echo 127.0.0.1 db.local >> /etc/hosts", check=True)
        async with await sandbox.http("GET", "http://db.local:8000/x") as answer:
            assert (await answer.json())["headers"]["Host"] == "db.local:8000"
        for url, reason in {
            "http://localhost:1/": "port_refused",
            "http://no-such.example/": "host_not_found",
            "ftp://localhost/": "invalid_url",
            "https://localhost:8000/": "port_bad_response",
        }.items():
            with pytest.raises(DSecError) as e:
                (await sandbox.http("GET", url)).close()
                raise AssertionError(url)
            assert e.value.reason == reason, url
        with pytest.raises(InvalidArgumentError):
            await sandbox.http("GET", "http://localhost:8000/", headers={"X": "a\r\nB: c"})


async def test_half_close_both_ways(new_sandbox: New) -> None:
    async with new_sandbox(**READY) as sandbox:
        port = sandbox.port(9000)
        data = os.urandom(3 << 20)
        async with await port.connect() as stream:
            await stream.write(b"echo\n")
            sending = asyncio.ensure_future(stream.write(data))
            await sending
            await stream.write_eof()
            assert b"".join([piece async for piece in stream]) == data
        async with await port.connect() as stream:
            await stream.write(b"first\n")
            assert await stream.read() == b"first"
            assert await stream.read() == b""  # its end, while ours goes on
            await stream.write(b"second")
            await stream.write_eof()
        await sandbox.run_shell("until test -s /tmp/got; do sleep 0.05; done", timeout=60, check=True)
        assert await sandbox.read_file("/tmp/got") == b"second"
        with pytest.raises(FailedPreconditionError) as e:
            await sandbox.port(1).connect()
        assert e.value.reason == "port_refused"
        async with await port.connect() as stream:
            await stream.write(b"reset\n")
            assert await stream.read() == b"x"
            await stream.write(b"\n")
            with pytest.raises(UnavailableError):
                await stream.read()


def upgrade(platform: Platform, target: str, protocol: str, *more: str, host: str | None = None) -> tuple[socket.socket, bytes]:
    """The connection and the head of the answer."""
    s = socket.create_connection(("127.0.0.1", platform.port), timeout=60)
    lines = [f"GET {target} HTTP/1.1", f"Host: {host or f'127.0.0.1:{platform.port}'}", "Connection: Upgrade", f"Upgrade: {protocol}", *more]
    s.sendall("\r\n".join([*lines, "", ""]).encode())
    head = b""
    while b"\r\n\r\n" not in head:
        byte = s.recv(1)
        assert byte, head
        head += byte
    return s, head


def frame(word: bytes, kind: int = 0x81) -> bytes:
    return bytes([kind, 0x80 | len(word)]) + b"\1\2\3\4" + bytes(b ^ (i % 4 + 1) for i, b in enumerate(word))


def exactly(s: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        more = s.recv(n - len(data))
        assert more, data
        data += more
    return data


async def test_raw_tcp_and_websocket(new_sandbox: New, platform: Platform) -> None:
    async with new_sandbox(**READY) as sandbox:
        auth = f"Authorization: Bearer {platform.key()}"
        ports = f"/v1/sandboxes/{sandbox.id}/ports/"
        s, head = upgrade(platform, ports + "9000/tcp", "dsec-tcp", auth)
        assert b" 101 " in head
        s.sendall(b"echo\nhello")
        s.shutdown(socket.SHUT_WR)
        assert exactly(s, 5) == b"hello"
        assert s.recv(1) == b""
        s.close()
        s, _ = upgrade(platform, ports + "9000/tcp", "dsec-tcp", auth)
        s.sendall(b"reset\n")
        assert s.recv(1) == b"x"
        s.sendall(b"\n")
        with pytest.raises(ConnectionResetError):
            s.recv(1)
        s.close()
        for target, protocol, status, reason in (
            ("9000/tcp", "other", b" 426 ", b"upgrade_required"),
            ("1/tcp", "dsec-tcp", b" 502 ", b"port_refused"),
        ):
            s, head = upgrade(platform, ports + target, protocol, auth)
            assert status in head and b"Dsec-Error: " + reason in head, head
            s.close()
        s, head = upgrade(platform, ports + "8000/http/ws", "websocket", auth, "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: abc=")
        assert b" 101 " in head
        accept = base64.b64encode(hashlib.sha1(b"abc=258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        assert b"Sec-Websocket-Accept: " + accept in head or b"Sec-WebSocket-Accept: " + accept in head
        for word in (b"one", b"two"):
            s.sendall(frame(word))
            assert exactly(s, 2 + len(word)) == b"\x81" + bytes([len(word)]) + word
        s.sendall(frame(b"", 0x88))
        assert exactly(s, 2) == b"\x88\0"
        assert s.recv(1) == b""
        s.close()


async def test_forward(new_sandbox: New, platform: Platform) -> None:
    async with new_sandbox(**READY) as sandbox:
        async with sandbox.port(9000).forward() as local:
            reader, writer = await asyncio.open_connection(local.host, local.port)
            writer.write(b"echo\nhello")
            writer.write_eof()
            assert await reader.read() == b"hello"
            writer.close()
            reader, writer = await asyncio.open_connection(local.host, local.port)
            writer.write(b"reset\n")
            assert await reader.read(1) == b"x"
            writer.write(b"\n")
            with pytest.raises(ConnectionResetError):
                await reader.read()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(local.host, local.port)

        def by_thread() -> None:
            with libdsec.sync.DSecClient(platform.url, platform.key()) as client:
                port = client.get_sandbox(sandbox.id).port(9000)
                with port.connect() as stream:
                    stream.write(b"echo\nsync")
                    stream.write_eof()
                    assert b"".join(stream) == b"sync"
                with port.forward() as local, socket.create_connection((local.host, local.port), timeout=60) as s:
                    s.sendall(b"echo\nforward")
                    s.shutdown(socket.SHUT_WR)
                    assert exactly(s, 7) == b"forward"
                    assert s.recv(1) == b""

        await asyncio.to_thread(by_thread)


async def test_slow_reader_loses_nothing(new_sandbox: New) -> None:
    """1 GB through a reader that pauses: back-pressure reaches the server, and every byte arrives."""
    async with new_sandbox(**READY) as sandbox, await sandbox.port(8000).http("GET", "/big", timeout=120) as answer:
        want = bytes(range(256)) * 4096
        got = turn = 0
        async for piece in answer.iter_bytes():
            at = got % 256
            assert piece == want[at : at + len(piece)], got
            got += len(piece)
            if got >> 26 > turn:
                turn = got >> 26
                await asyncio.sleep(0.05)
        assert got == 1 << 30


def browse(platform: Platform, url: str, cookie: str = "", method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    parts = urlsplit(url)
    c = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=60)
    try:
        send = {"Host": parts.netloc, **({"Cookie": cookie} if cookie else {}), **{k.replace("_", "-"): v for k, v in headers.items()}}
        c.request(method, parts.path + (f"?{parts.query}" if parts.query else ""), headers=send)
        answer = c.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        c.close()


async def test_browser(new_sandbox: New, platform: Platform) -> None:
    async with new_sandbox(**READY) as sandbox, new_sandbox() as other:
        url = await sandbox.port(8000).public_url(expires=600)
        host = urlsplit(url).netloc
        assert host == f"8000-{sandbox.id}.localhost:{platform.port}"
        token = urlsplit(url).query.partition("=")[2]
        status, headers, _ = browse(platform, url.replace("/?", "/page?a=1&"))
        assert (status, headers["Location"]) == (303, "/page?a=1")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and "Domain" not in cookie
        cookie = cookie.split(";")[0]
        page = f"http://{host}/page?a=1"
        status, headers, body = browse(platform, page, f"x=1; {cookie}; y=2", Referer=url)
        seen = json.loads(body)
        assert status == 200 and seen["path"] == "/page?a=1"
        assert seen["headers"]["Host"] == host and seen["headers"]["Cookie"] == "x=1; y=2"
        assert token not in body.decode()
        assert headers["Set-Cookie"] == "own=1; Path=/"  # not for other hosts
        # Without the token, with another's, for another port or sandbox: nothing.
        assert browse(platform, page)[0] == 401
        status, headers, body = browse(platform, page, Accept="text/html")
        assert status == 401 and headers["Dsec-Error"] == "no_port_token" and body.startswith(b"<!doctype html>")
        assert browse(platform, page, cookie[:-2])[0] == 401
        assert browse(platform, page.replace("8000-", "9000-"), cookie)[0] == 401
        assert browse(platform, page.replace(sandbox.id, other.id), cookie)[0] == 401
        # No route of the API is on such a host, whatever the key; and the cookie opens nothing on the API's.
        key = {"Authorization": f"Bearer {platform.key()}"}
        route = f"/v1/sandboxes/{sandbox.id}/files?path=/etc/hostname"
        for name in (host, f"x.localhost:{platform.port}", f"8000-{other.id}.localhost"):
            assert browse(platform, f"http://{name}{route}", **key)[0] in (401, 404)
        assert browse(platform, f"http://{host}/healthz", cookie)[2] != b"ok\n"
        assert browse(platform, f"{platform.url}/v1/sandboxes/{sandbox.id}/ports/8000/http/", cookie)[0] == 401
        # Pages of siblings are strangers.
        sibling = f"http://8000-{other.id}.localhost:{platform.port}"
        assert browse(platform, page, cookie, Origin=sibling)[0] == 403
        assert browse(platform, page, cookie, "POST", Sec_Fetch_Site="same-site", Sec_Fetch_Mode="navigate")[0] == 403
        assert browse(platform, page, cookie, Sec_Fetch_Site="same-site", Sec_Fetch_Mode="no-cors")[0] == 403
        assert browse(platform, page, cookie, Sec_Fetch_Site="same-site", Sec_Fetch_Mode="navigate")[0] == 200
        ws = ("Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: abc=", f"Cookie: {cookie}")
        s, head = upgrade(platform, "/ws", "websocket", *ws, f"Origin: http://{host}", host=host)
        assert b" 101 " in head
        s.sendall(frame(b"hi"))
        assert exactly(s, 4) == b"\x81\2hi"
        s.close()
        s, head = upgrade(platform, "/ws", "websocket", *ws, f"Origin: {sibling}", host=host)
        assert b" 403 " in head
        s.close()
        await sandbox.stop()
        assert browse(platform, page, cookie)[0] in (400, 404)


async def test_url_expires(new_sandbox: New, platform: Platform) -> None:
    """With its time both the URL and the cookie that it gave are over."""
    async with new_sandbox(**READY) as sandbox:
        url = await sandbox.port(8000).public_url(expires=600)
        short = await sandbox.port(8000).public_url(expires=3)
        host = urlsplit(url).netloc
        cookies = []
        for given in (url, short):
            status, headers, _ = browse(platform, given)
            if given == url or status != 401:  # it may have taken us longer
                assert status == 303
                cookies.append(headers["Set-Cookie"].split(";")[0])
        page = f"http://{host}/page"

        def over() -> bool:
            return browse(platform, short)[0] == 401 and all(browse(platform, page, c)[0] == 401 for c in cookies[1:])

        await asyncio.to_thread(wait_for, "it has expired", over)
        assert browse(platform, page, cookies[0])[0] == 200
        with pytest.raises(InvalidArgumentError):
            await sandbox.port(8000).public_url(expires=8 * 24 * 3600)


async def test_ready_when(platform: Platform, args: DSecContainerRunArgs) -> None:
    async with platform.client() as client:
        for probe in (HttpProbe(8000, "/x"), ExecProbe("test -e /tmp/here || { touch /tmp/here; exit 1; }")):
            async with await client.run_container(replace(args, start=["python3", "-c", SERVER], ready_when=probe)) as sandbox:
                assert sandbox.info.step_seconds["probe"] > 0
                listed = {c.command_id: c.running for c in await sandbox.list_commands()}
                assert listed == {"start": True}
        failing: list[tuple[str | list[str] | None, HttpProbe | TcpProbe | ExecProbe, list[str]]] = [
            ("echo out; echo err >&2; exit 3", TcpProbe(8000), ["exit code 3", "out", "err"]),
            ("sleep 1000", TcpProbe(8000), ["nothing listens on port 8000"]),
            (None, ExecProbe("echo not yet; exit 9"), ["exit code 9", "not yet"]),
            (["python3", "-m", "http.server", "8000"], HttpProbe(8000, "/no-such"), ["HTTP status 404"]),
        ]
        for start, wrong, words in failing:
            with pytest.raises(DSecError) as e:
                await client.run_container(replace(args, start=start, ready_when=wrong), timeout=4)
            assert e.value.reason == "probe_failed", e.value
            for word in words:
                assert word in str(e.value)
    wait_for("nothing is left", lambda: not platform.ids_on_host())


async def test_killed_in_the_middle(tmp_path: Path) -> None:
    """kill -9 of the edge and of the control plane: what is under way ends with an error, and nothing hangs."""
    with Platform() as platform:
        platform.start()
        platform.make_environments()
        args = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=256, start=READY["start"], ready_when=READY["ready_when"])  # type: ignore[arg-type]
        client = platform.client()
        sandbox = await client.run_container(args)
        for kill in (platform.kill_edge, platform.kill_up):
            stream = await sandbox.port(9000).connect()
            await stream.write(b"drip\n")
            assert await stream.read()
            answer = await sandbox.port(8000).http("GET", "/big")
            body = answer.iter_bytes()
            assert await anext(body)
            await asyncio.to_thread(kill)
            with pytest.raises(UnavailableError):
                async with asyncio.timeout(60):
                    while await stream.read():
                        pass
            with pytest.raises(UnavailableError):
                async with asyncio.timeout(60):
                    while True:
                        await anext(body)
            stream.close()
            answer.close()
            if kill == platform.kill_up:
                await asyncio.to_thread(platform.start)
            for _ in range(600):  # the sandbox and its server live on
                try:
                    async with await sandbox.port(8000).http("GET", "/again") as again:
                        assert again.status == 200
                        break
                except UnavailableError:
                    await asyncio.sleep(0.1)
            else:
                raise AssertionError("the server inside is not reached again")
        await sandbox.stop()
        await client.close()


async def test_descriptors_return(new_sandbox: New, platform: Platform) -> None:
    async with new_sandbox(**READY) as sandbox:

        def descriptors() -> int:
            assert platform.up is not None
            edge = platform.edge_pid()
            return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (platform.up.pid, edge))

        async def round_trip(i: int) -> None:
            stream = await sandbox.port(9000).connect()
            await stream.write(b"hold\n" if i % 2 else b"echo\nx")
            if i % 4 == 0:
                await stream.write_eof()
                assert await stream.read() == b"x"
            stream.close()

        await round_trip(0)
        before = descriptors()
        for _ in range(10):
            await asyncio.gather(*(round_trip(i) for i in range(20)))
        wait_for("descriptors are as before", lambda: descriptors() <= before + 4, 60)
        inside = await sandbox.run_shell("cat /proc/net/tcp | grep -c ' 01 '", timeout=60)
        assert int(inside.stdout or "0") <= 8
