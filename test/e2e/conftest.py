"""Fixtures of the end-to-end tests. They need the programs in DSEC_BIN (default: bin/)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from platform_under_test import IMAGE, Platform
from terminal_under_test import Terminal

from libdsec import DSecContainerRunArgs, Sandbox


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    """One platform for all tests that leave it as they found it."""
    with Platform() as p:
        p.start()
        p.make_environments()
        yield p


@pytest.fixture
def own() -> Iterator[Platform]:
    """A platform that the test may kill."""
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


@pytest.fixture
def terminal(platform: Platform) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def run(*args: str, on: Platform = platform, size: tuple[int, int] = (0, 0)) -> Terminal:
        made.append(Terminal(on, *args, size=size))
        return made[-1]

    yield run
    for t in made:
        t.close()
