"""The synchronous client, used from many threads at once."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from fake import Platform

from libdsec import DSecConfig, DSecContainerRunArgs
from libdsec.sync import DSecClient


def test_many_threads_share_a_client(config: DSecConfig, platform: Platform) -> None:
    with DSecClient(config=replace(config, max_connections=5)) as client:
        sandbox = client.run_container(DSecContainerRunArgs("x"))

        def work(i: int) -> bool:
            if i % 10 == 0:
                data = os.urandom(100_000)
                sandbox.write_file(f"/f{i}", data)
                return sandbox.read_file(f"/f{i}") == data
            return sandbox.exec(["echo", str(i)]).stdout == f"{i}\n"

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(work, range(100)))
        assert platform.connections <= 5
        sandbox.stop()


def test_many_are_created_at_once(config: DSecConfig, platform: Platform) -> None:
    platform.create_delay = lambda key: 0.3
    with DSecClient(config=config) as client:
        start = time.monotonic()
        results = list(client.run_containers([DSecContainerRunArgs("x")] * 10))
        assert time.monotonic() - start < 2.5
        assert len({r.index for r in results}) == 10


def test_a_command_is_killed_from_another_thread(config: DSecConfig, platform: Platform) -> None:
    with DSecClient(config=config) as client:
        sandbox = client.run_container(DSecContainerRunArgs("x"))

        def kill() -> None:
            while not platform.running():
                time.sleep(0.005)
            sandbox.kill("mine")

        killer = threading.Thread(target=kill)
        killer.start()
        assert sandbox.run_shell("sleep 100", command_id="mine").killed
        killer.join()


def test_a_fork_does_not_share_connections(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    assert client.system_info().version == "0.1"
    before = platform.connections
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if client.system_info().version == "0.1" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert platform.connections == before + 1
    assert client.system_info().version == "0.1"
    client.close()
