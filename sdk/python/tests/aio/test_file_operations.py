"""Operations on files: what is sent, what comes back, what is repeated and what is not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from fake import Platform
from fakehttp import Fault
from libdsec_api import DSecClient, Sandbox

from libdsec import (
    DataLossError,
    DSecConfig,
    DSecContainerRunArgs,
    DSecTimeoutError,
    FileChange,
    FileEvent,
    FileEventKind,
    FileType,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)


async def make(config: DSecConfig) -> tuple[DSecClient, Sandbox]:
    client = DSecClient(config=config)
    return client, await client.run_container(DSecContainerRunArgs("debian:12"))


def answer(body: bytes, kind: str = "application/json", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def frame(message: object, flags: int = 0) -> bytes:
    body = json.dumps(message).encode()
    return bytes([flags]) + len(body).to_bytes(4, "big") + body


def stream(*messages: object, end: bool = True) -> bytes:
    body = b"".join(frame(m) for m in messages) + (frame({}, 2) if end else b"")
    return answer(body, "application/connect+json")


ENTRIES = [
    {
        "path": "a b\n",
        "type": "FILE_TYPE_REGULAR",
        "size": "5",
        "mode": 0o644,
        "modifiedAt": "2026-01-02T03:04:05.5Z",
        "links": 1,
    },
    {"rawPath": "Yf8=", "type": "FILE_TYPE_SYMLINK", "linkTarget": "x", "inode": "18446744073709551615"},
]


async def test_lists(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    platform.fault("ListFiles", Fault(before=True))
    platform.fault("ListFiles", Fault(raw=stream({"files": ENTRIES[:1]}, {}, {"files": ENTRIES[1:]})))
    first, second = [e async for e in sandbox.list_files("/d", depth=-1, user="app")]
    assert (first.path, first.size, first.mode, first.is_file) == ("a b\n", 5, 0o644, True)
    assert (os.fsencode(second.path), second.type, second.link_target) == (b"a\xff", FileType.SYMLINK, "x")
    # Once something was told it is not told again: who lists is told that it is short.
    platform.fault("ListFiles", Fault(raw=stream({"files": ENTRIES}, end=False)))
    seen = []
    with pytest.raises(UnavailableError):
        async for entry in sandbox.list_files("/d"):
            seen.append(entry)
    assert len(seen) == 2
    platform.fault("ListFiles", Fault(raw=answer(frame({"files": [7]}) + frame({}, 2), "application/connect+json")))
    with pytest.raises(InternalError):
        [e async for e in sandbox.list_files("/d")]
    await client.close()


async def test_stats(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    failure = {"code": "not_found", "message": "none", "info": {"reason": "file_not_found"}}
    body = json.dumps({"results": [{"file": ENTRIES[0]}, {"failure": failure}]}).encode()
    platform.fault("StatFiles", Fault(raw=answer(body)))
    good, bad = await sandbox.stat_files(["/a", b"/b"])
    assert getattr(good, "size", None) == 5
    assert isinstance(bad, NotFoundError)
    platform.fault("StatFiles", Fault(raw=answer(body)))
    with pytest.raises(InternalError):
        await sandbox.stat_files(["/a"])  # another number of results
    for reason, known in (("file_not_found", True), ("sandbox_not_found", False)):
        one = {"results": [{"failure": {"code": "not_found", "info": {"reason": reason}}}]}
        platform.fault("StatFiles", Fault(raw=answer(json.dumps(one).encode())))
        if known:
            assert not await sandbox.file_exists("/a")
        else:
            with pytest.raises(NotFoundError):
                await sandbox.file_exists("/a")
    await client.close()


async def test_what_is_repeated(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    platform.fault("ChangeFiles", Fault(cut_at=10))
    platform.fault("ChangeFiles", Fault(raw=answer(b"{}")))
    await sandbox.change_files(
        [FileChange.remove("/a", missing_ok=True), FileChange.make_directory("/b", parents=True, mode=0o700)]
    )
    for once in (
        FileChange.move("/a", "/b"),
        FileChange.remove("/a"),
        FileChange.symlink("/a", "/b"),
        FileChange.copy("/a", "/b", exclusive=True),
    ):
        platform.fault("ChangeFiles", Fault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"))
        before = len(platform.requests)
        with pytest.raises(UnavailableError):
            await sandbox.change_files([once])
        assert len(platform.requests) == before + 1
    platform.fault("/files", Fault(cut_at=10))
    before = len(platform.requests)
    with pytest.raises(UnavailableError):
        await sandbox.append_file("/log", "line")
    assert len(platform.requests) == before + 1
    await client.close()


async def test_arguments(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    for path in ("", "a\0b", b"", "\ud800"):
        with pytest.raises(InvalidArgumentError):
            await sandbox.stat_file(path)
    for mode in (-1, 0o10000, True):
        with pytest.raises(InvalidArgumentError):
            await sandbox.chmod("/a", mode)
    with pytest.raises(InvalidArgumentError):
        await sandbox.write_file("/a", "", offset=-1)
    with pytest.raises(InvalidArgumentError):
        await sandbox.write_file("/a", "", truncate=True)
    await client.close()


async def test_uploads_are_compared(config: DSecConfig, platform: Platform, tmp_path: Path) -> None:
    client, sandbox = await make(config)
    local = tmp_path / "local"
    local.write_bytes(b"content")
    said = b'{"size":7,"sha256":"ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"}'
    platform.fault("/files", Fault(raw=answer(said)))
    await sandbox.write_file("/f", local)
    for wrong in (said.replace(b"7,", b"6,", 1), said.replace(b"ed70", b"ed71")):
        platform.fault("/files", Fault(raw=answer(wrong)))
        with pytest.raises(DataLossError):
            await sandbox.write_file("/f", local)
    await client.close()


async def test_a_hung_upload_ends(config: DSecConfig, platform: Platform) -> None:
    """A platform that takes nothing any more costs the stall time-out of each attempt, however large the file is."""
    client, sandbox = await make(replace(config, stall_timeout=0.3, retry_seconds=0.5))
    platform.fault("/files", Fault(until=lambda: False, times=100))
    with pytest.raises(DSecTimeoutError) as caught:
        await sandbox.write_file("/f", bytes(64 << 20))
    assert caught.value.reason == "no_answer"
    assert "0.3 s (stall_timeout)" in str(caught.value)
    await client.close()


async def test_watches(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    event = {"path": "a", "kind": "FILE_EVENT_KIND_CREATED"}
    platform.fault("WatchFiles", Fault(before=True))
    platform.fault(
        "WatchFiles", Fault(raw=stream({"ready": True}, {}, {"events": [event, {**event, "kind": "NEW"}]}, {"overflow": True}))
    )
    seen = []
    with pytest.raises(UnavailableError):
        async with sandbox.watch_files("/d", recursive=True) as events:
            async for e in events:
                seen.append(e)
    assert seen == [
        FileEvent(FileEventKind.CREATED, "a", is_directory=False),
        FileEvent(FileEventKind.UNKNOWN, "a", is_directory=False),
        FileEvent(FileEventKind.OVERFLOW, "", is_directory=False),
    ]
    platform.fault("WatchFiles", Fault(raw=stream({"events": [event]})))
    with pytest.raises(InternalError):
        async with sandbox.watch_files("/d"):
            pass
    await client.close()
