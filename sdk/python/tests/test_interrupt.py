"""Ctrl-C, for real: a process of its own gets SIGINT, and the platform must be empty afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake import KEY, Platform

ROOT = Path(__file__).resolve().parent.parent

ASYNC_PLAIN = """
import asyncio
from libdsec import DSecClient, DSecContainerRunArgs
async def main():
    client = DSecClient()
    await client.open()
    sandbox = await client.run_container(DSecContainerRunArgs(container_image="x"), timeout=120)
    await sandbox.run_shell("sleep 100 & sleep 100")
asyncio.run(main())
"""

ASYNC_MANAGED = """
import asyncio
from libdsec import DSecClient, DSecContainerRunArgs
async def main():
    async with DSecClient() as client:
        async def one():
            async with await client.run_container(DSecContainerRunArgs("x")) as sandbox:
                await sandbox.run_shell("sleep 100")
        await asyncio.gather(*(one() for _ in range(5)))
asyncio.run(main())
"""

ASYNC_CREATING = """
import asyncio
from libdsec import DSecClient, DSecContainerRunArgs
async def main():
    client = DSecClient()
    await client.run_container(DSecContainerRunArgs("slow"))
asyncio.run(main())
"""

ASYNC_BATCH = """
import asyncio
from libdsec import DSecClient, DSecContainerRunArgs
async def main():
    async with DSecClient() as client:
        async for sandbox in client.run_containers(DSecContainerRunArgs("slow"), 20):
            pass
asyncio.run(main())
"""

SYNC_PLAIN = """
from libdsec.sync import DSecClient, DSecContainerRunArgs
client = DSecClient()
sandbox = client.run_container(DSecContainerRunArgs("x"))
sandbox.run_shell("sleep 100 & sleep 100")
"""

SYNC_MANAGED = """
from libdsec.sync import DSecClient, DSecContainerRunArgs
with DSecClient() as client:
    other = client.run_container(DSecContainerRunArgs("x"))
    with client.run_container(DSecContainerRunArgs("x")) as sandbox:
        sandbox.run_shell("sleep 100")
"""

SYNC_CREATING = """
from libdsec.sync import DSecClient, DSecContainerRunArgs
DSecClient().run_container(DSecContainerRunArgs("slow"))
"""

SYNC_BATCH = """
from libdsec.sync import DSecClient, DSecContainerRunArgs
with DSecClient() as client:
    for sandbox in client.run_containers([DSecContainerRunArgs("slow")] * 20):
        pass
"""


CASES = {
    "async_plain": (ASYNC_PLAIN, 1),
    "async_managed": (ASYNC_MANAGED, 5),
    "async_creating": (ASYNC_CREATING, 1),
    "async_batch": (ASYNC_BATCH, 20),
    "sync_plain": (SYNC_PLAIN, 1),
    "sync_managed": (SYNC_MANAGED, 1),
    "sync_creating": (SYNC_CREATING, 1),
    "sync_batch": (SYNC_BATCH, 20),
}


@pytest.mark.parametrize(("script", "expected"), CASES.values(), ids=CASES)
def test_nothing_is_left(platform: Platform, script: str, expected: int) -> None:
    slow = "slow" in script
    platform.create_delay = lambda key: 60.0 if slow else 0.0
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "DSEC_URL": platform.url, "DSEC_API_KEY": KEY},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: len(platform.boxes if slow else platform.running()) >= expected)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (-signal.SIGINT, 130), errors
    assert "KeyboardInterrupt" in errors
    wait_for(lambda: all(b.state == "STATE_STOPPED" for b in platform.boxes.values()))
    wait_for(lambda: not platform.running())


def test_an_unhandled_exception_leaves_nothing_and_an_orderly_end_does(platform: Platform) -> None:
    script = (
        "import sys\nfrom libdsec.sync import DSecClient, DSecContainerRunArgs\n"
        "client = DSecClient()\nsandbox = client.run_container(DSecContainerRunArgs('x'))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "DSEC_URL": platform.url, "DSEC_API_KEY": KEY}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=120)
    assert len(platform.live()) == 1
    failed = subprocess.run([sys.executable, "-c", script + "1 / 0"], env=env, timeout=120, capture_output=True)
    assert failed.returncode == 1
    assert len(platform.live()) == 1
    assert len(platform.boxes) == 2


def test_an_exit_in_order_leaves_sandboxes_and_a_failure_does_not(platform: Platform) -> None:
    script = (
        "import sys\nfrom libdsec.sync import DSecClient, DSecContainerRunArgs\n"
        "with DSecClient() as client:\n    client.run_container(DSecContainerRunArgs('x'))\n    sys.exit(%s)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "DSEC_URL": platform.url, "DSEC_API_KEY": KEY}
    for code, left in (("", 1), ("0", 2), ("3", 2), ("'why'", 2)):
        subprocess.run([sys.executable, "-c", script % code], env=env, timeout=120, capture_output=True)
        assert len(platform.live()) == left, code
    assert len(platform.boxes) == 4


def wait_for(condition: object, limit: float = 60.0) -> None:
    assert callable(condition)
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)
