"""Trusted commands tell the truth about a sandbox whose root has replaced everything that it can reach."""

from __future__ import annotations

import hashlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from attacked import Box, reason, wait_for
from platform_under_test import Platform

from libdsec import CommandResult
from libdsec.sync import Sandbox

Boxes = Callable[..., AbstractContextManager[Box]]

TRUTH = "the answer is 42\n"
LIE = b"#!/opt/liar\n"

# A library that tells that it was loaded, whoever loads it: it needs no other.
LOADED = """
#include <sys/syscall.h>
static long call(long n, long a, long b, long c) {
    long r;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return r;
}
__attribute__((constructor)) static void loaded(void) { call(SYS_open, (long)"/tmp/loaded", 0101, 0644); }
"""

# Processes that stop in unusual places: one waits for the child of its vfork, one is stopped by a tracer, one by a signal.
STUCK = """
#include <signal.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
static volatile int nothing;
int main(void) {
    if (fork() == 0) { if (vfork() == 0) for (;;) pause(); }
    pid_t traced = fork();
    if (traced == 0) { ptrace(PTRACE_TRACEME, 0, 0, 0); raise(SIGSTOP); for (;;) pause(); }
    waitpid(traced, 0, 0);
    pid_t stopped = fork();
    if (stopped == 0) { raise(SIGSTOP); for (;;) pause(); }
    waitpid(stopped, 0, WUNTRACED);
    puts("stuck");
    fflush(stdout);
    for (;;) nothing++;
}
"""


def trusted(box: Box, script: str, *, timeout: float = 90, user: str | None = None) -> CommandResult:
    return box.sandbox.run_shell(script, trusted=True, timeout=timeout, user=user)


def truth(box: Box) -> str:
    r = trusted(box, "cat /srv/truth; sha256sum /srv/truth")
    assert r.exit_code == 0, r
    return r.stdout


EXPECTED = TRUTH + hashlib.sha256(TRUTH.encode()).hexdigest() + "  /srv/truth\n"


def compiled(source: str, out: Path, *flags: str, compiler: str = "gcc") -> bytes:
    out.with_suffix(".c").write_text(source)
    subprocess.run([compiler, "-O1", *flags, "-o", str(out), str(out.with_suffix(".c"))], check=True)
    return out.read_bytes()


@pytest.fixture
def tricked(new_box: Boxes) -> Iterator[Box]:
    """A sandbox with something to tell, an environment that lies, and a process that rewrites a file again and again."""
    env = {"LD_PRELOAD": "/opt/loaded.so", "PATH": "/opt/liars", "ENV": "/opt/liar", "BASH_ENV": "/opt/liar"}
    with new_box(env=env, workdir="/tmp") as box:
        box.sandbox.write_file("/srv/truth", TRUTH, make_parents=True, user="root")
        yield box


def freeze_of(platform: Platform, sandbox: Sandbox) -> str:
    return (platform.cgroup(sandbox.id, "user") / "cgroup.freeze").read_text().strip()


def counting(box: Box) -> Callable[[], int]:
    """Starts a process that counts up in a file; returns what reads it, from outside of any command."""
    script = "import os\nn = 0\nwhile True:\n n += 1\n open('/tmp/n~', 'w').write(str(n))\n os.replace('/tmp/n~', '/tmp/n')"
    box.sandbox.start(["/usr/bin/python3", "-c", script], env={"LD_PRELOAD": ""})
    wait_for("it counts", lambda: reason(lambda: box.sandbox.read_file("/tmp/n")) == "ok")
    return lambda: int(box.sandbox.read_file("/tmp/n"))


def test_nothing_of_the_sandboxs_is_used(tricked: Box) -> None:
    box = tricked
    names = "bash sh dash cat sha256sum sed grep busybox env ls id"
    for name in names.split():
        for directory in ("/bin", "/usr/bin", "/usr/local/bin", "/opt/liars", "/sbin"):
            box.sandbox.write_file(f"{directory}/{name}", LIE, mode=0o755, make_parents=True, user="root")
    libraries = ("/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/libc.so.6", "/etc/ld.so.preload", "/etc/ld.so.cache", "/etc/profile", "/etc/passwd")
    for path in libraries:
        box.sandbox.write_file(path, LIE, mode=0o755, user="root")
    assert reason(lambda: box.sandbox.run_shell("cat /srv/truth")) != "ok"
    assert truth(box) == EXPECTED
    r = box.sandbox.exec(["cat", "/srv/truth"], trusted=True)
    assert (r.exit_code, r.stdout) == (0, TRUTH)
    r = trusted(box, "id -u; pwd; env | cut -d= -f1 | sort | xargs; for t in grep sed sort find tar awk; do command -v $t; done; tar czf - /srv | tar tzf -")
    assert r.stdout == "0\n/\nHOME PATH PWD SHLVL\ngrep\nsed\nsort\nfind\ntar\nawk\nsrv/\nsrv/truth\n", r
    # What is not one of the tools is not looked for in the sandbox.
    assert trusted(box, "python3 -c 1").exit_code == 127
    assert trusted(box, "awk 'BEGIN { exit system(\"exit 7\") }'").exit_code != 7
    assert reason(lambda: box.sandbox.exec(["python3"], trusted=True)) == "program_not_found"
    assert reason(lambda: box.sandbox.exec(["/bin/cat", "/srv/truth"], trusted=True)) == "invalid_command"


