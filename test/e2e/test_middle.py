"""kill -9 in the middle of everything: what is promised to go on does so, the rest ends with a typed error, and nothing is left.

All operations run at once, each in a sandbox of its own, so that one kill of a daemon meets all of them; each has a test that
tells of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from platform_under_test import IMAGE, Platform, wait_for

from libdsec import DSecClient, DSecConfig, DSecContainerRunArgs, DSecError, ExecProbe, InternalError, NotFoundError, Sandbox

ARGS = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=256, ttl_running_stop=600)
HANGS = 60  # seconds
SIZE = 128 << 20
HOLD = "echo $$ >/tmp/pid; touch /tmp/begun; until [ -e /tmp/go ]; do sleep 0.1; done"

# Answers HTTP and anything else with bytes that drip until it may end.
SERVER = """
import os, socket, threading, time
open("/tmp/pid", "w").write(str(os.getpid()))
listener = socket.create_server(("127.0.0.1", 8000))
open("/tmp/listening", "w").close()
def serve(c):
    http = c.recv(65536).startswith(b"GET")
    if http: c.sendall(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n")
    while not os.path.exists("/tmp/go"):
        c.sendall(b"1\\r\\nx\\r\\n" if http else b"x")
        time.sleep(0.05)
    c.sendall(b"3\\r\\nend\\r\\n0\\r\\n\\r\\n" if http else b"end")
    c.close()
while True: threading.Thread(target=serve, args=(listener.accept()[0],)).start()
"""


@dataclass
class Box:
    """One operation and its sandbox."""

    client: DSecClient
    sandbox: Sandbox
    scratch: Path
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    others: asyncio.Event = field(default_factory=asyncio.Event)  # are under way: what is soon done may begin
    go: asyncio.Event = field(default_factory=asyncio.Event)  # /tmp/go appears at the same time

    async def begins(self, path: str = "/tmp/begun") -> None:
        """The operation is under way once path exists."""
        await self.appears(path)
        self.begun.set()

    async def appears(self, path: str) -> None:
        async with asyncio.timeout(HANGS):
            while not await self.sandbox.file_exists(path):
                await asyncio.sleep(0.05)


# Each operation returns whether it is done and whole; False says that it was told otherwise, without an error.


async def session_command(b: Box) -> bool:
    session = await b.sandbox.session("middle")
    await session.run("word=whole")
    running = asyncio.create_task(session.run(f"{HOLD}; echo $word"))
    await b.begins()
    return (await running).stdout == "whole\n"


async def terminal(b: Box) -> bool:
    screen = await b.sandbox.terminal("stty -echo; echo $$ >/tmp/pid; touch /tmp/begun; while read x; do echo got $x; done")
    await b.begins()
    seen, told = b"", asyncio.create_task(b.go.wait())
    reading = asyncio.create_task(screen.read())
    try:
        await asyncio.wait([told, reading], return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            await screen.write("first\nlast\n")
        while piece := await reading:
            seen += piece
            if b"got last\r\n" in seen:
                return seen == b"got first\r\ngot last\r\n"
            reading = asyncio.create_task(screen.read())
        return False
    finally:
        told.cancel()
        reading.cancel()


async def upload(b: Box) -> bool:
    await b.others.wait()
    running = asyncio.create_task(b.sandbox.upload(b.scratch / "tree", "/tmp/tree"))
    await b.begins("/tmp/tree")
    await running
    digest = hashlib.sha256((b.scratch / "tree" / "file").read_bytes()).hexdigest()
    return (await b.sandbox.run_shell("cat /tmp/tree/file | sha256sum")).stdout.split()[0] == digest


async def download(b: Box) -> bool:
    await b.sandbox.run_shell(f"mkdir /tmp/tree; yes | head -c {SIZE} >/tmp/tree/file", check=True)
    await b.others.wait()
    with tempfile.TemporaryDirectory(dir=b.scratch) as local:
        running = asyncio.create_task(b.sandbox.download("/tmp/tree", local))
        while not os.listdir(local):
            await asyncio.sleep(0.01)
        b.begun.set()
        await running
        return (Path(local) / "file").stat().st_size == SIZE


async def copy(b: Box) -> bool:
    await b.sandbox.run_shell("mkdir /tmp/from; cd /tmp/from; seq 20000 | xargs touch", check=True)
    await b.others.wait()
    running = asyncio.create_task(b.sandbox.copy_file("/tmp/from", "/tmp/to", recursive=True))
    await asyncio.wait([running], timeout=0.2)  # it may show only when it is done
    b.begun.set()
    await running
    return (await b.sandbox.run_shell("ls /tmp/to | wc -l")).stdout == "20000\n"


async def watch_of_files(b: Box) -> bool:
    async with b.sandbox.watch_files("/tmp") as events:
        await b.sandbox.write_file("/tmp/first", b"")
        async for event in events:
            b.begun.set()
            if event.path == "go":
                return True
    return False


async def watch_of_sandboxes(b: Box) -> bool:
    lost = False
    async with aclosing(b.client._api.server_stream("WatchSandboxes", {"ids": [b.sandbox.id]}, wait=HANGS)) as messages:
        async for m in messages:
            if m.get("synced"):
                b.begun.set()
            lost = lost or "edgeLost" in m
            state = m.get("sandbox", {}).get("state", "")
            if state in ("STATE_FAILED", "STATE_STOPPED"):
                return False
            if state and lost:
                return True
    return False


async def watch_of_metrics(b: Box) -> bool:
    async with aclosing(b.client._api.server_stream("WatchMetrics", {"sandboxId": b.sandbox.id, "intervalSeconds": 0.1}, wait=HANGS)) as messages:
        async for m in messages:
            assert m.get("metrics")
            b.begun.set()
            if b.go.is_set():
                return True
    return False


async def http(b: Box) -> bool:
    await b.sandbox.start(["python3", "-c", SERVER])
    await b.appears("/tmp/listening")
    seen = b""
    async with await b.sandbox.port(8000).http("GET", "/") as answer:
        async for piece in answer.iter_bytes():
            seen += piece
            b.begun.set()
    return seen.endswith(b"xend")


async def tcp(b: Box) -> bool:
    await b.sandbox.start(["python3", "-c", SERVER])
    await b.appears("/tmp/listening")
    stream, seen = await b.sandbox.port(8000).connect(), b""
    try:
        await stream.write(b"?")
        while piece := await stream.read():
            seen += piece
            b.begun.set()
    finally:
        stream.close()
    return seen.endswith(b"xend")


async def create(b: Box) -> bool:
    args = replace(ARGS, start="sleep 1000", ready_when=ExecProbe("false"), labels={"of": b.sandbox.id})
    running = asyncio.create_task(b.client.run_container(args, timeout=20))
    while not await created(b):
        await asyncio.sleep(0.05)
    b.begun.set()
    await running
    return False


async def created(b: Box) -> list[str]:
    return [s.id async for s in b.client.list_sandboxes(labels={"of": b.sandbox.id})]


async def trusted_command(b: Box) -> bool:
    running = asyncio.create_task(b.sandbox.run_shell(f"{HOLD}; echo whole", trusted=True, timeout=120))
    await b.begins()
    return (await running).stdout == "whole\n"


async def standard_input(b: Box) -> bool:
    data = os.urandom(16 << 20)
    command = await b.sandbox.start(f"head -c 1000000 >/tmp/part; {HOLD}; cat /tmp/part - | sha256sum", stdin_open=True)
    sending = asyncio.create_task(command.write_stdin(data))
    await b.begins()
    if not await sending:
        return False
    return (await command.wait()).stdout.split()[:1] == [hashlib.sha256(data).hexdigest()]


async def follower(b: Box) -> bool:
    command = await b.sandbox.start("echo $$ >/tmp/pid; i=0; until [ -e /tmp/go ]; do echo $((i+=1)); sleep 0.02; done; echo end")
    seen = b""
    async for piece in command.iter_stdout():
        seen += piece
        b.begun.set()
    lines = seen.decode().splitlines()
    return lines == [*map(str, range(1, len(lines))), "end"]


Operation = Callable[[Box], Awaitable[bool]]
GO_ON: list[Operation] = [session_command, terminal, trusted_command, standard_input, follower]  # whatever of the platform is killed
OPERATIONS: dict[str, Operation] = {
    f.__name__: f
    for f in (*GO_ON, upload, download, copy, watch_of_files, watch_of_sandboxes, watch_of_metrics, http, tcp, create)
}  # fmt: skip
SHORT = ("upload", "download", "copy")
INSIDE = ("session_command", "terminal", "http", "tcp", "standard_input", "follower")  # that have a process which another can kill
VICTIMS = ("edge", "up", "client", "inside", "aether")


@dataclass
class Outcome:
    whole: bool = False
    error: BaseException | None = None
    state: str = ""  # of the sandbox, afterwards
    alive: str = ""  # what a plain command says there


class Killed(Platform):
    """Runs all operations and kills, once for each victim, when the first of that victim's tests asks."""

    def __init__(self) -> None:
        super().__init__("--keep-ended", "20s", pool="16g")
        self.rounds: dict[str, dict[str, Outcome]] = {}
        self.scratch = self.base / "scratch"

    def prepare(self) -> None:
        (self.scratch / "tree").mkdir(parents=True)
        (self.scratch / "tree" / "file").write_bytes(os.urandom(SIZE))

    def patient(self) -> DSecClient:
        return DSecClient(config=DSecConfig(self.url, self.key(), retry_seconds=150))

    async def round(self, victim: str) -> dict[str, Outcome]:
        if victim not in self.rounds:
            self.rounds[victim] = {}  # one that fails is not tried again
            names = [n for n in OPERATIONS if victim != "inside" or n in INSIDE]
            async with self.patient() as client:
                self.rounds[victim] = await Round(self, client, victim, {n: Outcome() for n in names}).run()
        return self.rounds[victim]

    def kill_all(self) -> None:
        self.kill_up()
        self.start()

    def descriptors(self) -> list[int]:
        """Of what lives as long as the platform."""
        assert self.up is not None
        edge = wait_for("an edge runs", self.edge_pid)
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (self.up.pid, edge)]


