"""The synchronous client, used from many threads at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
from fake import Platform
from fakehttp import Fault

from libdsec import DSecConfig, DSecContainerRunArgs
from libdsec.sync import DSecClient, Sandbox


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
    platform.hold_creates = lambda: len(platform.boxes) < 10  # none is done before the last has begun
    with DSecClient(config=config) as client:
        results = list(client.run_containers([DSecContainerRunArgs("x")] * 10, timeout=30))
        assert all(isinstance(r, Sandbox) for r in results)
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


def test_a_fork_does_not_stop_its_parents_sandboxes(config: DSecConfig, platform: Platform) -> None:
    with DSecClient(config=config) as client:
        client.run_container(DSecContainerRunArgs("x"))
        results = client.run_containers(DSecContainerRunArgs("x"), 5)
        next(results)
        pid = os.fork()
        if pid == 0:
            try:
                results.close()
                client.run_container(DSecContainerRunArgs("child"))
                client.__exit__(KeyError, KeyError("mine"), None)
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        images = [b.spec["image"] for b in platform.boxes.values() if b.state == "STATE_READY"]
        assert images == ["x"] * 6  # not the child's own, which its failure has stopped
        assert len(list(results)) == 4


def test_commands_in_threads_wait_for_a_connection(config: DSecConfig, platform: Platform) -> None:
    config = replace(config, max_connections=1, request_timeout=2, command_poll_seconds=0.5, retry_seconds=0.01)
    with DSecClient(config=config) as client, ThreadPoolExecutor(3) as pool:
        sandbox = client.run_container(DSecContainerRunArgs("x"))
        output = sandbox.start("echo ready; sleep 100").iter_stdout()
        assert next(output) == b"ready\n"  # and holds the only connection
        futures = [pool.submit(sandbox.run_shell, "echo x") for _ in range(3)]
        assert not wait(futures, timeout=3).done  # longer than one request may take
        output.close()
        assert [f.result().stdout for f in futures] == ["x\n"] * 3


def test_a_read_that_was_interrupted_loses_nothing(config: DSecConfig, platform: Platform) -> None:
    data = os.urandom(5_000_000)
    with DSecClient(config=config) as client, client.run_container(DSecContainerRunArgs("x")) as sandbox:
        sandbox.write_file("/f", data)
        platform.fault("/files", Fault(piece=100_000, pause=0.05))
        with sandbox.open_read("/f") as reader:
            start = reader.read(10)
            position = reader._download.position

            def interrupt() -> None:
                while reader._download.position <= position:
                    time.sleep(0.005)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                reader.read()
            thread.join()
            assert start + reader.read() == data
