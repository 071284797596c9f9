"""Files: sizes, names, streams, broken connections."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compat import sleep
from fake import Platform
from fakehttp import Fault
from libdsec_api import DSecClient, Sandbox

from libdsec import (
    AlreadyExistsError,
    DataLossError,
    DSecConfig,
    DSecContainerRunArgs,
    DSecTimeoutError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)


async def make(config: DSecConfig) -> tuple[DSecClient, Sandbox]:
    client = DSecClient(config=config)
    return client, await client.run_container(DSecContainerRunArgs("debian:12"))


@pytest.mark.parametrize("size", [0, 1, 18 << 10, (64 << 10) + 1, 5_000_000])
async def test_round_trip(config: DSecConfig, tmp_path: Path, size: int) -> None:
    client, sandbox = await make(config)
    data = os.urandom(size)
    local = tmp_path / "local"
    local.write_bytes(data)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, size, 70_000):
            yield data[start : start + 70_000]

    for content in (data, bytearray(data), memoryview(data), local, pieces()):
        await sandbox.write_file("/f", content)
        assert await sandbox.read_file("/f") == data
    assert b"".join([p async for p in sandbox.iter_file("/f", 1)]) == data[1:]
    await sandbox.write_file("/f", "short ü")
    assert await sandbox.read_file("/f") == "short ü".encode()
    await client.close()


async def test_parts_of_a_file(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    await sandbox.write_file("/f", b"0123456789")
    assert await sandbox.read_file("/f", 3) == b"3456789"
    assert await sandbox.read_file("/f", 3, 4) == b"3456"
    assert await sandbox.read_file("/f", 8, 100) == b"89"
    assert await sandbox.read_file("/f", 0, 0) == b""
    with pytest.raises(InvalidArgumentError):
        await sandbox.read_file("/f", -1)
    async with await sandbox.open_read("/f") as reader:
        assert reader.info.size == 10
        assert reader.info.mode == 0o644
        assert reader.info.mtime is not None
        assert await reader.read(3) == b"012"
        assert await reader.read(0) == b""
        assert await reader.read(3) == b"345"
        assert b"".join([p async for p in reader]) == b"6789"
        assert await reader.read(3) == b""
    await client.close()


@pytest.mark.parametrize("name", ["/a b", "/ü\n&=?#%2e", "/..../x.y", b"/\xff\xfe", "/q\udcff", Path("/p")])
async def test_names(config: DSecConfig, platform: Platform, name: str | bytes | Path) -> None:
    client, sandbox = await make(config)
    await sandbox.write_file(name, b"here", mode=0o750, make_parents=True)
    assert await sandbox.read_file(name) == b"here"
    file = os.fsencode(platform.root) + b"/files" + os.fsencode(name)
    assert os.stat(file).st_mode & 0o7777 == 0o750
    await client.close()


async def test_options_and_errors(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    with pytest.raises(NotFoundError) as caught:
        await sandbox.read_file("/no")
    assert caught.value.reason == "file_not_found"
    with pytest.raises(NotFoundError):
        await sandbox.write_file("/d/e/f", b"")
    await sandbox.write_file("/d/e/f", b"1", make_parents=True, user="app")
    assert platform.requests[-1].query["user"] == "app"
    with pytest.raises(AlreadyExistsError):
        await sandbox.write_file("/d/e/f", b"2", exclusive=True)
    for path in ("", "a\0b", b"\0"):
        with pytest.raises(InvalidArgumentError):
            await sandbox.read_file(path)
    for mode in (-1, 0o10000, "644", True):
        with pytest.raises(InvalidArgumentError):
            await sandbox.write_file("/f", b"", mode=mode)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        await sandbox.write_file("/f", 7)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        await sandbox.write_file("/f", "\udcff")
    await client.close()


async def test_arguments_of_many_files(config: DSecConfig, platform: Platform) -> None:
    """The same is refused as for one file, before anything is sent."""
    client, sandbox = await make(config)
    before = len(platform.requests)
    for path in ("", "a", "/a\0b", "/a/../b", "/d/", "/"):
        with pytest.raises(InvalidArgumentError):
            await sandbox.write_files({path: b""})
    for path in ("", "a", "/a\0b", "/a/../b", "/\ud800"):
        with pytest.raises(InvalidArgumentError) as caught:
            await sandbox.read_files(["/f", path])
        assert caught.value.reason == "invalid_path"
    contents: list[Any] = [7, None, "\udcff"]
    for content in contents:
        with pytest.raises(InvalidArgumentError):
            await sandbox.write_files({"/f": content})
    modes: list[Any] = [-1, 0o10000, "644", True]
    for mode in modes:
        with pytest.raises(InvalidArgumentError):
            await sandbox.write_files([("/f", b"", mode)])
        with pytest.raises(InvalidArgumentError):
            await sandbox.write_files({"/f": b""}, mode=mode)
    assert len(platform.requests) == before
    await client.close()


async def test_downloads_continue(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    data = os.urandom(2_000_000)
    await sandbox.write_file("/f", data)
    platform.fault("/files", Fault(cut_at=700_000))
    platform.fault("/files", Fault(cut_at=100))  # in the head of the second answer
    platform.fault("/files", Fault(cut_at=500_000, chunked=9_999))
    assert await sandbox.read_file("/f") == data
    assert "offset" in platform.requests[-1].query
    platform.fault("/files", Fault(cut_at=400_000))
    assert await sandbox.read_file("/f", 1000, 900_000) == data[1000:901_000]
    await client.close()


async def test_a_file_that_changed_is_not_stitched_together(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    await sandbox.write_file("/f", b"a" * 1_000_000)
    platform.fault("/files", Fault(cut_at=700_000))
    with pytest.raises(UnavailableError) as caught:
        async with await sandbox.open_read("/f") as reader:
            await reader.read(10)
            with open(os.path.join(platform.root, "files", "f"), "wb") as f:
                f.write(b"b" * 1_000_001)
            await reader.read()
    assert caught.value.reason == "file_changed"
    await client.close()


async def test_uploads_are_repeated_whole(config: DSecConfig, platform: Platform, tmp_path: Path) -> None:
    client, sandbox = await make(config)
    data = os.urandom(300_000)
    (tmp_path / "x").write_bytes(data)
    for content in (data, tmp_path / "x"):
        platform.fault("/files", Fault(before=True))
        platform.fault("/files", Fault(cut_at=3))
        await sandbox.write_file("/f", content)
        assert await sandbox.read_file("/f") == data
    await client.close()


async def test_what_cannot_be_repeated_is_not(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 1000

    platform.fault("/files", Fault(before=True))
    with pytest.raises(UnavailableError):
        await sandbox.write_file("/f", pieces())
    platform.fault("/files", Fault(cut_at=3))
    with pytest.raises(UnavailableError):
        await sandbox.write_file("/g", b"x", exclusive=True)
    assert platform.calls[f"PUT /v1/sandboxes/{sandbox.id}/files"] == 2
    await client.close()


async def test_failures_of_the_content_are_the_callers(config: DSecConfig, platform: Platform, tmp_path: Path) -> None:
    client, sandbox = await make(config)
    with pytest.raises(IsADirectoryError):
        await sandbox.write_file("/f", tmp_path)
    for failure in (ConnectionResetError("mine"), TimeoutError("mine"), UnavailableError("mine")):

        async def pieces(failure: Exception = failure) -> AsyncIterator[bytes]:
            yield b"x"
            raise failure

        with pytest.raises(type(failure)) as caught:
            await sandbox.write_file("/f", pieces())
        assert caught.value is failure
    assert platform.calls[f"PUT /v1/sandboxes/{sandbox.id}/files"] <= 4
    assert (await sandbox.run_shell("echo on")).stdout == "on\n"
    await client.close()


async def test_a_changed_file_stays_changed(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    await sandbox.write_file("/f", b"a" * 1_000_000)
    platform.fault("/files", Fault(cut_at=700_000))
    async with await sandbox.open_read("/f") as reader:
        await reader.read(10)
        await sandbox.write_file("/f", b"b" * 1_000_001)
        for _ in range(2):
            with pytest.raises(UnavailableError) as caught:
                await reader.read()
            assert caught.value.reason == "file_changed"
    await client.close()


async def test_an_early_refusal_is_heard(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100_000

    platform.fault("/files", Fault(early=True))
    with pytest.raises(ResourceExhaustedError, match="disk is full"):
        await sandbox.write_file("/f", endless())
    assert (await sandbox.run_shell("echo on")).stdout == "on\n"
    await client.close()


async def test_damage_on_the_way_is_noticed(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    error = {"code": "data_loss", "message": "the content differs from its digest"}
    platform.fault("/files", Fault(status=400, error=error))
    with pytest.raises(DataLossError):
        await sandbox.write_file("/f", b"x")
    platform.fault("/files", Fault(raw=b"HTTP/1.1 200 OK\r\n\r\nhalf of it, or all?"))
    with pytest.raises(InternalError, match="without a length"):
        await sandbox.read_file("/f")
    await client.close()


async def test_another_file_than_was_sent_is_noticed(config: DSecConfig, platform: Platform, tmp_path: Path) -> None:
    client, sandbox = await make(config)
    (tmp_path / "x").write_bytes(b"content")
    for answer in (b'{"size":7,"sha256":"00"}', b'{"size":0}'):
        platform.fault("/files", Fault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer))
        with pytest.raises(DataLossError, match="not what was sent"):
            await sandbox.write_file("/f", tmp_path / "x")
    await client.close()


async def test_many_files_that_hang_are_given_up(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections, and reads nothing
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        hung = DSecClient(config=replace(config, url=url, stall_timeout=0.2, retry_seconds=0.5))
        with pytest.raises(DSecTimeoutError) as caught:
            await Sandbox(hung, sandbox.info).write_files({"/f": bytes(32 << 20)})
        assert caught.value.reason == "no_answer"
        assert "0.2 s (stall_timeout)" in str(caught.value)
        await hung.close()
    await client.close()


async def test_the_end_of_an_iterator_lets_go_of_the_connection(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    await sandbox.write_file("/f", os.urandom(4_000_000))
    for _ in range(5):
        async with await sandbox.open_read("/f") as reader:
            await reader.read(1)
    await sandbox.read_file("/f", 0, 10)
    await client.close()
    for _ in range(12_000):
        if platform.open_connections == 0:
            break
        await sleep(0.005)
    assert platform.open_connections == 0