def test_no_library_of_the_sandbox_is_loaded(tricked: Box, tmp_path: Path) -> None:
    """The C library in a static program loads what the sandbox's nsswitch.conf names; the platform's copy does not."""
    box = tricked
    library = compiled(LOADED, tmp_path / "loaded", "-shared", "-fPIC", "-nostdlib")
    for path in ("/opt/loaded.so", "/lib/x86_64-linux-gnu/libnss_liar.so.2", "/usr/lib/libnss_liar.so.2"):
        box.sandbox.write_file(path, library, mode=0o755, make_parents=True, user="root")
    for path in ("/etc/ld.so.preload",):
        box.sandbox.write_file(path, "/opt/loaded.so\n", user="root")
    box.sandbox.write_file("/etc/nsswitch.conf", "hosts: liar\nservices: liar\npasswd: liar\ngroup: liar\n", user="root")
    loaded = trusted(box, "ls /tmp/loaded; nc nowhere.test 1; wget -q -O- http://nowhere.test/; hostname -f; netstat; ping -c 1 -W 1 nowhere.test; id nobody; ls -l /srv; ls /tmp/loaded")
    assert loaded.stderr.count("/tmp/loaded: No such file") == 2, loaded
    # The trap works: the host's own copy, run in the sandbox, falls into it.
    box.sandbox.write_file("/opt/own/busybox", Path("/bin/busybox").read_bytes(), mode=0o755, make_parents=True, user="root")
    box.sandbox.write_file("/etc/ld.so.preload", "", user="root")
    box.sandbox.exec(["/opt/own/busybox", "nc", "nowhere.test", "1"], env={"LD_PRELOAD": ""}, user="root")
    assert trusted(box, "ls /tmp/loaded").exit_code == 0


def test_everything_else_stands_still(tricked: Box, platform: Platform) -> None:
    box = tricked
    count = counting(box)
    r = trusted(box, "cat /tmp/n; echo; usleep 200000; cat /tmp/n; echo; cat /tmp/n")
    first, second, third = r.stdout.split()
    assert first == second == third
    assert freeze_of(platform, box.sandbox) == "0"
    wait_for("it counts again", lambda: count() > int(first))


def test_processes_that_stop_in_strange_places(tricked: Box, tmp_path: Path, platform: Platform) -> None:
    box = tricked
    box.sandbox.write_file("/tmp/stuck", compiled(STUCK, tmp_path / "stuck", "-static", compiler="musl-gcc"), mode=0o755)
    command = box.sandbox.start(["/tmp/stuck"], env={"LD_PRELOAD": ""})
    wait_for("all are where they shall be", lambda: "stuck" in command.poll().stdout)
    assert truth(box) == EXPECTED
    assert freeze_of(platform, box.sandbox) == "0"
    command.kill()


def test_no_pids_and_no_memory_left(new_box: Boxes) -> None:
    with new_box(pids_limit=64, memory_limit_mb=64) as box:
        box.sandbox.write_file("/srv/truth", TRUTH, make_parents=True)
        box.sandbox.start(["python3", "-c", "import time\nwhile True:\n try: x = bytearray(40 << 20); time.sleep(1)\n except MemoryError: pass"])
        box.sandbox.start("cat /dev/zero >/dev/shm/full; sleep 1000")
        box.sandbox.start("bomb() { bomb | bomb & }; bomb; while :; do (:) & done")
        for _ in range(3):
            assert truth(box) == EXPECTED
        r = trusted(box, "cat /dev/urandom | head -c 20000000 | sha256sum | wc -c; seq 30 | xargs -n1 -P10 echo | wc -l")
        assert r.stdout == "68\n30\n", r


def test_a_trusted_command_has_limits_of_its_own(tricked: Box, platform: Platform) -> None:
    box = tricked
    r = trusted(box, "x=x; while :; do x=$x$x$x$x; done")
    assert r.signal == 9 and r.oom_killed, r
    r = trusted(box, "f() { sleep 100 & f; }; f", timeout=10)
    assert r.exit_code != 0
    assert truth(box) == EXPECTED
    assert freeze_of(platform, box.sandbox) == "0"


