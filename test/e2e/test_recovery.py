"""Daemons that are killed: live sandboxes go on and are found, half-made ones vanish, and nothing is left at the end."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

import pytest
from platform_under_test import BIN, IMAGE, Platform, host_state, is_zombie, wait_for

from libdsec import DSecClient, DSecConfig, DSecContainerRunArgs, State

ARGS = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=64, ttl_running_stop=600, labels={"job": "17"})
COUNTER = "i=0; while :; do i=$((i+1)); echo $i >/tmp/next; mv /tmp/next /tmp/counter; sleep 0.05; done"


async def count(sandbox) -> int:
    return int(await sandbox.read_file("/tmp/counter"))


async def passes(sandbox, start: int) -> None:
    """Returns once the counter in the sandbox is beyond start."""
    async with asyncio.timeout(60):
        while await count(sandbox) <= start:
            await asyncio.sleep(0.02)


async def lives_through(p: Platform, kill: Callable[[], None]) -> None:
    """A sandbox with a command in the background and an exec whose result arrives after the kill."""
    patient = DSecConfig(p.url, p.key(), retry_seconds=150)  # longer than start() may take
    async with DSecClient(config=patient) as client, await client.run_container(ARGS) as sandbox:
        background = await sandbox.start(COUNTER)
        running = asyncio.create_task(sandbox.run_shell("for i in $(seq 50); do echo $i; echo $i >&2; sleep 0.1; done"))
        await sandbox.run_shell("until [ -e /tmp/counter ]; do sleep 0.02; done", timeout=60)
        before = await count(sandbox)
        aether = p.aether_pid(sandbox.id)

        await asyncio.to_thread(kill)

        result = await running
        lines = "".join(f"{i}\n" for i in range(1, 51))
        assert (result.stdout, result.stderr, result.exit_code) == (lines, lines, 0)
        await passes(sandbox, before + 5)
        assert p.aether_pid(sandbox.id) == aether
        found = [s async for s in client.list_sandboxes(labels={"job": "17"})]
        assert [(s.id, s.info.state) for s in found] == [(sandbox.id, State.READY)]
        assert found[0].info.labels == {"job": "17"}
        await background.kill()
        assert (await background.wait()).killed


async def test_killed_edge(own: Platform):
    await lives_through(own, own.kill_edge)


async def test_killed_up(own: Platform):
    def kill() -> None:
        own.kill_up()
        own.start()

    await lives_through(own, kill)


# ---- every failpoint

POINTS = subprocess.run([BIN / "dsec", "edge", "--list-failpoints"], capture_output=True, text=True, check=True).stdout.split()
NOT_PASSED = {  # by a create and a delete
    "journal.activity": "written when a sandbox was idle for a while, or the edge ends in order",
    "journal.network": "written when network rules are replaced",
    "network.policy": "passed when network rules are replaced",
    "network.hosts": "passed when network rules are replaced",
    "journal.forgotten": "written when the record of an ended sandbox is dropped, much later",
}
ALIVE = base64.b64encode(b"alive").decode()
LISTED = {"states": ["STATE_CREATING", "STATE_READY", "STATE_STOPPING"]}


def ours(p: Platform) -> set[str]:
    """What the platform has on the host."""
    return {line for line in host_state() if any(name in line for name in p.names())}


@dataclass
class Lasting:
    """A platform that is killed at one point after the other, and a sandbox that goes on through all of it."""

    platform: Platform
    sandbox: str
    around: set[str]  # what is on the host for it alone

    def exec(self, sandbox: str) -> str:
        request = {"sandboxId": sandbox, "command": {"shell": "printf alive"}, "waitSeconds": -1}
        status, answer = self.platform.call("Exec", request)
        return answer["result"]["stdout"]["data"] if status == 200 else f"{status} {answer}"

    def footprint(self) -> set[str]:
        """All that the platform has on the host, apart from its daemons, which are new ones each time."""
        lines = ours(self.platform)
        pools = (f"mount {self.platform.run}/net/", f"mount {self.platform.run}/users/")  # they grow as they are used
        return {line for line in lines if not line.startswith(("process ", *pools))}


def create(p: Platform, key: str) -> str:
    """The id of a new sandbox that is ready."""
    spec = {"image": IMAGE, "limits": {"memoryBytes": str(64 << 20)}}
    status, answer = p.call("CreateSandbox", {"spec": spec, "idempotencyKey": key, "timeoutSeconds": "100"})
    assert status == 200, answer
    return answer["sandbox"]["id"]


def listed(p: Platform) -> list[str]:
    status, answer = p.call("ListSandboxes", LISTED)
    assert status == 200, answer
    return [s["id"] for s in answer.get("sandboxes", [])]


@pytest.fixture(scope="module")
def lasting() -> Iterator[Lasting]:
    with Platform() as p:
        p.start()
        p.make_environments()
        made = Lasting(p, create(p, "lasting"), set())
        assert made.exec(made.sandbox) == ALIVE  # the first command makes its control group
        made.around = made.footprint()
        yield made


@pytest.mark.long  # test_kill.py passes the points of a create more quickly
@pytest.mark.parametrize("point", POINTS)
def test_killed_at(lasting: Lasting, point: str) -> None:
    p = lasting.platform
    p.kill_up()
    before = len(p.log())
    p.start(DSEC_FAILPOINT=point)
    with suppress(AssertionError, OSError, http.client.HTTPException, json.JSONDecodeError):
        made = create(p, point)
        p.call("DeleteSandbox", {"id": made, "wait": True})
    if point.rsplit(":", 1)[0] not in NOT_PASSED:
        wait_for("the edge dies at the point", lambda: "edge ended; starting it again" in p.log()[before:])
    p.kill_up()

    p.start()
    assert lasting.exec(lasting.sandbox) == ALIVE
    for other in listed(p):
        if other != lasting.sandbox:  # the answer was lost, but it is a whole one
            assert lasting.exec(other) == ALIVE
            p.call("DeleteSandbox", {"id": other, "wait": True})
    again = create(p, f"again {point}")
    assert lasting.exec(again) == ALIVE
    status, _ = p.call("DeleteSandbox", {"id": again, "wait": True})
    assert status == 200
    assert listed(p) == [lasting.sandbox]
    assert lasting.footprint() == lasting.around


def test_down_while_no_edge_runs(own: Platform) -> None:
    """The platform is told to end in the moment between the death of an edge and the next one."""
    create(own, "k")
    own.kill_edge()
    own.stop()  # checks that the host is as before


def test_down_after_all_was_killed(own: Platform) -> None:
    aether = own.aether_pid(create(own, "k"))
    assert own.up is not None
    os.killpg(own.up.pid, signal.SIGSTOP)  # so that it does not start another edge
    own.kill_edge()
    own.up.kill()
    own.up.wait()
    own.up = None
    assert not is_zombie(aether), "the sandbox goes on"
    own.stop()
    assert is_zombie(aether)
    assert not own.run.exists() and not own.base.exists()


# ---- a start that does not succeed


def up(p: Platform) -> tuple[object, ...]:
    return ("up", "--data-dir", p.data, "--run-dir", p.run, "--listen", f"127.0.0.1:{p.port}", *p.flags)


def left_of(p: Platform) -> set[str]:
    """What a start that was the platform's first has left."""
    rows = sqlite3.connect(p.data / "dsec.db")
    with closing(rows):
        [[p.code]] = rows.execute("SELECT code FROM edges").fetchall() or [[""]]
    return {line for line in ours(p) if not line.startswith("process ")}


