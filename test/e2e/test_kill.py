"""kill -9 of the edge and of `dsec up` at every failpoint: live sandboxes go on and are found, half-made ones vanish."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import pytest
from platform_under_test import BIN, IMAGE, Platform, wait_for

from libdsec import CommandResult, DSecConfig, DSecContainerRunArgs, NotFoundError
from libdsec.sync import Command, DSecClient, Sandbox

POINTS = subprocess.run([str(BIN / "dsec"), "edge", "--list-failpoints"], capture_output=True, text=True, check=True).stdout.split()
SETUP = ["admit", "journal.intent", "rootfs", "network", "limits", "policy", "create", "start", "guest", "probe", "ready", "journal.running"]
CREATION = [p for p in POINTS if p.rsplit(":", 1)[0] in SETUP]
ENDING = [p for p in POINTS if ".teardown:" in p or p.startswith(("journal.ending", "journal.ended", "journal.forgotten"))]
TRUST = [p for p in POINTS if p.startswith("trust:")]  # see test/hostile/test_trusted.py
NETWORK = [p for p in POINTS if p.startswith(("journal.network:", "network.policy:", "network.hosts:"))]  # see test_network.py
ACTIVITY = [p for p in POINTS if p.startswith("journal.activity")]
# A create that is cut there has made a sandbox. Whoever of edge and control plane lives on undoes it, since nobody was told
# of it; if neither does, it is found.
LIVES = ("journal.running:after", "ready:after")
VICTIMS = ("edge", "up", "both")

COUNT_TO_STDOUT = "i=0; while [ ! -e /stop ]; do echo $i; i=$((i + 1)); sleep 0.02; done; exit 42"
COUNT_TO_FILE = "(i=0; while [ ! -e /stop ]; do echo $i; i=$((i + 1)); sleep 0.02; done >/tmp/count) >/dev/null 2>&1 &"


def test_every_failpoint_belongs_to_a_test():
    assert sorted(CREATION + ENDING + ACTIVITY + TRUST + NETWORK) == sorted(POINTS)
    assert len(CREATION) == 2 * len(SETUP)


@dataclass
class Witness:
    """A sandbox that must notice nothing of all this: one command counts to its output, one in the background to a file."""

    sandbox: Sandbox
    command: Command
    seen: dict[str, int] = field(default_factory=lambda: {"output": 0, "file": 0})

    @staticmethod
    def start(client: DSecClient) -> Witness:
        sandbox = client.run_container(DSecContainerRunArgs(IMAGE, memory_limit_mb=256))
        sandbox.run_shell(COUNT_TO_FILE)
        return Witness(sandbox, sandbox.start(COUNT_TO_STDOUT))

    def goes_on(self) -> None:
        """Both counters have gone on since the last time, and a new command runs."""
        assert self.sandbox.run_shell("echo $((6 * 7))").stdout == "42\n"
        assert self.command.poll().exit_code == 0
        wait_for("the command in the background goes on", lambda: self._grew("file", len(self.sandbox.read_file("/tmp/count"))))
        wait_for("the running command goes on", lambda: self._grew("output", self.command.poll().stdout_size))

    def _grew(self, what: str, size: int) -> bool:
        grew = size > self.seen[what]
        self.seen[what] = max(size, self.seen[what])
        return grew

    def end(self) -> None:
        """Not a line was lost or written twice, and the exit status arrives."""
        self.sandbox.write_file("/stop", b"")
        result = self.command.wait()
        assert result.exit_code == 42
        for lines in (result.stdout.splitlines(), self.sandbox.read_file("/tmp/count").decode().splitlines()):
            assert lines == [str(i) for i in range(len(lines))]
        self.sandbox.stop()


class Mortal(Platform):
    """A platform whose edge dies or hangs at points that are armed one at a time."""

    def __init__(self) -> None:
        super().__init__("--keep-ended", "1s")
        self.armed = self.base / "failpoint"
        self.env["DSEC_FAILPOINT"] = f"@{self.armed}"

    def arm(self, point: str) -> int:
        """The running edge, started anew, has the point; the ones after it do not."""
        self.armed.write_text(point)
        old = self.edge_pid()
        self.kill_edge()
        new = self.wait_for_edge(old)
        self.armed.write_text("")
        return new

    def wait_for_edge(self, other_than: int | None) -> int:
        """Waits until another edge process serves."""

        def serves() -> bool:
            if self.edge_pid() in (None, other_than):
                return False
            return bool(self.raw("SandboxService/ListSandboxes", {}))

        wait_for("the next edge serves", serves)
        pid = self.edge_pid()
        assert pid is not None
        return pid

    def raw(self, method: str, message: dict[str, object]) -> dict:
        """One request, without the SDK's repetitions. Its answer, or {} if there was none, or an error."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {"Authorization": f"Bearer {self.key()}", "Content-Type": "application/json"}
            connection.request("POST", f"/dsec.v1.{method}", json.dumps(message), headers)
            response = connection.getresponse()
            body = response.read()
            return json.loads(body) if response.status == 200 else {}
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            return {}
        finally:
            connection.close()

    def create(self) -> dict:
        spec = {"image": IMAGE, "limits": {"memoryBytes": 64 << 20}, "labels": {"job": "victim"}}
        return self.raw("SandboxService/CreateSandbox", {"spec": spec})

    def patient(self) -> DSecClient:
        """A client that waits for the platform as long as start() does, and longer than a slow machine takes."""
        return DSecClient(config=DSecConfig(self.url, self.key(), retry_seconds=150))

    def victims(self, client: DSecClient) -> list[Sandbox]:
        return list(client.list_sandboxes(labels={"job": "victim"}))


