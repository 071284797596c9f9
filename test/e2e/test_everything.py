"""Everything at once for minutes, over an edge and an apiserver that are killed again and again: all that is answered is right, and nothing grows."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from platform_under_test import Platform, wait_for

from libdsec import DSecContainerRunArgs, DSecError, NotFoundError, Sandbox, UnavailableError

MIB = 1 << 20
SECONDS = int(os.environ.get("DSEC_EVERYTHING_SECONDS", "300"))
TRAINERS = 12
HANGS = 90


async def commands(s: Sandbox, rng: random.Random) -> None:
    word = str(rng.random())
    for result in await asyncio.gather(*(s.run_shell(f"echo {word}; echo {i} >&2; exit {i}") for i in range(4))):
        assert (result.stdout, int(result.stderr)) == (word + "\n", result.exit_code)


async def session(s: Sandbox, rng: random.Random) -> None:
    shell = await s.session(f"n{rng.randrange(3)}")
    await shell.run(f"cd /tmp; x={(n := rng.randrange(1000))}")
    assert (await shell.run("echo $x $PWD")).stdout == f"{n} /tmp\n"


async def files(s: Sandbox, rng: random.Random) -> None:
    data = rng.randbytes(rng.choice((0, 1, 70_000, 3 * MIB)))
    path = f"/tmp/{rng.random()}"
    await s.write_file(path, data)
    assert await s.read_file(path) == data
    many = {f"{path}.d/{i}": data[: i * 7] for i in range(50)}
    await s.write_files(many)
    assert await s.read_files(many) == many
    assert (await s.run_shell(f"sha256sum <{path}")).stdout.split()[0] == hashlib.sha256(data).hexdigest()


async def streams(s: Sandbox, rng: random.Random) -> None:
    sent = rng.randbytes(rng.choice((1, 1000, 2 * MIB)))
    command = await s.start("cat; echo end >&2", stdin_open=True)
    feeding = asyncio.ensure_future(command.write_stdin(sent))
    assert b"".join([piece async for piece in command.iter_stdout()]) == sent
    assert await feeding
    assert (await command.wait()).stderr == "end\n"


async def timeouts(s: Sandbox, rng: random.Random) -> None:
    result = await s.run_shell("echo begun; sleep 1001 & sleep 1001", timeout=10)
    assert (result.stdout, result.timed_out) == ("begun\n", True)
    assert "1001" not in [word for p in await s.list_processes() for word in p.argv]


async def given_up(s: Sandbox, rng: random.Random) -> None:
    running = asyncio.ensure_future(s.run_shell("head -c 100000000 /dev/zero; sleep 2"))
    await asyncio.sleep(rng.random())
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def views(s: Sandbox, rng: random.Random) -> None:
    assert (await s.metrics()).memory_bytes > 0
    assert [f.path async for f in s.list_files("/etc")]


WORK: list[Callable[[Sandbox, random.Random], Awaitable[None]]] = [commands, session, files, streams, timeouts, given_up, views]


@pytest.mark.long
@pytest.mark.limit(SECONDS + 600)
async def test_everything_at_once(args: DSecContainerRunArgs) -> None:
    with Platform() as p:
        p.start()
        p.make_environments()
        seen: collections.Counter[str] = collections.Counter()
        await trainers(p, args, 20, seen)  # pools, caches and histories are full then
        edge_before, up_before = held(p)
        end = time.monotonic() + SECONDS
        killing = asyncio.create_task(kill_now_and_then(p, end))
        await trainers(p, args, SECONDS, seen)
        await killing
        print(dict(seen))
        assert all(seen[work.__name__] for work in WORK)
        wait_for("every sandbox is gone", lambda: not p.ids_on_host(), 120)
        wait_for("it holds what it held", lambda: grown(held(p), (edge_before, up_before)), 120)


async def trainers(p: Platform, args: DSecContainerRunArgs, seconds: float, seen: collections.Counter[str]) -> None:
    end = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for i in range(TRAINERS):
            group.create_task(trainer(p, replace(args, memory_limit_mb=256), random.Random(i), end, seen))


async def trainer(p: Platform, args: DSecContainerRunArgs, rng: random.Random, end: float, seen: collections.Counter[str]) -> None:
    """Takes sandboxes and does what comes to its mind, until the time is over."""
    async with p.client() as client:
        while time.monotonic() < end:
            try:
                async with asyncio.timeout(HANGS), await client.run_container(args) as s:
                    for _ in range(10):
                        work = rng.choice(WORK)
                        await work(s, rng)
                        seen[work.__name__] += 1
            except (UnavailableError, NotFoundError) as e:
                seen[excuse(e)] += 1


def excuse(e: DSecError) -> str:
    """What may be told while an edge is killed: what went with it is named, and not anything else."""
    assert e.reason, e
    return e.reason


async def kill_now_and_then(p: Platform, end: float) -> None:
    while time.monotonic() < end - 40:
        await asyncio.sleep(30)
        await asyncio.to_thread(p.kill_edge)


def held(p: Platform) -> tuple[int, int]:
    """Descriptors of the edge and of the apiserver."""
    edge, up = wait_for("an edge runs", p.edge_pid), p.up
    assert up is not None
    return len(os.listdir(f"/proc/{edge}/fd")), len(os.listdir(f"/proc/{up.pid}/fd"))


def grown(now: tuple[int, int], before: tuple[int, int]) -> bool:
    return all(n <= b + 8 for n, b in zip(now, before, strict=True))
