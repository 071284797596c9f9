"""Output and input that is exact whatever happens on the way: cuts, silence, slow readers, and killed daemons."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from platform_under_test import IMAGE, Platform, wait_for

from libdsec import Command, DSecClient, DSecConfig, DSecContainerRunArgs, DSecError, Sandbox

ARGS = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=256, ttl_running_stop=600)
BLOCK = 64 << 10
# Blocks that differ: what is lost, doubled or swapped shows.
WRITER = "import os\nfor i in range({}):\n  b = i.to_bytes(8, 'big') * {}\n  while b: b = b[os.write({}, b):]\n"


def blocks(count: int) -> Iterator[bytes]:
    return (i.to_bytes(8, "big") * (BLOCK // 8) for i in range(count))


def writer(count: int, fd: int = 1) -> list[str]:
    return ["python3", "-c", WRITER.format(count, BLOCK // 8, fd)]


class Cutter:
    """A proxy that ends each connection after so many bytes in one direction. 0 is the first byte, None never."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self.down: Iterator[int | None] = iter(())  # for one connection after the other; then never
        self.up: Iterator[int | None] = iter(())
        self.connections = self.requests = 0
        self.frozen = False  # bytes are swallowed: as if the other side had lost its network
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Cutter:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        frozen = self.frozen
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:  # the platform is away
            writer.close()
            return
        pair = {writer, inner_writer}
        self._writers |= pair
        jobs = [
            asyncio.create_task(self._copy(reader, inner_writer, next(self.up, None), frozen, True)),
            asyncio.create_task(self._copy(inner_reader, writer, next(self.down, None), frozen, False)),
        ]
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        for w in pair:
            w.transport.abort() if any(j.done() and j.result() for j in jobs) else w.close()
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        self._writers -= pair

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None, frozen: bool, up: bool) -> bool:
        """Copies; true if it was cut."""
        with suppress(ConnectionError):
            while data := await reader.read(BLOCK):
                if up and data.startswith((b"GET", b"PUT", b"POST")):
                    self.requests += 1
                if frozen or (self.frozen and not up):
                    continue
                if left is not None:
                    data, left = data[:left], left - len(data)
                writer.write(data)
                await writer.drain()
                if left is not None and left <= 0:
                    return True
        return False


@asynccontextmanager
async def through(platform: Platform, **changes: float) -> AsyncIterator[tuple[Cutter, Sandbox]]:
    async with Cutter(platform.port) as cutter:
        config = replace(DSecConfig(cutter.url, platform.key(), retry_seconds=60), **changes)  # type: ignore[arg-type]
        async with platform.client() as direct, await direct.run_container(ARGS) as sandbox:
            async with DSecClient(config=config) as client:
                yield cutter, await client.get_sandbox(sandbox.id)


async def collect(command: Command, stream: str = "stdout", **more: object) -> bytes:
    return b"".join([p async for p in command.output(stream, follow=True, **more)])  # type: ignore[arg-type]


RAW = b"a\r\n\n\n\xff\xfe\x00\r\rb\n\nno end"


async def test_cut_at_every_byte(platform: Platform) -> None:
    async with through(platform) as (cutter, sandbox):
        octal = "".join(f"\\{b:03o}" for b in RAW)
        command = await sandbox.start(f"printf '{octal}'; printf '{octal}' >&2")
        await command.wait()
        everything = 400  # head and body are less
        for cut in range(everything):
            sandbox._client._api.http.drop_idle()
            cutter.down = iter((cut,))
            assert await collect(command, "stdout" if cut % 2 else "stderr") == RAW, cut


