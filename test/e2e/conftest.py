"""Fixtures of the end-to-end tests. They need root, and the programs in DSEC_BIN (default: bin/)."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from platform_under_test import IMAGE, Platform

from libdsec import DSecContainerRunArgs, Sandbox

ALLOWED_SKIPS: dict[str, str] = {}  # node id -> reason; any other skip fails the run in CI


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.geteuid() != 0:
        pytest.exit("the end-to-end tests need root: sandboxes do", returncode=4)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a time-out ends the platforms in order, too


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    surprises = [r for r in terminalreporter.getreports("skipped") if r.nodeid not in ALLOWED_SKIPS]
    if surprises and os.environ.get("CI"):
        terminalreporter.write_line(f"{len(surprises)} skips that conftest.py does not list", red=True)
        terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    """One platform for all tests that leave it as they found it."""
    with Platform() as p:
        p.start()
        p.make_environments()
        yield p


@pytest.fixture
def args() -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=256, ttl_running_stop=300)


@pytest.fixture
def new_sandbox(platform: Platform, args: DSecContainerRunArgs) -> Callable[..., AbstractAsyncContextManager[Sandbox]]:
    """`async with new_sandbox(memory_limit_mb=64) as sandbox`: a sandbox that is stopped at the end."""

    @asynccontextmanager
    async def make(**changes: Any) -> AsyncIterator[Sandbox]:
        async with platform.client() as client, await client.run_container(replace(args, **changes)) as sandbox:
            yield sandbox

    return make


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def` tests."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.function).parameters}
    asyncio.run(pyfuncitem.function(**arguments))
    return True
