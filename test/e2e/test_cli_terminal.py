"""Terminals in sandboxes, as a person has them: dsec shell, run -it, exec -it and attach, typed at on a real terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import termios
from collections.abc import Callable, Iterator

import pytest
from platform_under_test import BIN, IMAGE, Platform, wait_for
from terminal_under_test import Terminal

Open = Callable[..., Terminal]


@pytest.fixture
def sandbox(platform: Platform) -> Iterator[str]:
    made = platform.dsec("run", "-d", "-m", "256m", "--ttl", "10m", IMAGE).stdout.strip()
    yield made
    platform.dsec("rm", made, check=False)


def prompt(t: Terminal) -> None:
    """Makes the shell's prompt one that no command line has in it."""
    t.type(b"PS1='re''ady> '\n")
    t.expect(b"ready> ")


def say(t: Terminal, line: str, answer: bytes) -> None:
    t.screen = b""
    t.type(line.encode() + b"\n")
    t.expect(answer)


def cooked(t: Terminal) -> bool:
    """Whether the terminal is in the mode in which a shell wants to find it."""
    flags = termios.tcgetattr(t.fd)[3]
    return bool(flags & termios.ECHO and flags & termios.ICANON and flags & termios.ISIG)


def raw(t: Terminal) -> bool:
    return not termios.tcgetattr(t.fd)[3] & (termios.ECHO | termios.ICANON | termios.ISIG)


# ---- a shell


def test_shell_feels_like_ssh(platform: Platform, terminal: Open, sandbox: str) -> None:
    t = terminal("shell", sandbox, size=(31, 97))
    prompt(t)
    assert raw(t)
    say(t, "stty size; tty", b"31 97\r\n/dev/pts/0")
    t.resize(40, 120)

    def followed() -> bool:
        say(t, "stty size", b"ready> ")
        return b"40 120" in t.screen

    wait_for("the window follows", followed)
    say(t, 'echo "$TERM $LANG"', b"xterm C.UTF-8")
    say(t, "cd /usr/share; x=5", b"ready> ")
    say(t, "pwd; echo $((x + 1))", b"/usr/share\r\n6\r\n")
    t.type(b"exit 7\n")
    assert t.end() == 7
    assert t.mode() == t.mode_before


