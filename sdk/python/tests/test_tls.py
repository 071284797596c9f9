"""TLS, and back-pressure."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake import Platform

from libdsec import DSecClient, DSecConfig, DSecContainerRunArgs, UnavailableError
from libdsec._aio import READ_BUFFER
from libdsec.sync import DSecClient as SyncClient


@pytest.fixture
def front(platform: Platform, tmp_path: Path) -> Iterator[tuple[str, ssl.SSLContext]]:
    """A TLS terminator before the platform: its URL, and a context that trusts it."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    port = int(platform.url.rpartition(":")[2])
    ready, stop, url = threading.Event(), threading.Event(), []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, theirs[1]), pump(theirs[0], writer))

    async def main() -> None:
        listener = await asyncio.start_server(serve, "localhost", 0, ssl=server)
        url.append(f"https://localhost:{listener.sockets[0].getsockname()[1]}")
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        listener.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(60)
    yield url[0], ssl.create_default_context(cafile=str(cert))
    stop.set()
    thread.join(60)


def test_over_tls(front: tuple[str, ssl.SSLContext], config: DSecConfig) -> None:
    url, trust = front
    config = replace(config, url=url, ssl_context=trust)
    data = b"0123456789" * 300_000

    async def work() -> None:
        async with DSecClient(config=config) as client, await client.run_container(DSecContainerRunArgs("x")) as sandbox:
            await sandbox.write_file("/f", data)
            assert await sandbox.read_file("/f") == data
            assert (await sandbox.exec(["cat"], stdin=data[:400_000])).stdout_bytes == data[:400_000]

    asyncio.run(work())
    with SyncClient(config=config) as client, client.run_container(DSecContainerRunArgs("x")) as sandbox:
        sandbox.write_file("/f", data)
        assert sandbox.read_file("/f") == data
        assert sandbox.exec(["cat"], stdin=data[:400_000]).stdout_bytes == data[:400_000]


def test_an_unknown_certificate_is_refused_at_once(front: tuple[str, ssl.SSLContext], config: DSecConfig) -> None:
    config = replace(config, url=front[0], retry_seconds=30)

    async def work() -> None:
        await DSecClient(config=config).open()

    for attempt in (lambda: asyncio.run(work()), lambda: SyncClient(config=config).open()):
        with pytest.raises(UnavailableError, match="certificate") as caught:
            attempt()
        assert (caught.value.reason, caught.value.attempts) == ("tls_failed", 1)


async def test_a_slow_reader_holds_the_sender_back(config: DSecConfig, platform: Platform) -> None:
    async with DSecClient(config=config) as client:
        sandbox = await client.run_container(DSecContainerRunArgs("x"))
        await sandbox.write_file("/f", b"x" * 30_000_000)
        async with await sandbox.open_read("/f") as reader:
            size = len(await reader.__anext__())
            response = reader._download._response
            assert response is not None
            assert response._conn is not None
            for _ in range(20):
                await asyncio.sleep(0.01)
                assert len(response._conn.stream._pending) <= 2 * READ_BUFFER
            async for piece in reader:
                size += len(piece)
        assert size == 30_000_000
