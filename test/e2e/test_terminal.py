"""The command line at a terminal: what Ctrl-C does there, and what is shown."""

from __future__ import annotations

import os
import pty
import re
import select
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from platform_under_test import BIN, IMAGE, ROOT, Platform, wait_for


class Terminal:
    """A shell's foreground job on a terminal of its own: its input is typed, its output is what the screen gets."""

    def __init__(self, platform: Platform, *args: str) -> None:
        self.screen = b""
        pid, self.fd = pty.fork()
        if pid == 0:  # nothing but exec here: the test's threads are not in this process
            os.execve(BIN / "dsec", ["dsec", *args], {**platform.env, "TERM": "xterm"})
        self.pid = pid
        self.status: int | None = None
        wait_for("dsec runs", lambda: not self.is_python())

    def is_python(self) -> bool:
        """Whether it is still the fork of ours, in which an interrupt is lost."""
        try:
            return os.path.samefile(f"/proc/{self.pid}/exe", "/proc/self/exe")
        except FileNotFoundError:  # it has ended already
            return False

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def read(self, seconds: float) -> bool:
        """Takes what there is, waiting for it. False at the end."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            new = os.read(self.fd, 65536)
        except OSError:  # the last process has closed the terminal
            return False
        self.screen += new
        return bool(new)

    def expect(self, text: bytes, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.screen:
            assert time.monotonic() < deadline, f"no {text!r} on the screen: {self.screen!r}"
            assert self.read(0.1) or text in self.screen, f"it ended without {text!r}: {self.screen!r}"

    def end(self, seconds: float = 60) -> int:
        """Waits for its end; the exit code."""
        deadline = time.monotonic() + seconds
        while self.read(0.1):
            assert time.monotonic() < deadline, f"it does not end: {self.screen!r}"
        return self.reap()

    def reap(self) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def close(self) -> None:
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, 9)
            self.reap()
        os.close(self.fd)


@pytest.fixture
def terminal(platform: Platform) -> Iterator[object]:
    made: list[Terminal] = []

    def run(*args: str) -> Terminal:
        made.append(Terminal(platform, *args))
        return made[-1]

    yield run
    for t in made:
        t.close()


def listed(platform: Platform, label: str) -> list[str]:
    return platform.dsec("ps", "-q", "-l", label).stdout.split()


def test_ctrl_c_ends_run(platform, terminal):
    t = terminal("run", "-l", "test=ctrl-c", IMAGE, "sh", "-c", "echo started; sleep 300")
    t.expect(b"started")
    [sandbox] = listed(platform, "test=ctrl-c")
    t.type(b"\x03")
    assert t.end() == 130
    assert listed(platform, "test=ctrl-c") == []
    assert sandbox not in platform.ids_on_host()


def test_ctrl_c_twice_ends_at_once(platform, terminal):
    """The second does not wait for the removal, which goes on without it."""
    t = terminal("run", "-l", "test=twice", "--ttl", "5s", IMAGE, "sh", "-c", "echo started; sleep 300")
    t.expect(b"started")
    t.type(b"\x03\x03")
    assert t.end() == 130
    wait_for("it is removed", lambda: not listed(platform, "test=twice"))


def test_ctrl_c_ends_a_command_and_not_the_sandbox(platform, terminal):
    sandbox = platform.dsec("run", "-d", "-l", "test=stays", IMAGE).stdout.strip()
    t = terminal("exec", sandbox, "sh", "-c", "echo started; setsid sleep 300 & sleep 301")
    t.expect(b"started")
    t.type(b"\x03")
    assert t.end() == 130
    assert listed(platform, "test=stays") == [sandbox]
    # The whole tree is gone, also what is in a session of its own.
    wait_for("its processes are gone", lambda: platform.dsec("exec", "--shell", "grep -lx sleep /proc/[0-9]*/comm | wc -l", sandbox).stdout == "0\n")
    platform.dsec("rm", sandbox)


def test_ctrl_c_while_it_creates(platform, terminal):
    """However early it comes, nothing is left."""
    for _ in range(5):
        t = terminal("run", "-l", "test=early", IMAGE, "sleep", "300")
        t.type(b"\x03")
        assert t.end() in (130, -2), t.screen  # -2: before dsec was there to notice
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