@pytest.fixture(scope="module")
def mortal() -> Iterator[Mortal]:
    with Mortal() as p:
        p.start()
        p.make_environments()
        yield p


@pytest.fixture(scope="module")
def client(mortal: Mortal) -> Iterator[DSecClient]:
    with mortal.patient() as c:
        yield c


@pytest.fixture(scope="module")
def witness(mortal: Mortal, client: DSecClient) -> Iterator[Witness]:
    w = Witness.start(client)
    yield w
    w.end()


def kill(mortal: Mortal, victim: str, trigger) -> None:
    """Runs trigger and kills at the armed point: the edge, or `dsec up`, whose edge then ends by itself, or both."""
    edge = mortal.edge_pid()
    assert edge is not None
    before = mortal.log().count(" reached\n")

    def until_reached() -> None:  # a create is refused as long as the edge counts as away
        while mortal.edge_pid() == edge:
            trigger()

    thread = threading.Thread(target=until_reached, daemon=True)
    thread.start()
    if victim == "edge":
        mortal.wait_for_edge(edge)
    else:
        wait_for("the point is reached", lambda: mortal.log().count(" reached\n") > before)
        if victim == "both":
            os.kill(edge, signal.SIGKILL)
        mortal.kill_up()
        mortal.start()
    thread.join(120)
    assert not thread.is_alive(), "a request hangs whose edge is gone"


def check_left(mortal: Mortal, client: DSecClient, witness: Witness, lives: bool) -> None:
    """Half-made sandboxes vanish from the host; one that was ready is there and works."""
    if lives:
        (left,) = mortal.victims(client)
        assert left.run_shell("echo alive").stdout == "alive\n"
        left.stop()
    wait_for("only the witness is listed", lambda: not mortal.victims(client))
    expected = {witness.sandbox.id}
    found: set[str] = set()

    def clean() -> bool:
        nonlocal found
        found = mortal.ids_on_host()
        return found == expected

    try:
        wait_for("only the witness is on the host", clean)
    except AssertionError as e:
        raise AssertionError(f"{e}; there are {found}, the witness is {expected}\n{mortal.log()[-3000:]}") from None
    witness.goes_on()


def variants(points: list[str], *victims: str) -> list:
    return [pytest.param(v, p, id=f"{v}-{p.replace(':', '-')}") for p in points for v in victims]


def die_creating(mortal: Mortal, client: DSecClient, witness: Witness, victim: str, point: str) -> None:
    mortal.arm(point + ("" if victim == "edge" else ":hang"))
    kill(mortal, victim, mortal.create)
    check_left(mortal, client, witness, victim == "both" and point in LIVES)


