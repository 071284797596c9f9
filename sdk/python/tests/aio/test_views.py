"""Metrics, processes, and watching many sandboxes over one connection."""

from __future__ import annotations

from contextlib import aclosing
from datetime import datetime

import pytest
from compat import sleep
from fake import Platform
from fakehttp import Fault
from libdsec_api import Command, DSecClient, Sandbox

from libdsec import (
    CommandEndedEvent,
    CommandResult,
    DSecConfig,
    DSecContainerRunArgs,
    InvalidArgumentError,
    NotFoundError,
    SandboxEvent,
    State,
    Synced,
    UnavailableError,
)

WATCH = "/dsec.v1.SandboxService/WatchSandboxes"


async def make(config: DSecConfig, **labels: str) -> tuple[DSecClient, Sandbox]:
    client = DSecClient(config=config)
    return client, await client.run_container(DSecContainerRunArgs("debian:12", labels=labels))


async def test_metrics(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    m = await sandbox.metrics()
    assert (m.sandbox_id, m.cpu_seconds, m.cpu_limit_cores, m.memory_bytes, m.pids) == (sandbox.id, 1.5, 2.0, 1 << 33, 3)
    assert m.unavailable == ("memory_peak_bytes",)
    assert m.memory_peak_bytes == 0
    assert m.at is not None
    assert m.at.year == 2026
    await client.close()


async def test_watch_metrics_goes_on_over_a_cut_and_ends_with_the_sandbox(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    platform.fault("/dsec.v1.SandboxService/WatchMetrics", Fault(cut_at=600))
    seen = []
    async with aclosing(sandbox.watch_metrics(0.1)) as measured:
        async for m in measured:
            seen.append(m.cpu_seconds)
            if len(seen) == 6:
                await sandbox.stop()
    assert len(seen) >= 6
    assert platform.calls["WatchMetrics"] == 2
    for bad in (0, 0.01, -1, True, 1e9):
        with pytest.raises(InvalidArgumentError):
            async for _ in sandbox.watch_metrics(bad):
                pass
    await client.close()


async def test_processes(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    command = await sandbox.start("sleep 100")
    while not (found := await sandbox.list_processes()):
        await sleep(0.01)
    process = found[0]
    assert (process.name, process.argv, process.command_id, process.started_ticks) == ("sh", ("sh", "-c"), command.id, 7)
    with pytest.raises(NotFoundError) as e:
        await sandbox.signal_process(process.pid, 9, started_ticks=8)
    assert e.value.reason == "process_not_found"
    await process.signal()
    assert (await command.wait()).signal == 15
    await client.close()


async def test_watch(config: DSecConfig, platform: Platform) -> None:
    client, one = await make(config, run="a")
    other = await client.run_container(DSecContainerRunArgs("debian:12", labels={"run": "b"}))
    ended = []
    async with client.watch(labels={"run": "a"}, commands=True) as events:
        async for event in events:
            if isinstance(event, Synced):
                await other.run_shell("exit 4")
                await one.run_shell("exit 5")
            elif isinstance(event, CommandEndedEvent):
                ended.append((event.sandbox_id, event.result.exit_code))
                await one.stop()
            elif isinstance(event, SandboxEvent) and event.info.state is State.STOPPED:
                assert event.info.id == one.id
                break
    assert ended == [(one.id, 5)]
    assert platform.watches[0] == {"labels": {"run": "a"}, "ids": [], "commands": True}
    await client.close()


async def test_watch_goes_on_over_a_cut_without_gap_or_double(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    first = await sandbox.run_shell("exit 1")
    syncs, codes = 0, []
    assert first.ended_at is not None
    async with client.watch(ids=[sandbox.id], commands=True, since=first.ended_at) as events:
        async for event in events:
            if isinstance(event, CommandEndedEvent):
                codes.append(event.result.exit_code)
            elif isinstance(event, Synced):
                syncs += 1
                if syncs == 1:
                    platform.drop_connections()
                    await sandbox.run_shell("exit 2")  # nobody watches
                else:
                    await sandbox.run_shell("exit 3")
            if len(codes) == 3:
                break
    assert codes == [1, 2, 3]
    assert syncs == 2
    since = [datetime.fromisoformat(w["commandsSince"].replace("Z", "+00:00")) for w in platform.watches]
    assert since[0] == first.ended_at
    assert 9 <= (since[0] - since[1]).total_seconds() <= 11
    await client.close()


async def test_watch_gives_up(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    platform.fault(WATCH, Fault(before=True, times=1000))
    with pytest.raises(UnavailableError):
        async with client.watch(ids=[sandbox.id]) as events:
            async for _ in events:
                pass
    await client.close()


async def test_watch_refuses(config: DSecConfig) -> None:
    client, _ = await make(config)
    for ids in ([], "s1", [1], ["s"] * 100_001):
        with pytest.raises(InvalidArgumentError):
            client.watch(ids=ids)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        client.watch(commands=True, since=datetime(2026, 1, 1))
    await client.close()


async def test_as_completed(config: DSecConfig, platform: Platform) -> None:
    client, one = await make(config)
    two = await client.run_container(DSecContainerRunArgs("debian:12"))
    commands = [
        await one.start("echo one; exit 1"),
        await two.start("sleep 0.3; echo two; exit 2"),
        await two.start("sleep 100"),
    ]
    lost = one.command("never")
    platform.fault(WATCH, Fault(cut_at=700))
    codes: dict[str, object] = {}
    async with aclosing(client.as_completed([*commands, lost])) as completed:
        async for command, result in completed:
            if isinstance(result, CommandResult):
                codes[command.id] = (result.exit_code, result.stdout)
            else:
                codes[command.id] = result.reason
            if command is commands[1]:
                await one.stop()
            if command is lost:
                await commands[2].kill()
    assert codes[commands[0].id] == (1, "one\n")
    assert codes[commands[1].id] == (2, "two\n")
    assert codes[commands[2].id] == (137, "")
    assert codes[lost.id] == "sandbox_ended"
    assert len(platform.watches) == 2
    await client.close()


async def test_one_connection_tells_of_many(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    sandboxes = [s async for s in client.run_containers(DSecContainerRunArgs("debian:12"), 60) if isinstance(s, Sandbox)]
    commands = [await s.start("read x", stdin_open=True) for s in sandboxes]
    connections, polled = platform.connections, platform.calls["GetCommand"]
    done = set()
    async with aclosing(client.as_completed(commands)) as completed:
        await commands[0].write_stdin("")
        async for command, _ in completed:
            done.add(command.id)
            assert platform.open_connections <= 3
            if len(done) < len(commands):
                await commands[len(done)].write_stdin("")
    assert done == {c.id for c in commands}
    assert (len(platform.watches), len(platform.watches[0]["ids"])) == (1, 60)
    assert platform.connections <= connections + 2
    assert platform.calls["GetCommand"] == polled + 60  # for the result of each, once it has ended
    await client.close()


async def test_as_completed_asks_of_what_the_platform_does_not_tell(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    results = [result async for _, result in client.as_completed([Command(sandbox._api, "sgone", "never")])]
    assert [getattr(r, "reason", "") for r in results] == ["sandbox_not_found"]
    assert [result async for _, result in client.as_completed([])] == []
    await client.close()


async def test_trusted(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    await sandbox.run_shell("true", trusted=True)
    await sandbox.exec(["true"], trusted=True)
    await (await sandbox.start("true", trusted=True)).wait()
    await sandbox.run_shell("true")
    sent = [p.command.get("trusted") for box in platform.boxes.values() for p in box.commands.values()]
    assert sent == [True, True, True, None]
    await client.close()
