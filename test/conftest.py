"""What holds for every test of a real platform: it needs root, may be a coroutine, and ends: one that hangs fails."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import signal
import threading
from collections.abc import Iterator

import pytest

pytest_plugins = ["no_skips"]

LIMIT = 300.0  # seconds; far more than any test takes on a slow machine
AGAIN = 60.0  # where the clean-up hangs as well


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.geteuid() != 0:
        pytest.exit("these tests need root: sandboxes do", returncode=4)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a time-out ends the platforms in order, too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("limit")
    seconds = float(marker.args[0]) if marker else LIMIT

    def hangs(*_: object) -> None:
        faulthandler.dump_traceback()
        pytest.fail(f"it hangs: not done after {seconds:.0f} s; in these threads: {', '.join(t.name for t in threading.enumerate())}")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def` tests."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.function).parameters}
    asyncio.run(pyfuncitem.function(**arguments))
    return True
