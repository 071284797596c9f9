"""A sandbox under attack, and how its answers are looked at."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from libdsec import CommandResult, DSecError, State
from libdsec.sync import Command, Sandbox

ATTACKS = "/opt/attacks"
PATIENCE = 90.0  # seconds; nothing is asserted about time, this only bounds a failure


class Box:
    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    def sh(self, script: str, *, user: str | None = None, cwd: str | None = None) -> CommandResult:
        return self.sandbox.run_shell(script, timeout=PATIENCE, user=user, cwd=cwd)

    def out(self, script: str, *, user: str | None = None) -> str:
        """What a script prints; it must succeed."""
        r = self.sh(script, user=user)
        assert r.exit_code == 0, f"{script!r}: {r}"
        return r.stdout.strip()

    def python(self, code: str) -> str:
        r = self.sandbox.exec(["python3", "-c", code], timeout=PATIENCE)
        assert r.exit_code == 0, f"{code!r}: {r}"
        return r.stdout.strip()

    def attack(self, *argv: object) -> list[tuple[str, str]]:
        """Runs attempts of attacks.c to their end: what was tried, and the name of the error, or "ok"."""
        r = self.sandbox.exec([ATTACKS, *map(str, argv)], timeout=PATIENCE)
        assert (r.exit_code, r.signal) == (0, 0), r
        lines = [line.rsplit("\t", 1) for line in r.stdout.splitlines()]
        return [(name, "ok" if n == "0" else errno.errorcode[int(n)]) for name, n in lines]

    def start(self, *argv: object) -> Command:
        return self.sandbox.start([ATTACKS, *map(str, argv)])

    def assert_well(self) -> None:
        """Commands and files work, and the platform thinks so too."""
        assert self.out("echo fine") == "fine"
        self.sandbox.write_file("/tmp/well", b"fine")
        assert self.sandbox.read_file("/tmp/well") == b"fine"
        assert self.sandbox.refresh().state is State.READY


def reason(call: Callable[[], object]) -> str:
    """The reason of the typed error that a call ends with, "ok" if there was none."""
    try:
        call()
    except DSecError as e:
        return e.reason
    return "ok"


def wait_for(what: str, check: Callable[[], object], seconds: float = PATIENCE) -> object:
    """Polls until check returns something true, and returns it."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
