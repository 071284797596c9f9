"""Cancellation, concurrency and event loops of the asynchronous client."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from dataclasses import replace

import pytest
from fake import Platform
from fakehttp import Fault

from libdsec import DSecClient, DSecConfig, DSecContainerRunArgs, DSecError, Sandbox

ARGS = DSecContainerRunArgs("debian:12")


async def until(condition: object, limit: float = 60.0) -> None:
    assert callable(condition)
    end = asyncio.get_running_loop().time() + limit
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it did not come to pass"
        await asyncio.sleep(0.005)


async def test_a_cancelled_command_is_killed(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    sandbox = await client.run_container(ARGS)
    task = asyncio.ensure_future(sandbox.run_shell("sleep 100 & sleep 100"))
    await until(platform.running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not platform.running()
    assert (await sandbox.run_shell("echo on")).stdout == "on\n"
    await client.close()


async def test_a_cancelled_command_with_input_is_killed(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    sandbox = await client.run_container(ARGS)
    task = asyncio.ensure_future(sandbox.run_shell("sleep 100", stdin=b"x" * (8 << 20)))
    await until(platform.running)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not platform.running()
    await client.close()


async def test_a_kill_that_overtakes_the_start_is_repeated(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    sandbox = await client.run_container(ARGS)
    platform.fault("Exec", Fault(until=lambda: platform.calls["KillCommand"] >= 2))
    task = asyncio.ensure_future(sandbox.run_shell("sleep 100"))
    await until(lambda: platform.calls["Exec"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    commands = platform.boxes[sandbox.id].commands.values()
    await until(lambda: [p.done.is_set() for p in commands] == [True])  # it has begun, and was killed
    assert platform.calls["KillCommand"] >= 3
    await client.close()


async def test_timeouts_of_the_caller_work(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    sandbox = await client.run_container(ARGS)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(sandbox.run_shell("sleep 100"), 0.2)
    assert not platform.running()
    await client.close()


async def test_a_cancelled_create_leaves_nothing(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    platform.create_delay = lambda key: 20.0
    task = asyncio.ensure_future(client.run_container(ARGS))
    await until(lambda: platform.boxes)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: all(b.state == "STATE_STOPPED" for b in platform.boxes.values()))
    assert platform.calls["DeleteSandbox"] >= 1
    await client.close()


async def test_a_create_whose_answer_is_on_its_way_leaves_nothing(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    platform.fault("CreateSandbox", Fault(piece=1, prefix=b"HTTP/1.1 100 Continue\r\nX: " + b"y" * 20_000 + b"\r\n\r\n"))
    task = asyncio.ensure_future(client.run_container(ARGS))
    await until(platform.live)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not platform.live()
    await client.close()


async def test_cancelled_batches_leave_what_was_handed_out(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    platform.create_delay = lambda key: 0.0 if int(key.rpartition("/")[2]) < 5 else 20.0
    got: list[Sandbox] = []

    async def collect(what: object, count: int | None) -> None:
        async for result in client.run_containers(what, count):  # type: ignore[arg-type]
            assert isinstance(result, Sandbox)
            got.append(result)

    for what, count in ((ARGS, 50), ([ARGS] * 50, None)):
        got.clear()
        before = len(platform.live())
        task = asyncio.ensure_future(collect(what, count))
        await until(lambda: len(got) == 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: all(b.state in ("STATE_READY", "STATE_STOPPED") for b in platform.boxes.values()))
        assert len(platform.live()) == before + 5
    await client.close()


async def test_a_cancelled_block_stops_its_sandboxes(config: DSecConfig, platform: Platform) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with DSecClient(config=config) as client:
            await client.run_container(ARGS)
            async with await client.run_container(ARGS) as sandbox:
                inside.set()
                await sandbox.run_shell("sleep 100")

    task = asyncio.ensure_future(work())
    await inside.wait()
    await until(platform.running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not platform.live()
    assert not platform.running()


async def test_a_cancelled_stop_stops_all_the_same(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    sandbox = await client.run_container(ARGS)
    platform.fault("DeleteSandbox", Fault(delay=3))
    task = asyncio.ensure_future(sandbox.stop())
    await until(lambda: platform.calls["DeleteSandbox"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not platform.live()
    await client.close()


async def test_clean_up_has_a_bound(platform: Platform, config: DSecConfig) -> None:
    client = DSecClient(config=replace(config, cleanup_seconds=0.2))
    sandbox = await client.run_container(ARGS)
    task = asyncio.ensure_future(sandbox.run_shell("sleep 100"))
    await until(platform.running)
    platform.fault("KillCommand", Fault(delay=60, times=10))
    start = asyncio.get_running_loop().time()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.get_running_loop().time() - start < 30
    await client.close()


async def test_many_commands_at_once_share_few_connections(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=replace(config, max_connections=4))
    sandbox = await client.run_container(ARGS)
    results = await asyncio.gather(*(sandbox.exec(["echo", str(i)]) for i in range(60)))
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(60)]
    assert platform.connections <= 4
    # What ends things does not wait behind what runs.
    tasks = [asyncio.ensure_future(sandbox.run_shell("sleep 100", command_id=f"c{i}")) for i in range(8)]
    await until(lambda: len(platform.running()) >= 4)
    await asyncio.wait_for(sandbox.kill("c0"), 60)  # less than they run
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not platform.running()
    assert (await sandbox.run_shell("echo on")).stdout == "on\n"
    await client.close()


async def test_a_waiter_for_a_connection_gives_up(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=replace(config, max_connections=1, request_timeout=2, retry_seconds=0.01))
    sandbox = await client.run_container(ARGS)
    output = (await sandbox.start("echo ready; sleep 100")).iter_stdout()
    assert await output.__anext__() == b"ready\n"  # and holds the only connection
    with pytest.raises(DSecError, match="became free"):
        await client.get_sandbox(sandbox.id)
    await output.aclose()
    assert (await client.get_sandbox(sandbox.id)).id == sandbox.id
    await client.close()


def test_a_client_may_be_used_in_one_event_loop_after_another(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)

    async def once() -> str:
        sandbox = await client.run_container(ARGS)
        result = (await sandbox.run_shell("echo x")).stdout
        assert len(client._api.http._idle) == 1  # it is left to the next loop
        return result

    async def last() -> None:
        assert (await client.system_info()).version == "0.1"
        await until(lambda: platform.open_connections == 1)  # those of the loops before are closed
        await client.close()

    # asyncio complains of transports that outlive their loop, as it should.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        assert asyncio.run(once()) == "x\n"
        assert asyncio.run(once()) == "x\n"
        asyncio.run(last())
        gc.collect()


async def test_the_wait_for_a_connection_is_no_time_of_the_request(config: DSecConfig, platform: Platform) -> None:
    config = replace(config, max_connections=1, request_timeout=2, command_poll_seconds=0.5, retry_seconds=0.01)
    client = DSecClient(config=config)
    sandbox = await client.run_container(ARGS)
    output = (await sandbox.start("echo ready; sleep 100")).iter_stdout()
    assert await output.__anext__() == b"ready\n"  # and holds the only connection
    tasks = [asyncio.ensure_future(sandbox.run_shell("echo x")) for _ in range(3)]
    done, _ = await asyncio.wait(tasks, timeout=3)  # longer than one request may take
    assert not done
    await output.aclose()
    assert [r.stdout for r in await asyncio.gather(*tasks)] == ["x\n"] * 3
    await client.close()


async def test_long_commands_let_others_have_a_connection(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=replace(config, max_connections=2, command_poll_seconds=1000, request_timeout=30))
    sandbox = await client.run_container(ARGS)
    tasks = [asyncio.ensure_future(sandbox.run_shell("sleep 100")) for _ in range(5)]
    await until(lambda: len(platform.running()) == 5)
    assert (await client.get_sandbox(sandbox.id)).id == sandbox.id
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not platform.running()
    await client.close()


async def test_a_batch_whose_loop_is_cancelled_in_its_body_is_removed(config: DSecConfig, platform: Platform) -> None:
    inside = asyncio.Event()

    async def work(what: object, count: int | None) -> None:
        async with DSecClient(config=config) as client:
            async for _ in client.run_containers(what, count):  # type: ignore[arg-type]
                await until(lambda: len(platform.live()) == 20)
                inside.set()
                await asyncio.sleep(100)

    for what, count in ((ARGS, 20), ([ARGS] * 20, None)):
        inside.clear()
        task = asyncio.ensure_future(work(what, count))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not platform.live()


async def test_a_cancelled_read_loses_nothing(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    sandbox = await client.run_container(ARGS)
    data = os.urandom(5_000_000)
    await sandbox.write_file("/f", data)
    platform.fault("/files", Fault(piece=100_000, pause=0.05))
    async with await sandbox.open_read("/f") as reader:
        start = await reader.read(10)
        for _ in range(2):
            position = reader._download.position
            task = asyncio.ensure_future(reader.read())
            await until(lambda p=position: reader._download.position > p)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            platform.fault("/files", Fault(piece=100_000, pause=0.05))
        assert start + await reader.read() == data
    await client.close()


async def test_clean_up_does_not_swallow_a_cancellation(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    results = client.run_containers(ARGS, 20)
    await results.__anext__()
    platform.fault("DeleteSandbox", Fault(delay=2))
    closing = asyncio.ensure_future(results.aclose())
    await until(lambda: platform.calls["DeleteSandbox"])
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert len(platform.live()) == 1
    await client.close()