class Round:
    """All operations, and one kill."""

    def __init__(self, platform: Killed, client: DSecClient, victim: str, outcomes: dict[str, Outcome]) -> None:
        self.platform, self.client, self.victim, self.outcomes = platform, client, victim, outcomes
        self.begun = asyncio.Semaphore(0)
        self.others, self.killed = asyncio.Event(), asyncio.Event()

    async def run(self) -> dict[str, Outcome]:
        lasts = self.victim not in ("edge", "up")
        if lasts:
            async with await self.client.run_container(ARGS) as first:  # what is kept from now on is there
                await first.run_shell("true")
        before = self.platform.descriptors()
        tasks = [asyncio.create_task(self.one(name)) for name in self.outcomes]
        if lasts:  # each kills what is its own
            self.others.set()
        else:
            await self.wait_for(len(tasks) - len(SHORT))
            self.others.set()
            await self.wait_for(len(SHORT))
            await asyncio.to_thread(self.platform.kill_edge if self.victim == "edge" else self.platform.kill_all)
        self.killed.set()
        await asyncio.gather(*tasks)
        await self.client.close()
        if lasts:

            def flat() -> bool:
                return all(now <= was + 8 for now, was in zip(self.platform.descriptors(), before, strict=True))

            await asyncio.to_thread(wait_for, f"descriptors are as before, {before}", flat)
        return self.outcomes

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(2 * HANGS):
            for _ in range(count):
                await self.begun.acquire()

    async def one(self, name: str) -> None:
        outcome = self.outcomes[name]
        async with await self.client.run_container(ARGS) as sandbox:
            box = Box(self.client, sandbox, self.platform.scratch, others=self.others)
            operation = self.in_child(box, name) if self.victim == "client" else OPERATIONS[name](box)
            running = asyncio.ensure_future(operation)
            begun = asyncio.create_task(box.begun.wait())
            await asyncio.wait([running, begun], timeout=HANGS, return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            self.begun.release()
            await self.killed.wait()
            await self.kill_own(box, name)
            try:
                async with asyncio.timeout(HANGS):
                    outcome.whole = await running
            except Exception as e:
                outcome.error = e
            await self.look(box, outcome, dies=self.victim == "aether" and name != "create")

    async def kill_own(self, box: Box, name: str) -> None:
        """Kills what is the operation's own, and lets go on what waits in the sandbox."""
        if self.victim == "aether":
            os.kill(await self.aether(box, name), signal.SIGKILL)
        elif self.victim == "inside":
            await box.sandbox.run_shell("kill -9 $(cat /tmp/pid)", check=True)
        elif self.victim != "client":
            box.go.set()
            await self.let_go(box)

    async def let_go(self, box: Box) -> None:
        await box.sandbox.write_file("/tmp/go", b"")

    async def aether(self, box: Box, name: str) -> int:
        """The process to be killed, once it runs."""
        async with asyncio.timeout(HANGS):
            while True:
                for sandbox_id in await created(box) if name == "create" else [box.sandbox.id]:
                    with suppress(AssertionError, OSError, IndexError):
                        return self.platform.aether_pid(sandbox_id)
                await asyncio.sleep(0.05)

    async def look(self, box: Box, outcome: Outcome, *, dies: bool) -> None:
        """What became of the sandbox: it answers, or has ended."""
        async with asyncio.timeout(HANGS):
            with suppress(NotFoundError):
                outcome.state = (await box.sandbox.refresh()).state.value
                while dies and outcome.state in ("ready", "stopping"):
                    await asyncio.sleep(0.05)
                    outcome.state = (await box.sandbox.refresh()).state.value
            if outcome.state == "ready":
                await box.sandbox.write_file("/tmp/go", b"")  # where a client was killed, a trusted command has all others stopped
                outcome.alive = (await box.sandbox.run_shell("echo alive")).stdout

    async def in_child(self, box: Box, name: str) -> bool:
        """Runs an operation in a process of its own, which is killed in the middle."""
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, name, box.sandbox.id, self.platform.url, self.platform.key(), str(box.scratch),
            env=self.platform.env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert child.stdout is not None and child.stderr is not None
        try:
            line = await child.stdout.readline()
            assert line == b"begun\n", (line, (await child.stderr.read()).decode())
            box.begun.set()
        finally:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        return False


@pytest.fixture(scope="module")
def killed() -> Iterator[Killed]:
    with Killed() as p:
        p.start()
        p.make_environments()
        p.prepare()
        yield p


CASES = [(victim, name) for victim in VICTIMS for name in (INSIDE if victim == "inside" else OPERATIONS)]


@pytest.mark.parametrize(("victim", "name"), CASES)
async def test_killed_in_the_middle(killed: Killed, victim: str, name: str) -> None:
    outcome = (await killed.round(victim)).get(name)
    assert outcome is not None, "the round failed before"
    error = outcome.error
    assert error is None or (isinstance(error, DSecError) and error.reason), repr(error)
    assert not isinstance(error, InternalError) or (victim, name) == ("aether", "create"), repr(error)
    if victim == "aether" and name != "create":
        assert outcome.state == "failed"
    else:
        assert (outcome.state, outcome.alive) == ("ready", "alive\n")
    if victim in ("edge", "up"):
        assert outcome.whole or OPERATIONS[name] not in GO_ON, repr(error)
        assert outcome.whole or error is not None  # nothing ends short and says that it is whole
    else:
        assert not outcome.whole or name in SHORT  # which may have been done before


def test_nothing_is_left(killed: Killed) -> None:
    """Of no sandbox anything is on the host, once the records of those that ended have had their time."""

    def left() -> set[str]:
        names = {f"{d}/{n}" for top in (killed.run, killed.data) for d, dirs, files in os.walk(top) for n in (*dirs, *files)}
        return killed.ids_on_host() | {n for n in names if f"/s{killed.code}" in n}

    wait_for("nothing is left", lambda: not left(), 120)


async def child(name: str, sandbox_id: str, url: str, key: str, scratch: str) -> None:
    async with DSecClient(url, key) as client:
        box = Box(client, await client.get_sandbox(sandbox_id), Path(scratch))
        box.others.set()
        running = asyncio.ensure_future(OPERATIONS[name](box))
        begun = asyncio.create_task(box.begun.wait())
        await asyncio.wait([running, begun], return_when=asyncio.FIRST_COMPLETED)
        print("begun", flush=True)
        await running
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(child(*sys.argv[1:]))
