"""The command line at a terminal: what Ctrl-C does there, and what is shown."""

from __future__ import annotations

import os
import re
import signal
import subprocess

from platform_under_test import BIN, IMAGE, ROOT, Platform, wait_for


def listed(platform: Platform, label: str) -> list[str]:
    return platform.dsec("ps", "-q", "-l", label).stdout.split()


def test_ctrl_c_ends_run(platform, terminal):
    t = terminal("run", "-l", "test=ctrl-c", IMAGE, "sh", "-c", "echo started; sleep 300")
    t.expect(b"started")
    [sandbox] = listed(platform, "test=ctrl-c")
    t.type(b"\x03")
    assert t.end() == -signal.SIGINT
    assert listed(platform, "test=ctrl-c") == []
    assert sandbox not in platform.ids_on_host()


def test_ctrl_c_twice_ends_at_once(platform, terminal):
    """The second does not wait for the removal, which goes on without it."""
    t = terminal("run", "-l", "test=twice", "--ttl", "5s", IMAGE, "sh", "-c", "echo started; sleep 300")
    t.expect(b"started")
    t.type(b"\x03\x03")
    assert t.end() == -signal.SIGINT
    wait_for("it is removed", lambda: not listed(platform, "test=twice"))


def test_ctrl_c_ends_a_command_and_not_the_sandbox(platform, terminal):
    sandbox = platform.dsec("run", "-d", "-l", "test=stays", IMAGE).stdout.strip()
    t = terminal("exec", sandbox, "sh", "-c", "echo started; setsid sleep 300 & sleep 301")
    t.expect(b"started")
    t.type(b"\x03")
    assert t.end() == -signal.SIGINT
    assert listed(platform, "test=stays") == [sandbox]
    # The whole tree is gone, also what is in a session of its own.
    wait_for("its processes are gone", lambda: platform.dsec("exec", "--shell", "grep -lx sleep /proc/[0-9]*/comm | wc -l", sandbox).stdout == "0\n")
    platform.dsec("rm", sandbox)


def test_ctrl_c_ends_a_loop_of_the_shell(platform):
    """A shell goes on with its loop if its child took the interrupt and then exited, and ends it if the child died of it."""
    sandbox = platform.dsec("run", "-d", "-l", "test=loop", IMAGE).stdout.strip()
    loop = f"for i in 1 2 3; do echo turn $i; {BIN}/dsec exec {sandbox} sh -c 'echo started; sleep 300'; done; echo went on"
    shell = subprocess.Popen(["bash", "-c", loop], env=platform.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert shell.stdout is not None and [shell.stdout.readline() for _ in range(2)] == [b"turn 1\n", b"started\n"]
        os.killpg(shell.pid, signal.SIGINT)  # as a terminal does
        assert shell.communicate(timeout=60)[0] == b""
        assert shell.returncode == -signal.SIGINT
    finally:
        shell.kill()
        shell.communicate()
        platform.dsec("rm", sandbox)


def test_ctrl_c_while_it_creates(platform, terminal):
    """However early it comes, nothing is left."""
    for _ in range(5):
        t = terminal("run", "-l", "test=early", IMAGE, "sleep", "300")
        t.type(b"\x03")
        assert t.end() == -signal.SIGINT, t.screen
    wait_for("none is left", lambda: not listed(platform, "test=early"))


def test_input_is_passed_with_its_end(platform, terminal):
    t = terminal("run", "-i", IMAGE, "cat")
    t.type(b"typed\n")
    t.expect(b"typed\r\ntyped\r\n")  # the echo of the terminal, and cat's
    t.type(b"\x04")
    assert t.end() == 0


def test_upload_shows_progress(platform, terminal):
    t = terminal("image", "create", "shown:1", "--from-tar", str(ROOT / "build/base.tar"))
    assert t.end(120) == 0
    assert re.search(rb"\r.*\d+ ?%", t.screen) or re.search(rb"\r.*MiB", t.screen), t.screen
    assert b"shown:1" in t.screen
    platform.dsec("image", "rm", "shown:1")


def test_colours_and_escapes_of_others_do_not_reach_the_terminal(platform, terminal):
    name = "\x1b[31mred\x1b[0m\x07"
    sandbox = platform.dsec("run", "-d", "-l", "test=escape", "--name", name, IMAGE).stdout.strip()
    t = terminal("ps", "-l", "test=escape")
    assert t.end() == 0
    assert b"\x1b" not in t.screen and b"\x07" not in t.screen
    assert sandbox[:8].encode() in t.screen
    platform.dsec("rm", sandbox)
