"""Against a real platform: set DSEC_LIVE_URL (and DSEC_API_KEY, and DSEC_LIVE_IMAGE, default debian-python:12)."""

from __future__ import annotations

import asyncio
import os
from hashlib import sha256

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, DSecError, NotFoundError, Sandbox, State
from libdsec.sync import DSecClient as SyncClient

URL = os.environ.get("DSEC_LIVE_URL", "")
IMAGE = os.environ.get("DSEC_LIVE_IMAGE", "debian-python:12")
LIVE_KEY = os.environ.get("DSEC_API_KEY") or None

pytestmark = pytest.mark.skipif(not URL, reason="DSEC_LIVE_URL is not set")

ARGS = DSecContainerRunArgs(IMAGE, memory_limit_mb=512, ttl_running_stop=120)
NASTY = b"\n\nfirst\r\n\0\xff\xfe \xc3\n\n" + bytes(range(256)) + b"\n\nno newline at the end"


async def test_commands() -> None:
    async with DSecClient(URL, LIVE_KEY) as client, await client.run_container(ARGS) as sandbox:
        result = await sandbox.run_shell("echo hello world")
        assert (result.stdout, result.stderr, result.exit_code) == ("hello world\n", "", 0)
        await sandbox.write_file("/tmp/nasty", NASTY)
        result = await sandbox.run_shell("cat /tmp/nasty; cat /tmp/nasty >&2; exit 7")
        assert result.stdout_bytes == NASTY
        assert result.stderr_bytes == NASTY
        assert result.exit_code == 7
        assert (await sandbox.exec(["printf", "%s|", "a b", "$HOME", ""])).stdout == "a b|$HOME||"
        result = await sandbox.run_shell("setsid sleep 300 & sleep 300", timeout=1)
        assert result.timed_out
        assert (await sandbox.run_shell("grep -lx sleep /proc/[0-9]*/comm | wc -l")).stdout.strip() == "0"
        assert (await sandbox.run_shell("sleep 300 & echo done")).stdout == "done\n"
        with pytest.raises(DSecError):
            await sandbox.exec(["no-such-program"])
        assert not (await sandbox.run_shell("# filling\n" * 100_000 + "exit 3")).ok


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 16 << 20])
async def test_stdin(size: int) -> None:
    data = os.urandom(size)
    async with DSecClient(URL, LIVE_KEY) as client, await client.run_container(ARGS) as sandbox:
        result = await sandbox.exec(["sha256sum"], stdin=data)
        assert result.stdout.split()[0] == sha256(data).hexdigest()
        result = await sandbox.exec(["cat"], stdin=data)
        assert result.stdout_bytes == data
        if size > 1 << 20:
            assert (await sandbox.run_shell("exec 0<&-; sleep 1", stdin=data)).stdin_broken


async def test_long_output() -> None:
    async with DSecClient(URL, LIVE_KEY) as client, await client.run_container(ARGS) as sandbox:
        result = await sandbox.run_shell("seq 1000000")
        assert result.stdout_bytes == b"".join(b"%d\n" % i for i in range(1, 1_000_001))
        result = await sandbox.run_shell("head -c 100000000 /dev/zero")
        assert result.stdout_truncated
        assert result.stdout_size == 100_000_000


@pytest.mark.parametrize("size", [0, 1, 18 << 10, (64 << 10) + 1, 16 << 20])
async def test_files(size: int) -> None:
    data = os.urandom(size)
    async with DSecClient(URL, LIVE_KEY) as client, await client.run_container(ARGS) as sandbox:
        await sandbox.write_file("/tmp/a b/ü\n", data, mode=0o750, make_parents=True)
        assert await sandbox.read_file("/tmp/a b/ü\n") == data
        assert await sandbox.read_file("/tmp/a b/ü\n", 1, 10) == data[1:11]
        async with await sandbox.open_read("/tmp/a b/ü\n") as reader:
            assert (reader.info.size, reader.info.mode) == (size, 0o750)
        with pytest.raises(NotFoundError):
            await sandbox.read_file("/no/such/file")


async def test_cancellation() -> None:
    async with DSecClient(URL, LIVE_KEY) as client, await client.run_container(ARGS) as sandbox:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sandbox.run_shell("sleep 299"), 1)
        assert (await sandbox.run_shell("grep -lx sleep /proc/[0-9]*/comm | wc -l")).stdout.strip() == "0"


async def test_many() -> None:
    async with DSecClient(URL, LIVE_KEY) as client:
        made = []
        async for result in client.run_containers(ARGS, 8):
            assert isinstance(result, Sandbox), result
            made.append(result)
        listed = {s.id async for s in client.list_sandboxes()}
        assert {s.id for s in made} <= listed
        await asyncio.gather(*(s.stop() for s in made))
        assert all([(await s.refresh()).state is State.STOPPED for s in made])


def test_sync() -> None:
    with SyncClient(URL, LIVE_KEY) as client, client.run_container(ARGS) as sandbox:
        assert sandbox.run_shell("cat", stdin=NASTY).stdout_bytes == NASTY