@pytest.mark.parametrize("moment", ["run directory", "network slots"])
def test_interrupted_start_leaves_nothing(moment: str) -> None:
    while not interrupted_start(moment):
        pass  # the moment was missed


def interrupted_start(moment: str) -> bool:
    """False if the platform was ready before it could be interrupted, as it may be where this test does not get to run."""
    with Platform() as p:
        sign = {"run directory": p.run / "lock", "network slots": p.run / "net"}[moment]
        starting = subprocess.Popen([BIN / "dsec", *map(str, up(p))], env=p.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            wait_for("the start is under way", sign.exists)
            ready = bool(p.state())
            starting.send_signal(signal.SIGINT)
            ready |= bool(p.state())
            out, _ = starting.communicate(timeout=120)
        finally:
            starting.kill()
            starting.wait()
        if ready or starting.returncode == 0:
            return False
        assert (starting.returncode, out) == (-signal.SIGINT, b"")
        assert left_of(p) == set()
        assert not p.run.exists() and not sign.exists()
        return True


def test_failed_start_leaves_nothing() -> None:
    with Platform(pool="1k") as p:  # no file system is that small
        done = p.dsec(*up(p), check=False)
        assert done.returncode == 1, done
        assert left_of(p) == set()
        assert not p.run.exists()


def test_start_that_fails_at_its_end_leaves_nothing() -> None:
    with Platform() as p:
        (p.data / "up.json.new").mkdir(parents=True)
        done = p.dsec(*up(p), check=False)
        assert done.returncode == 1 and "writing the state" in done.stderr, done
        assert left_of(p) == set()
        assert not p.run.exists()


def test_down_says_what_it_did() -> None:
    with Platform() as p:

        def down(*flags: str) -> tuple[str, str]:
            done = p.dsec("down", "--data-dir", p.data, *flags)
            return done.stdout, done.stderr

        assert down() == (f"there is no platform in {p.data}\n", "")
        p.flags += ["--context", "mine"]
        p.start()
        wrong = p.dsec("down", "--data-dir", p.data, "--run-dir", "/run/dsec-another", check=False)
        assert wrong.returncode == 2 and str(p.run) in wrong.stderr, wrong
        content = json.loads(p.config.read_text())
        content["contexts"]["lab"] = {"url": "http://192.0.2.1", "api_key": "dsec_00"}
        content["current"] = "lab"
        p.config.write_text(json.dumps(content))

        said, noted = down()
        assert said == f"dsec is down at {p.url}; images and keys are kept in {p.data}\n"
        assert "current context lab is another platform, at http://192.0.2.1" in noted
        assert p.up is not None and p.up.wait(60) == 0
        assert down()[0] == f"no platform ran; images and keys are kept in {p.data}\n"
        down("--purge", "--context", "lab")  # which it is not
        assert json.loads(p.config.read_text()) == content and not p.data.exists()

        p.start()
        down("--purge")
        assert json.loads(p.config.read_text())["contexts"] == {"lab": content["contexts"]["lab"]}
        assert p.up.wait(60) == 0


def test_failed_start_ends_no_sandbox(own: Platform) -> None:
    """The config file is damaged, has no place, or the disk is full: the sandboxes wait for the next start."""
    alive = create(own, "k")
    content = own.config.read_text()
    own.kill_up()

    own.config.write_text("{")
    done = own.dsec(*up(own), check=False)
    assert done.returncode == 1 and str(own.config) in done.stderr, done
    own.config.write_text(content)

    nowhere = {k: v for k, v in own.env.items() if k not in ("HOME", "XDG_CONFIG_HOME", "DSEC_CONFIG")}
    done = subprocess.run([BIN / "dsec", *map(str, up(own))], check=False, env=nowhere, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "HOME" in done.stderr, done

    (own.data / "up.json.new").mkdir()  # in the way of the last step before it is ready
    done = own.dsec(*up(own), check=False)
    assert done.returncode == 1 and "writing the state" in done.stderr, done
    (own.data / "up.json.new").rmdir()

    own.start()
    assert shell(own, alive, "echo alive") == "alive\n"


def test_up_waits_for_one_that_starts(own: Platform) -> None:
    """What a killed one said of itself is not taken for the word of the one that starts."""
    own.kill_up()
    stale = json.loads((own.data / "up.json").read_text())
    starting = subprocess.Popen([BIN / "dsec", *map(str, up(own))], env=own.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for("its lock is taken", lambda: not (own.data / "up.json").exists())
        said = json.loads(own.dsec(*up(own), "--detach", "--json").stdout)
        assert said == {"url": own.url, "context": "local", "config": str(own.config), "data_dir": str(own.data)}
        assert own.state()["pid"] == starting.pid != stale["pid"]
        assert json.loads(own.dsec("down", "--data-dir", own.data, "--json").stdout) == said  # it knows the run directory
        assert starting.wait(60) == 0
        assert not own.run.exists()
    finally:
        starting.kill()
        starting.wait()


# ---- two platforms on one machine


def shell(p: Platform, sandbox: str, script: str) -> str:
    status, answer = p.call("Exec", {"sandboxId": sandbox, "command": {"shell": script}, "waitSeconds": -1})
    assert status == 200, answer
    return base64.b64decode(answer["result"]["stdout"]["data"]).decode()


def test_two_platforms(own: Platform) -> None:
    """A second one in the run directory of the first is refused and ends nothing; with its own it gets other user ids."""
    alive = create(own, "first")
    with Platform(alone=False) as other:
        real, other.run = other.run, own.run
        done = other.dsec(*up(other), check=False)
        assert done.returncode == 1 and "used by another platform" in done.stderr and "--run-dir" in done.stderr, done
        other.dsec("down", "--data-dir", other.data, "--run-dir", other.run)
        assert shell(own, alive, "echo alive") == "alive\n"
        own.kill_up()  # nobody holds the lock, but the sandbox is there
        done = other.dsec(*up(other), check=False)
        assert done.returncode == 1 and f"--data-dir {own.data}" in done.stderr, done
        own.start()
        assert shell(own, alive, "echo alive") == "alive\n"

        other.run = real
        other.start()
        other.make_environments()
        first = "awk '{print $2}' /proc/self/uid_map"
        ids = [int(shell(p, s, first)) >> 28 for p, s in ((own, alive), (other, create(other, "second")))]
        assert ids[0] != ids[1], ids
