"""The shell of a session under attack by root beside it: the worst that comes of it is a false result of that session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from attacked import PATIENCE, Box, reason, wait_for
from platform_under_test import Platform

from libdsec import CommandResult
from libdsec.sync import Command, Session

ENDS = {"killed", "timeout", "broken", "unresponsive", "exited"}

# What attackers have in common: the shell's process, and its ends of pipes, wherever it has them at the moment.
PRELUDE = """
import ctypes, os, signal, sys, time
shell, libc = int(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
def pipes(mode):
    found = []
    for fd in os.listdir(f"/proc/{shell}/fd"):
        try:
            link, way = os.readlink(f"/proc/{shell}/fd/{fd}"), os.lstat(f"/proc/{shell}/fd/{fd}").st_mode
            if link.startswith("pipe:") and way & (0o200 if mode == os.O_WRONLY else 0o400):
                found.append(os.open(f"/proc/{shell}/fd/{fd}", mode | os.O_NONBLOCK))
        except FileNotFoundError:
            pass
    return found
def each(fds, what):
    for fd in fds:
        try:
            what(fd)
        except OSError:
            pass
def ready():
    print("ready", flush=True)
"""

ATTACKS_ON_SHELLS = {
    "garbage in all that it writes": "out = pipes(os.O_WRONLY); ready()\nwhile True: each(out, lambda fd: os.write(fd, b'\\0' * 300 + b'\\n'))",
    "lines that look like a status": "out = pipes(os.O_WRONLY); ready()\nwhile True: each(out, lambda fd: os.write(fd, b'2 0 hB\\n'))",
    "what it is to read, full": "lines = [os.open(f'/proc/{shell}/fd/{os.path.basename(p)}', os.O_WRONLY | os.O_NONBLOCK) for p in os.listdir(f'/proc/{shell}/fd') if"
    " os.readlink(f'/proc/{shell}/fd/{p}').startswith('pipe:')]; ready()\nwhile True: each(lines, lambda fd: os.write(fd, b'echo mine\\n' * 1000))",
    "what it is to read, taken": "into = pipes(os.O_RDONLY); ready()\nwhile True: each(into, lambda fd: os.read(fd, 65536))",
    "stopped": "os.kill(shell, signal.SIGSTOP); ready()\ntime.sleep(1000)",
    "stopped again and again": "ready()\nwhile True: os.kill(shell, signal.SIGSTOP); os.kill(shell, signal.SIGCONT)",
    "held by a tracer": "libc.ptrace(16, shell, 0, 0); ready()\ntime.sleep(1000)",
    "all signals": "ready()\nfor n in list(range(1, 65)) * 100:\n  if n not in (9, 19, 32, 33): os.kill(shell, n)\ntime.sleep(1000)",
}


@dataclass
class Victim:
    """A session, and another one beside it."""

    box: Box
    session: Session
    other: Session
    shell: str

    @staticmethod
    def of(box: Box) -> Victim:
        session, other = box.sandbox.session("victim"), box.sandbox.session("other")
        assert other.run("kept=yes").exit_code == 0
        return Victim(box, session, other, session.run("echo $$").stdout.strip())

    def attack(self, code: str) -> Command:
        attacker = self.box.sandbox.start(["python3", "-c", PRELUDE + code, self.shell])
        wait_for("the attack has begun", lambda: "ready" in attacker.poll().stdout)
        return attacker

    def assert_others_are_well(self) -> None:
        assert self.other.run("echo $kept; seq 20000 | tail -1; (exit 7)", timeout=PATIENCE) == _Like("yes\n20000\n", 7)
        self.box.assert_well()


class _Like:
    """Equal to results that say this."""

    def __init__(self, stdout: str, exit_code: int) -> None:
        self.told = stdout, exit_code

    def __eq__(self, r: object) -> bool:
        return isinstance(r, CommandResult) and (r.stdout, r.exit_code, r.timed_out) == (*self.told, False)

    def __repr__(self) -> str:
        return repr(self.told)


@pytest.fixture
def victim(box: Box) -> Iterator[Victim]:
    v = Victim.of(box)
    yield v
    for s in (v.session, v.other):
        s.close()


def resources(platform: Platform, box: Box) -> tuple[int, int]:
    """Descriptors and children of aether."""
    pid = platform.aether_pid(box.sandbox.id)
    return len(os.listdir(f"/proc/{pid}/fd")), len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@pytest.mark.parametrize("attack", ATTACKS_ON_SHELLS)
def test_an_attacked_session_ends_and_harms_no_other(victim: Victim, attack: str) -> None:
    attacker = victim.attack(ATTACKS_ON_SHELLS[attack])
    answers = [reason(lambda: victim.session.run(f"echo {i}; sleep 0.1", timeout=3)) for i in range(3)]
    assert set(answers) <= {"ok", "session_ended", "sandbox_resources"}, answers
    victim.assert_others_are_well()
    info = victim.session.refresh()
    assert not info.ended or info.reason in ENDS, info
    victim.session.close()  # also of a shell that stands still
    attacker.kill()
    attacker.wait()
    with victim.box.sandbox.session("victim") as anew:
        assert anew.run("echo anew") == _Like("anew\n", 0)


@pytest.mark.parametrize("attack", ["stopped", "held by a tracer"])
def test_a_command_whose_shell_is_stopped_can_be_ended(victim: Victim, attack: str) -> None:
    running = victim.session.start("echo begun; sleep 1000; echo no")
    behind = victim.session.start("echo never")
    wait_for("it runs", lambda: running.poll().stdout)
    attacker = victim.attack(ATTACKS_ON_SHELLS[attack])
    victim.assert_others_are_well()
    running.kill()
    r = running.wait()
    assert (r.stdout, r.killed, r.exit_code) == ("begun\n", True, 137)
    assert reason(behind.wait) == "session_ended"
    assert victim.session.refresh().reason == "killed"
    attacker.kill()
    attacker.wait()


def test_a_traced_command_can_be_ended(box: Box) -> None:
    """The kernel tells a tracer of its end first, which then need not pass it on."""
    running = box.sandbox.start("echo $$; sleep 1000")
    wait_for("it runs", lambda: running.poll().stdout)
    code = PRELUDE + ATTACKS_ON_SHELLS["held by a tracer"]
    attacker = box.sandbox.start(["python3", "-c", code, running.poll().stdout.strip()])
    wait_for("it is held", lambda: "ready" in attacker.poll().stdout)
    running.kill()
    assert running.wait().killed
    assert attacker.wait().signal == 9
    box.assert_well()


def test_a_forged_status_is_a_result_of_that_session_alone(victim: Victim) -> None:
    running = victim.session.start("echo begun; sleep 1000")
    behind = victim.session.start("echo behind; exit 0")
    alike = victim.other.start("echo alike; sleep 1; (exit 3)")
    wait_for("it runs", lambda: running.poll().stdout)
    victim.attack("each(pipes(os.O_WRONLY), lambda fd: os.write(fd, b'2 0 hB\\n')); ready()")
    r = running.wait()
    assert r.stdout.startswith("begun\n") and not r.timed_out
    assert alike.wait() == _Like("alike\n", 3)
    # What comes next is taken for a status by nobody: its number has passed, or nobody runs.
    victim.attack("each(pipes(os.O_WRONLY), lambda fd: os.write(fd, b'2 0 hB\\n')); ready()")
    wait_for("the session has ended", lambda: victim.session.refresh().ended)
    assert victim.session.info.reason == "broken"
    reason(behind.wait)  # ends, one way or another
    victim.assert_others_are_well()


def test_closed_descriptors(victim: Victim) -> None:
    r = victim.session.run('echo a; for i in {3..300}; do eval "exec $i>&-"; done', timeout=PATIENCE)
    assert r.stdout == "a\n" and not r.timed_out
    wait_for("the session has ended", lambda: victim.session.refresh().ended)
    victim.assert_others_are_well()


def test_fork_bomb_in_a_session(new_box: Callable[..., AbstractContextManager[Box]], platform: Platform) -> None:
    with new_box(pids_limit=128) as box:
        box.assert_well()
        before = resources(platform, box)
        session = box.sandbox.session("bomb")
        r = session.run("bomb() { bomb | bomb & }; bomb; while :; do (:) & done", timeout=3)
        assert r.timed_out or r.exit_code != 0
        session.close()
        wait_for("all of it has ended", lambda: reason(lambda: box.sh("true")) == "ok")
        box.assert_well()
        wait_for("nothing of it is left", lambda: resources(platform, box)[0] <= before[0] + 8)  # a few groups are kept for the next ones


def test_sessions_without_end(new_box: Callable[..., AbstractContextManager[Box]], platform: Platform) -> None:
    with new_box(pids_limit=512) as box:
        box.assert_well()
        before = resources(platform, box)
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda i: reason(lambda: box.sandbox.session(f"s{i}")), range(10_000)))
        assert (got.count("ok"), got.count("sandbox_resources")) == (64, 10_000 - 64)
        assert len(box.sandbox.list_sessions()) == 64
        box.assert_well()
        for info in box.sandbox.list_sessions():
            box.sandbox.session(info.name).close()
        assert box.sandbox.list_sessions() == []
        wait_for("nothing of them is left", lambda: resources(platform, box)[0] <= before[0] + 8)  # a few groups are kept for the next ones


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ".", "..", "a\0b", "a\nb", "a b", "ä", "x" * 65, "%2e%2e", "$(id)", "-" * 65])
def test_names_that_are_paths(box: Box, platform: Platform, name: str) -> None:
    requests: dict[str, dict[str, object]] = {
        "CreateSession": {"sandboxId": box.sandbox.id, "name": name},
        "DeleteSession": {"sandboxId": box.sandbox.id, "name": name},
        "Exec": {"sandboxId": box.sandbox.id, "command": {"shell": "true", "session": name}},
    }
    for method, request in requests.items():
        status, answer = platform.call(method, request)
        assert status == 400 and answer["details"][0]["debug"]["reason"] == "invalid_session", (method, answer)
    assert box.sandbox.list_sessions() == []