@pytest.mark.parametrize(("victim", "point"), variants(CREATION, "edge", "both"))
def test_killed_while_it_creates(mortal, client, witness, victim, point):
    die_creating(mortal, client, witness, victim, point)


# The edge hangs there, and gives that up after seconds: `dsec up` alone is killed in the long tests.
@pytest.mark.long
@pytest.mark.parametrize(("victim", "point"), variants(CREATION, "up"))
def test_only_up_is_killed_while_it_creates(mortal, client, witness, victim, point):
    die_creating(mortal, client, witness, victim, point)


def die_ending(mortal: Mortal, client: DSecClient, witness: Witness, victim: str, point: str) -> None:
    doomed = mortal.create()["sandbox"]["id"]
    mortal.arm(point + ("" if victim == "edge" else ":hang"))
    kill(mortal, victim, lambda: mortal.raw("SandboxService/DeleteSandbox", {"id": doomed, "wait": True}))
    if point == "journal.ending:before":  # nothing of the delete was kept: who asked for it got an error, and repeats it
        (again,) = mortal.victims(client)
        assert again.run_shell("echo alive").stdout == "alive\n"
        again.stop()
    check_left(mortal, client, witness, False)
    wait_for("it is forgotten", lambda: is_forgotten(client, doomed))


def is_forgotten(client: DSecClient, sandbox_id: str) -> bool:
    try:
        info = client.get_sandbox(sandbox_id).refresh()
    except NotFoundError:
        return True
    assert info.state.value in ("stopping", "stopped"), info
    assert info.reason is not None and info.reason.code == "deleted", info
    return False


@pytest.mark.long
@pytest.mark.parametrize(("victim", "point"), variants(ENDING, *VICTIMS))
def test_killed_while_a_sandbox_ends(mortal, client, witness, victim, point):
    die_ending(mortal, client, witness, victim, point)


@pytest.mark.long
@pytest.mark.parametrize(("victim", "point"), variants(ACTIVITY, "edge", "both"))  # an edge that ends notes activity: it would hang there
def test_killed_while_activity_is_noted(mortal, client, witness, victim, point):
    spec = {"image": IMAGE, "limits": {"memoryBytes": 64 << 20}, "labels": {"job": "victim"}, "idleTimeoutSeconds": "30"}
    used = mortal.raw("SandboxService/CreateSandbox", {"spec": spec})["sandbox"]["id"]
    mortal.arm(point + ("" if victim == "edge" else ":hang"))
    kill(mortal, victim, lambda: mortal.raw("SandboxService/Exec", {"sandboxId": used, "command": {"argv": ["true"]}, "waitSeconds": 5}))
    check_left(mortal, client, witness, True)


def test_edge_is_killed_again_and_again_under_load(mortal, client, witness):
    """Commands that run meanwhile end with all their output, also those that start while there is no edge."""

    def work(_: int) -> list[CommandResult]:
        with mortal.patient() as c, c.run_container(DSecContainerRunArgs(IMAGE, labels={"job": "load"})) as s:
            return [s.run_shell("seq 200000; sleep 0.2; echo end") for _ in range(3)]

    with ThreadPoolExecutor(4) as threads:
        work_done = [threads.submit(work, i) for i in range(4)]
        pause = 0.3
        while wait(work_done, pause).not_done:
            pause *= 1.1  # or on a slow machine no edge lives long enough for anything
            mortal.kill_edge()
            wait_for("an edge serves", lambda: mortal.raw("SandboxService/ListSandboxes", {}))
        results = [r for w in work_done for r in w.result()]
    expected = "".join(f"{i}\n" for i in range(1, 200001)) + "end\n"
    assert [(r.exit_code, r.stdout == expected) for r in results] == [(0, True)] * 12
    check_left(mortal, client, witness, False)


def test_down_after_everything_was_killed():
    """`dsec down` also cleans up after a platform that was killed: of sandboxes, commands and the pool nothing is left."""
    with Platform() as p:
        p.start()
        p.make_environments()
        with DSecClient(p.url, p.key()) as c:
            for _ in range(3):
                s = c.run_container(DSecContainerRunArgs(IMAGE))
                s.start("sleep 1000")
                s.detach()
        p.kill_edge()
        p.kill_up()
        assert len(p.ids_on_host()) == 3
    # leaving it has compared the host