def test_nothing_of_it_stays_behind(tricked: Box, platform: Platform) -> None:
    box = tricked
    r = trusted(box, "sleep 1000 & setsid sleep 1000 & echo left")
    assert r.stdout == "left\n"
    group = platform.cgroup(box.sandbox.id, "trusted")
    wait_for("its group is empty", lambda: "populated 0" in (group / "cgroup.events").read_text())


def test_a_fifo_costs_its_timeout_only(tricked: Box, platform: Platform) -> None:
    box = tricked
    count = counting(box)
    assert trusted(box, "mkfifo /tmp/fifo").exit_code == 0
    r = trusted(box, "cat /tmp/fifo", timeout=1)
    assert r.timed_out
    n = count()
    wait_for("it counts again", lambda: count() > n)


def test_others_wait_and_are_told(tricked: Box, platform: Platform) -> None:
    box = tricked
    command = box.sandbox.start("sleep 5; echo end", trusted=True)
    wait_for("it runs", lambda: freeze_of(platform, box.sandbox) == "1")
    request = {"sandboxId": box.sandbox.id, "command": {"argv": ["/bin/true"], "timeoutSeconds": 0.1}, "waitSeconds": 5}
    status, answer = platform.call("Exec", request)
    assert status == 503 and answer["details"][0]["debug"]["reason"] == "sandbox_frozen", answer
    # One whose own time is longer waits for the end.
    r = box.sandbox.exec(["/bin/echo", "after"], env={"LD_PRELOAD": ""})
    assert r.stdout == "after\n"
    assert command.wait().stdout == "end\n"


def test_sessions_and_terminals_stand_still_and_lose_nothing(new_box: Boxes, platform: Platform) -> None:
    """They count before, and from there on afterwards. What is asked of a session meanwhile waits for its turn."""
    count = "i=0; while [ ! -e /tmp/stop ]; do echo $i; i=$((i + 1)); sleep 0.01; done"
    with new_box() as box:
        session = box.sandbox.session("s")
        assert session.run("kept=yes").exit_code == 0
        running, behind = session.start(count), session.start("echo $kept")
        with box.sandbox.terminal(["sh", "-c", count]) as terminal:
            shown = terminal.read()
            wait_for("it counts", lambda: running.poll().stdout_size > 0)
            command = box.sandbox.start("sleep 2; echo end", trusted=True)
            wait_for("it runs", lambda: freeze_of(platform, box.sandbox) == "1")
            later = session.start("echo later")
            assert session.refresh().waiting_commands == 2
            with box.sandbox.session("new") as new:  # its shell is made when all goes on
                assert new.run("echo new").stdout == "new\n"
            assert command.wait().stdout == "end\n"
            size = running.poll().stdout_size
            wait_for("it goes on", lambda: running.poll().stdout_size > size)
            box.sandbox.write_file("/tmp/stop", b"")
            while piece := terminal.read():
                shown += piece
        for lines in (shown.decode().splitlines(), running.wait().stdout.splitlines()):
            assert len(lines) > 1
            assert lines == [str(i) for i in range(len(lines))]
        assert (behind.wait().stdout, later.wait().stdout) == ("yes\n", "later\n")


def test_several_at_once_share_one_stop(tricked: Box, platform: Platform) -> None:
    box = tricked
    counting(box)
    results: list[CommandResult] = []
    threads = [threading.Thread(target=lambda: results.append(trusted(box, "cat /tmp/n; echo; sleep 1; cat /tmp/n"))) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 6
    for r in results:
        first, second = r.stdout.split()
        assert first == second
    assert freeze_of(platform, box.sandbox) == "0"


def test_a_killed_edge_leaves_nothing_standing_still(tricked: Box, platform: Platform) -> None:
    box = tricked
    count = counting(box)
    command = box.sandbox.start("cat /tmp/n; echo; sleep 3; cat /tmp/n", trusted=True)
    wait_for("it runs", lambda: freeze_of(platform, box.sandbox) == "1")
    platform.kill_edge()
    wait_for("everything goes on", lambda: freeze_of(platform, box.sandbox) == "0")
    first, second = command.wait().stdout.split()
    assert first == second
    wait_for("it counts again", lambda: count() > int(second))
    assert truth(box) == EXPECTED  # the next edge can do it, too


def test_it_can_be_killed_and_a_sandbox_that_stands_still_ended(tricked: Box, platform: Platform) -> None:
    box = tricked
    command = box.sandbox.start("sleep 1000", trusted=True)
    wait_for("it runs", lambda: freeze_of(platform, box.sandbox) == "1")
    command.kill()
    assert command.wait().killed
    assert freeze_of(platform, box.sandbox) == "0"
    box.sandbox.start("sleep 1000", trusted=True)
    wait_for("it runs", lambda: freeze_of(platform, box.sandbox) == "1")
    box.sandbox.stop()