def test_keys_go_inside_and_job_control_works(platform: Platform, terminal: Open, sandbox: str) -> None:
    t = terminal("shell", sandbox)
    prompt(t)
    t.type(b"sleep 1000\n")
    wait_for("it sleeps", lambda: "sleep" in platform.dsec("exec", sandbox, "sh", "-c", "cat /proc/[0-9]*/comm").stdout.split())
    t.type(b"\x03")
    say(t, "echo code $?", b"code 130")
    t.type(b"sleep 1001\n")
    wait_for("it sleeps", lambda: "1001" in platform.dsec("exec", sandbox, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout)
    t.screen = b""
    t.type(b"\x1a")
    t.expect(b"Stopped")
    say(t, "jobs; kill %1; fg; echo go''ne", b"gone")
    t.type(b"\x04")  # Ctrl-D
    assert t.end() == 0
    assert cooked(t)


def test_full_screen_program(platform: Platform, terminal: Open, sandbox: str) -> None:
    program = """
import curses
def main(s):
    s.addstr(0, 0, "%d by %d" % s.getmaxyx()); s.refresh()
    while (key := s.getch()) != ord("q"):
        if key == curses.KEY_RESIZE:
            curses.update_lines_cols()
        s.erase(); s.addstr(1, 2, "key %d of %d by %d" % (key, *s.getmaxyx())); s.refresh()
curses.wrapper(main)
"""
    t = terminal("exec", "-it", sandbox, "python3", "-c", program, size=(24, 80))
    t.expect(b"24 by 80")
    t.type(b"\x1bOA")
    t.expect(b"key 259")  # the arrow, in one piece
    t.resize(50, 132)
    t.expect(b"50 by 132")
    t.type(b"q")
    assert t.end() == 0
    assert cooked(t)


def test_utf8_in_a_terminal_byte_by_byte(terminal: Open, sandbox: str) -> None:
    """B23: the locale of a terminal is UTF-8, and a character that comes in pieces arrives whole."""
    program = "import sys, locale; print(sys.stdout.encoding, locale.getlocale()[1]); l = input('> '); print([hex(ord(c)) for c in l])"
    t = terminal("exec", "-it", sandbox, "python3", "-c", program)
    t.expect(b"> ")
    assert b"utf-8 UTF-8" in t.screen
    for byte in "zß水🍌".encode():
        t.type(bytes([byte]))
    t.type(b"\n")
    t.expect(b"['0x7a', '0xdf', '0x6c34', '0x1f34c']")
    assert "zß水🍌".encode() in t.screen  # the echo
    assert t.end() == 0


def test_run_at_a_terminal(platform: Platform, terminal: Open) -> None:
    t = terminal("run", "-it", "-l", "test=run-it", IMAGE)
    prompt(t)
    t.type(b"exit 3\n")
    assert t.end() == 3
    assert platform.dsec("ps", "-q", "-l", "test=run-it").stdout == ""
    assert cooked(t)


def test_ten_megabytes_on_one_line(terminal: Open, sandbox: str) -> None:
    t = terminal("exec", "-it", sandbox, "sh", "-c", "head -c 10000000 /dev/zero | tr '\\0' x; echo; echo end of it")
    t.expect(b"end of it", 120)
    assert t.end() == 0
    assert t.screen.count(b"x") == 10_000_000


# ---- leaving and coming back


def test_detach_and_attach(platform: Platform, terminal: Open, sandbox: str) -> None:
    t = terminal("exec", "-it", "--tag", "work", sandbox, "bash")
    prompt(t)
    say(t, "x=kept; echo be''fore", b"before")
    t.type(b"\x10\x11")
    assert t.end() == 0
    assert b"dsec attach" in t.screen
    assert cooked(t)
    t = terminal("attach", "--tag", "work", sandbox)
    t.expect(b"before")  # is replayed
    say(t, "echo is $x", b"is kept")
    t.type(b"exit 4\n")
    assert t.end() == 4
    assert cooked(t)


def test_attach_has_no_gap_and_no_double(terminal: Open, sandbox: str) -> None:
    """B22: whatever a terminal shows while one leaves and comes back, each line is seen once, in order."""
    counts = 'i=0; while :; do i=$((i+1)); echo "n $i."; [ $((i % 500)) -ne 0 ] || sleep 0.05; done'
    t = terminal("exec", "-it", "--tag", "count", sandbox, "sh", "-c", counts)
    for _ in range(4):
        while len(t.screen) < 100_000:
            assert t.read(60), "it ended"
        numbers = [int(n) for n in re.findall(rb"n (\d+)\.\r", t.screen)][1:]  # the first may be the end of a line
        assert len(numbers) > 1000 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        t.type(b"\x10\x11")
        assert t.end() == 0
        t = terminal("attach", "--tag", "count", sandbox)
    wait_for("it is attached", lambda: raw(t))
    t.type(b"\x03")
    assert t.end() == 130


def test_two_at_one_terminal(platform: Platform, terminal: Open, sandbox: str) -> None:
    """Both see all, and what either types arrives."""
    a = terminal("exec", "-it", "--tag", "both", sandbox, "bash")
    prompt(a)
    b = terminal("attach", "--tag", "both", sandbox)
    b.expect(b"ready> ")
    b.type(b"echo from the sec''ond\n")
    a.expect(b"from the second")
    b.expect(b"from the second")
    say(a, "echo from the fi''rst", b"from the first")
    b.expect(b"from the first")
    b.type(b"exit 6\n")
    assert (b.end(), a.end()) == (6, 6)


# ---- ends of all kinds


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_leave_the_terminal_as_it_was(platform: Platform, terminal: Open, sandbox: str, number: signal.Signals) -> None:
    t = terminal("shell", sandbox)
    prompt(t)
    assert raw(t)
    os.kill(t.pid, number)
    assert t.end() == -number
    assert cooked(t)
    wait_for("the shell inside is gone", lambda: not lines(platform, sandbox, "running"))


def test_quit_leaves_the_terminal_as_it_was(terminal: Open, sandbox: str) -> None:
    t = terminal("shell", sandbox)
    prompt(t)
    os.kill(t.pid, signal.SIGQUIT)
    assert t.end() == 2  # as Go does
    assert cooked(t)


def test_stop_and_go_on(terminal: Open, sandbox: str) -> None:
    t = terminal("shell", sandbox)
    prompt(t)
    os.kill(t.pid, signal.SIGTSTP)
    wait_for("it is stopped, with the terminal as it was", lambda: cooked(t) and stopped(t.pid))
    os.kill(t.pid, signal.SIGCONT)
    wait_for("it is raw again", lambda: raw(t))
    say(t, "echo still he''re", b"still here")
    t.type(b"exit\n")
    assert t.end() == 0


def stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rsplit(")", 1)[1].split()[0] == "T"


def lines(platform: Platform, sandbox: str, word: str) -> list[str]:
    return [line for line in platform.dsec("logs", "--list", sandbox).stdout.splitlines() if word in line]


def test_removed_sandbox_ends_the_terminal(platform: Platform, terminal: Open, sandbox: str) -> None:
    t = terminal("shell", sandbox)
    prompt(t)
    platform.dsec("rm", sandbox)
    assert t.end() == 137
    assert b"deleted" in t.screen
    assert cooked(t)


def test_no_terminal_here(platform: Platform, sandbox: str) -> None:
    done = platform.dsec("exec", "-it", sandbox, "bash", check=False)
    assert done.returncode == 2
    assert "standard input is not a terminal" in done.stderr
    # -t alone is a terminal inside, whatever ours is; and a shell without one takes a script.
    assert platform.dsec("exec", "-t", sandbox, "tty", text=False).stdout == b"/dev/pts/0\r\n"
    done = platform.dsec("shell", sandbox, input="tty; echo x; exit 5\n", check=False)
    assert (done.stdout, done.returncode) == ("not a tty\nx\n", 5)


# ---- a platform that goes away


@pytest.fixture
def own() -> Iterator[Platform]:
    with Platform(alone=False) as p:
        p.start()
        p.make_environments()
        yield p


def edge_of(platform: Platform) -> int:
    out = subprocess.run(["pgrep", "-P", str(platform.state()["pid"]), "-f", "dsec edge"], capture_output=True, text=True, check=False).stdout.split()
    assert len(out) == 1, out
    return int(out[0])


def test_terminal_survives_the_platform(own: Platform, terminal: Open) -> None:
    """The edge is killed, and then all of the platform: each time the terminal goes on, in silence, with nothing lost."""
    sandbox = own.dsec("run", "-d", "-m", "256m", IMAGE).stdout.strip()
    t = terminal("shell", sandbox, on=own)
    prompt(t)
    say(t, "x=kept", b"ready> ")
    os.kill(edge_of(own), signal.SIGKILL)
    say(t, "echo is $x after the ed''ge", b"is kept after the edge")
    assert own.up is not None
    own.up.kill()
    own.up.wait()
    own.start()
    say(t, "echo is $x after a''ll", b"is kept after all")
    t.type(b"exit 8\n")
    assert t.end() == 8
    assert b"dsec:" not in t.screen
    assert cooked(t)


def test_platform_that_does_not_come_back(own: Platform, terminal: Open) -> None:
    sandbox = own.dsec("run", "-d", "-m", "256m", IMAGE).stdout.strip()
    t = terminal("shell", sandbox, on=own)
    prompt(t)
    assert own.up is not None
    own.up.kill()
    own.up.wait()
    assert t.end(120) == 125
    assert b"does not answer" in t.screen and b"dsec attach" in t.screen
    assert cooked(t)
    own.start()  # to end what it left
    assert BIN.exists()
