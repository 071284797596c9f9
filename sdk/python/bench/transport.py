#!/usr/bin/env python3
"""How fast one Python process can run commands, against a bare asyncio echo in the same run.

Usage: transport.py [--seconds S] [--in-flight N]

A trivial server in a process of its own answers Exec at once. Measured are: a raw echo of the same number of bytes over
asyncio protocols, the SDK's ``exec`` over 100 sandboxes, and the synchronous SDK in one thread. Prints
``figure value unit baseline ratio``, the baseline being the raw echo.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from libdsec import DSecClient, DSecConfig, Sandbox, SandboxInfo
from libdsec.sync import DSecClient as SyncClient
from libdsec.sync import Sandbox as SyncSandbox

RESULT = json.dumps(
    {
        "result": {
            "commandId": "0123456789abcdef0123456789abcdef",
            "stdout": {"data": "aGVsbG8gd29ybGQK", "size": "12", "headSize": "12"},
            "startedAt": "2026-01-02T03:04:05.123456789Z",
            "endedAt": "2026-01-02T03:04:05.125456789Z",
        }
    }
).encode()
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nVary: Accept-Encoding\r\n"
    b"Date: Thu, 01 Jan 2026 00:00:00 GMT\r\nContent-Length: %d\r\n\r\n" % len(RESULT) + RESULT
)
REQUEST_SIZE = 450


class Server(asyncio.Protocol):
    """Answers every request whose body is complete."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        start = self.buffer.find(b"Content-Length: ") + 16
        size = int(self.buffer[start : self.buffer.find(b"\r\n", start)])
        if len(self.buffer) >= end + 4 + size:
            self.buffer = self.buffer[end + 4 + size :]
            self.transport.write(ANSWER)


class Echo(asyncio.Protocol):
    """Answers every REQUEST_SIZE bytes with as many as an answer has."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.size = 0

    def data_received(self, data: bytes) -> None:
        self.size += len(data)
        if self.size >= REQUEST_SIZE:
            self.size -= REQUEST_SIZE
            self.transport.write(ANSWER)


def serve(pipe: Connection) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(kind, "127.0.0.1", 0) for kind in (Server, Echo)]
        pipe.send([s.sockets[0].getsockname()[1] for s in servers])
        await loop.run_in_executor(None, pipe.recv)

    asyncio.run(main())


class Pinger(asyncio.Protocol):
    """The raw baseline: sends, waits for the answer's bytes, sends again."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.count = self.size = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(b"x" * REQUEST_SIZE)

    def data_received(self, data: bytes) -> None:
        self.size += len(data)
        if self.size < len(ANSWER):
            return
        self.size -= len(ANSWER)
        self.count += 1
        if time.monotonic() < self.end:
            self.transport.write(b"x" * REQUEST_SIZE)
        else:
            self.transport.close()
            self.done.set_result(None)


async def raw(port: int, seconds: float, in_flight: int) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    start, cpu = time.monotonic(), time.process_time()
    made = [await loop.create_connection(lambda: Pinger(start + seconds), "127.0.0.1", port) for _ in range(in_flight)]
    await asyncio.gather(*(p.done for _, p in made))
    return rates(sum(p.count for _, p in made), start, cpu)


async def sdk(port: int, seconds: float, in_flight: int) -> tuple[float, float]:
    client = DSecClient(config=DSecConfig(f"http://127.0.0.1:{port}", "dsec_" + "ab" * 32))
    boxes = [Sandbox(client, SandboxInfo.from_wire({"id": f"sabcde{i:017d}"})) for i in range(100)]
    count = 0
    start, cpu = time.monotonic(), time.process_time()

    async def worker(i: int) -> None:
        nonlocal count
        while time.monotonic() < start + seconds:
            result = await boxes[i % 100].exec(["echo", "hello", "world"])
            assert result.stdout_bytes == b"hello world\n"
            count += 1

    await asyncio.gather(*(worker(i) for i in range(in_flight)))
    await client.close()
    return rates(count, start, cpu)


def sync(port: int, seconds: float) -> tuple[float, float]:
    client = SyncClient(config=DSecConfig(f"http://127.0.0.1:{port}", "dsec_" + "ab" * 32))
    box = SyncSandbox(client, SandboxInfo.from_wire({"id": f"sabcde{0:017d}"}))
    count = 0
    start, cpu = time.monotonic(), time.process_time()
    while time.monotonic() < start + seconds:
        box.exec(["echo", "hello", "world"])
        count += 1
    client.close()
    return rates(count, start, cpu)


def rates(count: int, start: float, cpu: float) -> tuple[float, float]:
    return count / (time.monotonic() - start), (time.process_time() - cpu) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--in-flight", type=int, default=100)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    server.start()
    try:
        http_port, echo_port = ours.recv()
        base, base_cpu = asyncio.run(raw(echo_port, options.seconds, options.in_flight))
        rate, cpu = asyncio.run(sdk(http_port, options.seconds, options.in_flight))
        rate_sync, cpu_sync = sync(http_port, options.seconds)
    finally:
        ours.send(None)
        server.join(10)
    print(f"sdk_exec_async {rate:.0f} 1/s {base:.0f} {rate / base:.3f}")
    print(f"sdk_exec_async_cpu {cpu:.1f} us {base_cpu:.1f} {cpu / base_cpu:.2f}")
    print(f"sdk_exec_sync_one_thread {rate_sync:.0f} 1/s {base:.0f} {rate_sync / base:.3f}")
    print(f"sdk_exec_sync_cpu {cpu_sync:.1f} us {base_cpu:.1f} {cpu_sync / base_cpu:.2f}")


if __name__ == "__main__":
    main()
