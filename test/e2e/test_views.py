"""Metrics, processes, and watching: what a trainer sees of many sandboxes, and what survives a killed edge."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing, closing

import pytest
from platform_under_test import IMAGE, Platform

from libdsec import (
    Command,
    CommandEndedEvent,
    CommandResult,
    DSecClient,
    DSecContainerRunArgs,
    EdgeLost,
    Metrics,
    NotFoundError,
    Sandbox,
    SandboxEvent,
    State,
    Synced,
)


@pytest.fixture(scope="module")
def platform() -> Iterator[Platform]:
    """A platform of its own: its edge is killed."""
    with Platform() as p:
        p.start()
        p.make_environments()
        yield p


LOOPBACK = "import socket\nl = socket.create_server(('127.0.0.1', 0))\nsocket.create_connection(l.getsockname()).sendall(b'x' * 1000)\nassert l.accept()[0].recv(10)"
BURN = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"


async def until(sandbox: Sandbox, what: str, check: object) -> Metrics:
    """Measures until check is true of it."""
    async with asyncio.timeout(90), aclosing(sandbox.watch_metrics(0.1)) as measured:
        async for m in measured:
            if check(m):  # type: ignore[operator]
                return m
    raise AssertionError(what)


async def test_metrics_rise_with_work(platform: Platform) -> None:
    args = DSecContainerRunArgs(IMAGE, memory_limit_mb=96, cpu_cores_limit=0.2, pids_limit=40, ttl_running_stop=300)
    async with platform.client() as client, await client.run_container(args) as sandbox:
        before = await sandbox.metrics()
        assert (before.sandbox_id, before.memory_limit_bytes, before.pids_limit, before.cpu_limit_cores) == (sandbox.id, 96 << 20, 40, 0.2)
        assert before.unavailable == ()
        assert 0 < before.aether_memory_bytes < 64 << 20
        # Its loopback, which is all that it has, is no traffic.
        await sandbox.exec(["python3", "-c", LOOPBACK], check=True)
        quiet = await sandbox.metrics()
        assert (quiet.network_rx_bytes, quiet.network_tx_bytes, quiet.network_rx_packets, quiet.network_tx_packets) == (0, 0, 0, 0)
        await sandbox.exec(["python3", "-c", BURN], check=True)
        assert (await sandbox.metrics()).cpu_seconds >= before.cpu_seconds + 0.6
        burner = await sandbox.start("while :; do :; done")
        await until(sandbox, "it is throttled", lambda m: m.cpu_throttled_periods > 0 and m.cpu_throttled_seconds > 0)
        await burner.kill()
        hog = await sandbox.exec(["python3", "-c", "x = bytearray(60 << 20)\ny = bytearray(60 << 20)"])
        assert hog.oom_killed
        full = await sandbox.metrics()
        assert full.oom_kills >= before.oom_kills + 1
        assert full.memory_limit_hits > before.memory_limit_hits
        assert full.memory_peak_bytes >= 60 << 20
        await sandbox.run_shell("for i in $(seq 100); do sleep 5 & done; wait", timeout=60)
        assert (await sandbox.metrics()).pids_limit_hits > before.pids_limit_hits
        command = await sandbox.start("exec sleep 1000")
        await until(sandbox, "its task is counted", lambda m: m.pids >= 1)
        await command.kill()
        await sandbox.run_shell("head -c 20000000 /dev/urandom >/tmp/x; sync", check=True)
        await until(sandbox, "the disk is counted", lambda m: m.disk_bytes >= before.disk_bytes + 20_000_000)


async def test_watch_metrics_survives_the_edge_and_ends_with_the_sandbox(platform: Platform) -> None:
    async with platform.client() as client, await client.run_container(DSecContainerRunArgs(IMAGE, ttl_running_stop=300)) as sandbox:
        seen = 0
        async with asyncio.timeout(120), aclosing(sandbox.watch_metrics(0.1)) as measured:
            async for m in measured:
                assert m.sandbox_id == sandbox.id
                seen += 1
                if seen == 3:
                    await asyncio.to_thread(platform.kill_edge)
                if seen == 6:
                    await sandbox.stop()
        assert seen >= 6


async def test_processes_are_listed_and_signalled(platform: Platform) -> None:
    async with platform.client() as client, await client.run_container(DSecContainerRunArgs(IMAGE, ttl_running_stop=300)) as sandbox:
        command = await sandbox.start(["/bin/sleep", "1000"])
        other = await sandbox.start(["/bin/sleep", "2000"])
        async with asyncio.timeout(60):
            while len(found := [p for p in await sandbox.list_processes() if p.name == "sleep"]) < 2:
                await asyncio.sleep(0.02)
        process = next(p for p in found if p.argv == ("/bin/sleep", "1000"))
        assert (process.command_id, process.uid, process.threads) == (command.id, 0, 1)
        assert all(p.pid != 1 for p in found)
        await process.signal()
        assert (await command.wait()).signal == 15
        for stale in (process.started_ticks, process.started_ticks + 1):
            with pytest.raises(NotFoundError, match="process_not_found"):
                await sandbox.signal_process(process.pid, 9, started_ticks=stale)
        assert (await other.poll()).running


async def test_watch_of_fifty(platform: Platform) -> None:
    """One connection tells of all of them: that they are there, how their commands end, and that they end; also over a killed edge."""
    labels = {"test": "fifty"}
    created: set[str] = set()
    ended: set[str] = set()
    gone: set[str] = set()
    twice: list[str] = []
    synced = asyncio.Event()
    lost = asyncio.Event()

    client = platform.client()

    async def watch() -> None:
        async with client.watch(labels=labels, commands=True) as events:
            async for event in events:
                match event:
                    case SandboxEvent(info) if info.state is State.READY:
                        created.add(info.id)
                    case SandboxEvent(info) if info.state.terminal:
                        gone.add(info.id)
                    case CommandEndedEvent(sandbox_id, result):
                        twice.extend([sandbox_id] if sandbox_id in ended else [])
                        assert result.exit_code == 7
                        ended.add(sandbox_id)
                    case Synced():
                        synced.set()
                    case EdgeLost():
                        lost.set()
                if len(gone) == 50:
                    return

    watching = asyncio.create_task(watch())
    async with asyncio.timeout(240), AsyncExitStack() as stack:
        await synced.wait()
        args = DSecContainerRunArgs(IMAGE, memory_limit_mb=64, ttl_running_stop=600, labels=labels)
        boxes = [r async for r in client.run_containers(args, 50)]
        sandboxes = [await stack.enter_async_context(b) for b in boxes if isinstance(b, Sandbox)]
        assert len(sandboxes) == 50, [b for b in boxes if not isinstance(b, Sandbox)]
        for s in sandboxes[:25]:
            await s.start("exit 7")
        late = [await s.start("sleep 4; exit 7") for s in sandboxes[25:]]
        await asyncio.to_thread(platform.kill_edge)
        await lost.wait()
        done = {command.id: result async for command, result in client.as_completed(late)}
        assert len(done) == 25
        assert all(isinstance(r, CommandResult) and r.exit_code == 7 for r in done.values()), done
        while len(ended) < 50:
            await asyncio.sleep(0.05)
        await asyncio.gather(*(s.stop() for s in sandboxes))
        await watching
    await client.close()
    assert created == ended == gone == {s.id for s in sandboxes}
    assert twice == []


def key_of_another_project(platform: Platform) -> str:
    """There is no command that makes one yet: into the database, as the platform itself writes it."""
    key = "dsec_" + secrets.token_hex(32)
    row = ("other", hashlib.sha256(key.encode()).digest(), "stranger", "other", "user", 1)
    with closing(sqlite3.connect(platform.data / "dsec.db", timeout=30)) as db, db:
        db.execute("INSERT INTO projects (path, created_ms) VALUES ('other', 1)")
        db.execute("INSERT INTO api_keys (id, hash, principal, project, role, created_ms) VALUES (?, ?, ?, ?, ?, ?)", row)
    return key


async def test_a_key_of_another_project_sees_nothing(platform: Platform) -> None:
    async with (
        platform.client() as client,
        await client.run_container(DSecContainerRunArgs(IMAGE, ttl_running_stop=300)) as sandbox,
        DSecClient(platform.url, key_of_another_project(platform)) as stranger,
    ):
        for ids in (None, [sandbox.id]):
            async with asyncio.timeout(60), stranger.watch(ids=ids, commands=True) as events:
                async for event in events:
                    assert isinstance(event, Synced), event
                    break
        await sandbox.run_shell("true", command_id="mine")
        foreign = Command(stranger._api, sandbox.id, "mine")
        results = [r async for _, r in stranger.as_completed([foreign])]
        assert [getattr(r, "reason", r) for r in results] == ["sandbox_not_found"]