async def test_long_streams_cut_again_and_again(platform: Platform) -> None:
    """Both streams at once, each many times longer than what any hop holds, through connections that last a few blocks."""
    async with through(platform) as (cutter, sandbox):
        rnd = random.Random(1)
        command = await sandbox.start([*writer(1600)[:2], WRITER.format(1600, BLOCK // 8, 1) + WRITER.format(1600, BLOCK // 8, 2)])
        cutter.down = iter([rnd.randrange(10_000_000) for _ in range(30)])
        out, err = await asyncio.gather(collect(command), collect(command, "stderr"))
        want = b"".join(blocks(1600))
        assert out == want
        assert err == want
        assert cutter.connections > 10
        assert (await command.wait()).exit_code == 0


async def test_input_cut_again_and_again(platform: Platform) -> None:
    """16 MiB there and back, through connections that break in both directions."""
    async with through(platform) as (cutter, sandbox):
        rnd = random.Random(2)
        data = rnd.randbytes(16 << 20)
        command = await sandbox.start(["cat"], stdin_open=True)
        cutter.up = iter([rnd.randrange(3_000_000) for _ in range(12)])
        cutter.down = iter([rnd.randrange(3_000_000) for _ in range(12)])
        out, taken = await asyncio.gather(collect(command), command.write_stdin(data))
        assert taken
        assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()
        result = await command.wait()
        assert (result.exit_code, result.stdin_broken) == (0, False)


async def test_input_that_is_not_wanted(platform: Platform, new_sandbox) -> None:
    async with new_sandbox() as sandbox:
        closed = await sandbox.start("exec 0</dev/null; echo closed; sleep 100", stdin_open=True)
        async for _ in closed.iter_stdout():
            break
        assert not await closed.write_stdin(b"x" * (BLOCK + 1))  # EPIPE is told
        await closed.kill()
        assert (await closed.wait()).stdin_broken
        never = await sandbox.start("echo ready; sleep 100", stdin_open=True)
        sent = asyncio.create_task(never.write_stdin(b"x" * (64 << 20)))
        await asyncio.wait([sent], timeout=2)
        assert not sent.done()  # who does not read holds the writer
        assert (await sandbox.run_shell("echo others go on")).stdout == "others go on\n"
        await never.kill()
        assert not await sent


async def test_readers_do_not_disturb_each_other(platform: Platform) -> None:
    """One fast, one that stops for a while and holds the command back, one whose connection is cut, one that leaves."""
    async with through(platform) as (cutter, sandbox), platform.client() as direct:
        count = 3000  # 190 MiB: more than is kept
        command = await sandbox.start(["sh", "-c", 'read go; exec "$@"', "-", *writer(count)], stdin_open=True)
        same = (await direct.get_sandbox(sandbox.id)).command(command.id)
        go_on = asyncio.Event()

        async def slow() -> str:
            digest = hashlib.sha256()
            async for piece in same.iter_stdout():
                digest.update(piece)
                await go_on.wait()
            return digest.hexdigest()

        async def fast(which: Command) -> str:
            digest = hashlib.sha256()
            async for piece in which.iter_stdout():
                digest.update(piece)
            return digest.hexdigest()

        cutter.down = iter((None, None, 5_000_000, 30_000_000))
        tasks = [asyncio.create_task(t) for t in (slow(), fast(same), fast(command))]
        leaver = same.iter_stdout()
        first = asyncio.create_task(leaver.__anext__())
        assert await same.write_stdin(b"go\n")
        await first
        await leaver.aclose()
        size = -1
        while size != (size := (await same.poll()).stdout_size) or size < 1 << 20:
            await asyncio.sleep(1)
        assert size < (count * BLOCK) // 2  # it waits for the slow one
        go_on.set()
        want = hashlib.sha256()
        for block in blocks(count):
            want.update(block)
        assert await asyncio.gather(*tasks) == [want.hexdigest()] * 3


def anonymous(pid: int) -> int:
    """Bytes of memory of a process's own."""
    found = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(found.split()[1]) << 10


async def test_a_gigabyte_through_a_slow_reader(platform: Platform, new_sandbox) -> None:
    """It arrives whole, and no hop holds more of it than a little."""
    async with new_sandbox() as sandbox:
        edge = platform.edge_pid()
        assert platform.up is not None and edge is not None
        hops = {"apiserver": platform.up.pid, "edge": edge, "aether": platform.aether_pid(sandbox.id)}
        before = {name: anonymous(pid) for name, pid in hops.items()}
        count = (1 << 30) // BLOCK
        command = await sandbox.start(writer(count))
        have, want, pending = 0, blocks(count), b""
        async for piece in command.iter_stdout():
            have += len(piece)
            pending += piece
            while len(pending) >= BLOCK:
                assert pending[:BLOCK] == next(want), have
                pending = pending[BLOCK:]
            if have % 100_000_000 < len(piece):
                await asyncio.sleep(0.5)
                for name, pid in hops.items():
                    assert anonymous(pid) - before[name] < 32 << 20, (name, have)
        assert (have, pending) == (1 << 30, b"")
        result = await command.poll()
        assert (result.exit_code, result.stdout_size) == (0, 1 << 30)


async def test_silence(platform: Platform) -> None:
    """A silent command is asked for again and again; a connection that has died is noticed, and nothing is lost."""
    async with through(platform, command_poll_seconds=0.5, stall_timeout=2, request_timeout=5) as (cutter, sandbox):
        command = await sandbox.start("echo first; read go; echo second; read go; echo third", stdin_open=True)
        follower = command.iter_stdout()
        assert await follower.__anext__() == b"first\n"
        following = asyncio.ensure_future(follower.__anext__())
        before = cutter.requests
        async with asyncio.timeout(60):
            while cutter.requests < before + 3:
                await asyncio.sleep(0.05)
        assert not following.done()
        cutter.frozen = True
        async with platform.client() as direct:
            other = (await direct.get_sandbox(sandbox.id)).command(command.id)
            assert await other.write_stdin(b"go\n", close=False)
            connections = cutter.connections
            async with asyncio.timeout(60):
                while cutter.connections == connections:  # it has given up the dead one
                    await asyncio.sleep(0.05)
            cutter.frozen = False
            assert await following == b"second\n"
            assert await other.write_stdin(b"go\n")
        assert [p async for p in follower] == [b"third\n"]


async def test_from_its_end_and_from_a_time(platform: Platform, new_sandbox) -> None:
    async with new_sandbox() as sandbox:
        command = await sandbox.start("seq 1000; read go; echo late; read go", stdin_open=True)
        while (await command.poll()).stdout_size < 3893:
            await asyncio.sleep(0.02)

        async def get(**query: object) -> bytes:
            return b"".join([p async for p in command.output(**query)])

        assert await get(tail_lines=2) == b"999\n1000\n"
        assert await get(tail=3) == b"00\n"
        assert await get(tail_lines=0) == await get(tail=0) == b""
        assert len(await get(tail_lines=10**9)) == 3893
        assert await get(since=time.time() + 1000) == b""
        assert len(await get(since=0.001)) == 3893
        await asyncio.sleep(2.5)  # more than the precision
        then = datetime.now(UTC)
        assert await command.write_stdin(b"\n", close=False)
        follower = command.output(tail_lines=0, follow=True)
        seen = asyncio.ensure_future(follower.__anext__())
        while (await command.poll()).stdout_size == 3893:
            await asyncio.sleep(0.02)
        assert await get(since=then) == b"late\n"
        assert await get(tail_lines=2) == b"1000\nlate\n"
        assert await command.write_stdin(b"\n")
        await asyncio.wait([seen])
        await follower.aclose()
        await command.wait()
        with pytest.raises(DSecError) as refused:
            await get(offset=4000)
        assert refused.value.reason == "offset_out_of_range"


async def test_yes_costs_the_cap(platform: Platform, new_sandbox) -> None:
    async with new_sandbox() as sandbox:
        command = await sandbox.start(["yes"])
        while (await command.poll()).stdout_size < 200 << 20:
            await asyncio.sleep(0.1)
        await command.kill()
        result = await command.wait()
        assert result.stdout_truncated
        assert len(result.stdout_bytes) == 64 << 20
        kept = [p.stat() for p in (platform.data / "edge" / "output" / sandbox.id).iterdir()]
        assert sum(s.st_size for s in kept) <= (64 << 20) + 4096
        with pytest.raises(DSecError) as gap:
            async for _ in command.output(offset=40 << 20, follow=True):
                pass
        assert (gap.value.reason, gap.value.facts["next_offset"]) == ("output_dropped", str(result.stdout_size - (32 << 20)))


def stream_error(platform: Platform, message: object, key: str | None = None) -> tuple[int, str, bytes]:
    body = json.dumps(message).encode()
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=60)
    headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", "Authorization": f"Bearer {key or platform.key()}"}
    connection.request("POST", "/dsec.v1.SandboxService/WatchFiles", b"\0" + len(body).to_bytes(4, "big") + body, headers)
    answer = connection.getresponse()
    return answer.status, answer.headers["Content-Type"], answer.read()


def test_errors_of_streams_are_frames(platform: Platform) -> None:
    for message, key, code in (
        ({"sandboxId": "nonsense"}, None, "invalid_argument"),
        ({"unknownField": 1}, None, "invalid_argument"),
        ({"sandboxId": "nonsense"}, "dsec_" + "0" * 64, "unauthenticated"),
    ):
        status, kind, body = stream_error(platform, message, key)
        assert (status, kind) == (200, "application/connect+json"), body
        assert body[0] == 2, body  # the last frame
        assert int.from_bytes(body[1:5], "big") == len(body) - 5
        assert json.loads(body[5:])["error"]["code"] == code


async def test_killed_daemons(own: Platform) -> None:
    """kill -9 of the edge and of all in the middle of reading and writing: every byte arrives once. Then output outlives both."""
    config = DSecConfig(own.url, own.key(), retry_seconds=150)
    async with DSecClient(config=config) as client, await client.run_container(ARGS) as sandbox:
        count = 1600  # 100 MiB: more than is kept
        reading = await sandbox.start(writer(count))
        writing = await sandbox.start(["sha256sum"], stdin_open=True)
        digest = hashlib.sha256()
        seen = 0

        def kill_up() -> None:
            own.kill_up()
            own.start()

        kills = {200: own.kill_edge, 700: own.kill_edge, 1100: kill_up}

        async def pieces() -> AsyncIterator[bytes]:
            for i, block in enumerate(blocks(count)):
                if i in kills:
                    await asyncio.to_thread(kills[i])
                yield block

        feeding = asyncio.create_task(writing.write_stdin(pieces()))
        async for piece in reading.iter_stdout():
            digest.update(piece)
            seen += len(piece)
        want = hashlib.sha256()
        for block in blocks(count):
            want.update(block)
        assert (seen, digest.hexdigest()) == (count * BLOCK, want.hexdigest())
        assert await feeding
        assert (await writing.wait()).stdout.split()[0] == want.hexdigest()
        assert (await reading.wait()).exit_code == 0
        before = await collect(writing)
        await sandbox.stop()
        own.kill_edge()
        assert await collect(writing) == before
        assert b"".join([p async for p in reading.output(tail=BLOCK)]) == (count - 1).to_bytes(8, "big") * (BLOCK // 8)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def test_nothing_is_left_of_streams(platform: Platform, new_sandbox) -> None:
    """Descriptors of edge and apiserver: streams that ended, were left, and were cut on either side."""
    assert platform.up is not None
    edge = platform.edge_pid()
    assert edge is not None
    async with new_sandbox() as sandbox:
        await sandbox.run_shell("true")

        async def round_() -> None:
            async with through(platform) as (cutter, other), platform.client() as direct:
                same = await direct.get_sandbox(sandbox.id)
                command = await same.start("echo x; sleep 100", stdin_open=True)
                followers = [command.iter_stdout() for _ in range(10)]
                for f in followers:
                    await f.__anext__()
                writes = [asyncio.create_task(command.write_stdin(b"x" * (1 << 20))) for _ in range(2)]
                cutter.down = iter([300] * 5)
                assert await collect(await other.start("seq 10000")) == b"".join(b"%d\n" % i for i in range(1, 10001))
                for f in followers:
                    await f.aclose()
                await command.kill()
                await asyncio.gather(*writes, return_exceptions=True)

        await round_()
        wait_for("descriptors are few", lambda: descriptors(edge) < 1000)
        before = descriptors(edge), descriptors(platform.up.pid)
        for _ in range(3):
            await round_()
        up = platform.up.pid
        wait_for("descriptors are as before", lambda: descriptors(edge) <= before[0] + 8 and descriptors(up) <= before[1] + 8)
        assert Path(f"/proc/{edge}").exists()
