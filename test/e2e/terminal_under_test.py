"""A terminal of a test's own, with dsec as its foreground job."""

from __future__ import annotations

import os
import pty
import select
import termios
import time
from contextlib import suppress

from platform_under_test import BIN, Platform, wait_for


class Terminal:
    """A shell's foreground job on a terminal of its own: its input is typed, its output is what the screen gets."""

    def __init__(self, platform: Platform, *args: str, size: tuple[int, int] = (0, 0)) -> None:
        self.screen = b""
        go, start = os.pipe()
        pid, self.fd = pty.fork()
        if pid == 0:  # nothing but calls of the kernel here: the test's threads are not in this process
            os.read(go, 1)
            termios.tcsetwinsize(0, size)
            os.execve(BIN / "dsec", ["dsec", *args], {**platform.env, "TERM": "xterm"})
        self.pid = pid
        self.status: int | None = None
        self.mode_before = self.mode()  # before dsec can have changed it
        os.write(start, b".")
        for end in (start, go):
            os.close(end)
        wait_for("dsec runs", lambda: not self.is_python())

    def is_python(self) -> bool:
        """Whether it is still the fork of ours, in which an interrupt is lost."""
        try:
            return os.path.samefile(f"/proc/{self.pid}/exe", "/proc/self/exe")
        except FileNotFoundError:  # it has ended already
            return False

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def resize(self, rows: int, cols: int) -> None:
        """Changes the window; the kernel tells the foreground job."""
        termios.tcsetwinsize(self.fd, (rows, cols))

    def mode(self) -> list[object]:
        return termios.tcgetattr(self.fd)[:4]

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
            assert time.monotonic() < deadline, f"no {text!r} on the screen: {self.screen[-2000:]!r}"
            assert self.read(0.1) or text in self.screen, f"it ended without {text!r}: {self.screen[-2000:]!r}"

    def end(self, seconds: float = 60) -> int:
        """Waits for its end; the exit code."""
        deadline = time.monotonic() + seconds
        while self.read(0.1):
            assert time.monotonic() < deadline, f"it does not end: {self.screen[-2000:]!r}"
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
