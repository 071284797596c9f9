"""Fixtures of the tests that attack a sandbox from the inside."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "e2e")]  # before the next two imports: they are there

from attacked import ATTACKS, Box  # noqa: E402
from platform_under_test import IMAGE, Platform  # noqa: E402

from libdsec.sync import DSecClient, DSecContainerRunArgs  # noqa: E402

assert errno.EPERM == 1  # helpers print numbers of this kernel


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    p = Platform()
    try:
        p.start()
        p.make_environments()
        yield p
    finally:
        p.stop()


@pytest.fixture(scope="session")
def helper(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """attacks.c as a static program that runs in every image."""
    out = tmp_path_factory.mktemp("attacks") / "attacks"
    headers = ["-idirafter", "/usr/include", "-idirafter", "/usr/include/x86_64-linux-gnu"]
    flags = ["-static", "-Os", "-std=gnu11", "-Wall", "-Wextra", "-Werror", *headers]
    subprocess.run(["musl-gcc", *flags, "-o", str(out), str(HERE / "attacks.c")], check=True)
    return out.read_bytes()


@pytest.fixture(scope="session")
def client(platform: Platform) -> Iterator[DSecClient]:
    with DSecClient(platform.url, platform.key()) as c:
        yield c


@pytest.fixture(scope="session")
def new_box(client: DSecClient, helper: bytes) -> Callable[..., AbstractContextManager[Box]]:
    """`with new_box(pids_limit=64) as box`: a sandbox with the helper in it, for one test."""

    @contextmanager
    def make(**changes: Any) -> Iterator[Box]:
        args: dict[str, Any] = {"container_image": IMAGE, "memory_limit_mb": 256, "ttl_running_stop": 300, **changes}
        with client.run_container(DSecContainerRunArgs(**args)) as sandbox:
            sandbox.write_file(ATTACKS, helper, mode=0o755)
            yield Box(sandbox)

    return make


@pytest.fixture(scope="module")
def box(new_box: Callable[..., AbstractContextManager[Box]]) -> Iterator[Box]:
    """One sandbox for all tests of a file that leave it as they found it."""
    with new_box() as b:
        yield b
