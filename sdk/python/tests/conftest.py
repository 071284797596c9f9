"""Runs coroutine tests, and gives each test a platform of its own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import fake
import pytest

from libdsec import DSecConfig


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run ``async def`` tests with asyncio.run, with a limit that nothing here comes near."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def run() -> Any:
        await asyncio.wait_for(pyfuncitem.function(**arguments), 180)

    asyncio.run(run())
    return True


@pytest.fixture
def platform() -> Iterator[fake.Platform]:
    with fake.platform() as p:
        yield p


@pytest.fixture
def config(platform: fake.Platform) -> DSecConfig:
    """Short times where tests wait for them, and others that a slow machine keeps."""
    return DSecConfig(
        url=platform.url,
        api_key=fake.KEY,
        request_timeout=30.0,
        stall_timeout=30.0,
        retry_seconds=3.0,
        cleanup_seconds=30.0,
        command_poll_seconds=0.5,
    )


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No test sees the configuration of whoever runs it."""
    for name in ("DSEC_URL", "DSEC_API_KEY", "DSEC_CONTEXT", "DSEC_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
