"""docs/field-reports.md names tests that exist; and those of its faults that no other test shows."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from platform_under_test import IMAGE, ROOT, Platform, wait_for

from libdsec import DSecContainerRunArgs, State

REPORTS = "A1 A2 A4 A5 A7 A8 A10 A22 A23 A25 A26 A32 A34 A35 A37 B1 B2 B4 B5 B7 B8 B10 B11 B13 B14 B16 B17 B19 B20 B22 B23 B25 B26 B28 B29 C1 C2 C4 C5 C7 C8 C10 C11 D8 D14 E1 E2 E4 E5 E8 E10 E14 F1 F2 F4 F5 F7 F8 F10 G1 G2 G4 G5 G7 G8 I1 I2 I4 I5".split()


def rows() -> dict[str, str]:
    """What the document says of each report."""
    lines = (ROOT / "docs/field-reports.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| [A-Z]\d", line)]
    assert all(len(c) == 3 for c in cells), cells
    return {c[0]: c[2] for c in cells}


def test_every_report_has_its_line() -> None:
    assert list(rows()) == REPORTS


@pytest.mark.parametrize("report", REPORTS)
def test_named_tests_exist(report: str) -> None:
    shown = rows()[report]
    named = re.findall(r"`([\w./-]+)::(\w+)`", shown)
    assert named or shown.startswith("does not apply yet: "), shown
    assert len(named) == shown.count("::"), "each is written `path::name`"
    for path, name in named:
        definition = rf"^func {name}\([tf] \*testing\.[TF]\)" if path.endswith(".go") else rf"^(async )?def {name}\("
        assert re.search(definition, (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


# A5
async def test_reason_outlives_the_edge(platform: Platform, args: DSecContainerRunArgs) -> None:
    async with platform.client() as client:
        sandbox = await client.run_container(args)
        os.kill(platform.aether_pid(sandbox.id), 9)

        def reason() -> str:
            status, answer = platform.call("GetSandbox", {"id": sandbox.id})
            return answer["sandbox"].get("reason", {}).get("code", "") if status == 200 else ""

        wait_for("its death is noticed", lambda: reason() == "killed")
        old = platform.edge_pid()
        platform.kill_edge()
        wait_for("another edge runs", lambda: platform.edge_pid() not in (None, old))
        wait_for("the new edge tells it as well", lambda: reason() == "killed")


# A22
def test_delete_goes_on_without_its_caller(platform: Platform) -> None:
    """Each caller goes away as soon as it can be seen that its delete was heard."""
    made = [platform.dsec("run", "-d", "-m", "64m", IMAGE, "sleep", "300").stdout.strip() for _ in range(10)]
    try:
        for sandbox in made:
            body = f'{{"id":"{sandbox}","wait":true}}'.encode()
            head = f"POST /dsec.v1.SandboxService/DeleteSandbox HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {platform.key()}\r\n"
            with socket.create_connection(("127.0.0.1", platform.port)) as s:
                s.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                wait_for("the delete was heard", lambda: platform.call("GetSandbox", {"id": sandbox})[1]["sandbox"]["state"] != "STATE_READY")
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # the close is a reset
        wait_for("nothing of them is left on the host", lambda: not platform.ids_on_host() & set(made))
        assert not set(platform.dsec("ps", "-q").stdout.split()) & set(made)
    finally:
        platform.dsec("rm", *made, check=False)


# A26
def test_every_sandbox_has_an_end(platform: Platform) -> None:
    """Also one of which nobody said how long it shall live."""
    status, answer = platform.call("CreateSandbox", {"spec": {"image": IMAGE}})
    assert status == 200, answer
    try:
        spec = answer["sandbox"]["spec"]
        assert 0 < int(spec["idleTimeoutSeconds"]) <= int(spec["lifetimeSeconds"]) <= 86400, spec
    finally:
        platform.dsec("rm", answer["sandbox"]["id"])


# B5
async def test_no_command_is_spared_by_the_oom_killer(new_sandbox) -> None:
    """Neither it nor its grandchildren, and also not when many start at once."""
    script = "for i in 1 2 3; do cat /proc/self/oom_score_adj; (setsid sh -c 'cat /proc/self/oom_score_adj'); done"
    async with new_sandbox() as s:
        results = await asyncio.gather(*(s.run_shell(script) for _ in range(50)))
        scores = {int(line) for r in results for line in r.stdout.splitlines()}
        assert sum(r.stdout.count("\n") for r in results) == 300
        assert min(scores) >= 0, scores
        refused = await s.run_shell("echo -1000 >/proc/self/oom_score_adj", user="root")
        assert refused.exit_code != 0, "root inside cannot spare itself"


# B11
async def test_result_has_the_last_byte(new_sandbox) -> None:
    """Whoever sees an exit code sees all that was written before it."""
    script = "head -c 300000 /dev/zero | tr '\\0' x; printf end; printf end >&2"
    async with new_sandbox() as s:
        results = await asyncio.gather(*(s.run_shell(script) for _ in range(50)))
        assert {(len(r.stdout_bytes), r.stdout[-3:], r.stderr) for r in results} == {(300003, "end", "end")}


# E1, E5
def test_churn_leaves_nothing(platform: Platform) -> None:
    edge = platform.edge_pid()

    def held() -> dict[str, int]:
        """Of the edge, and of the host by its name: descriptors, mappings, mounts."""
        return {
            "descriptors": len(os.listdir(f"/proc/{edge}/fd")),
            "mappings": Path(f"/proc/{edge}/maps").read_text().count("\n"),
            "mounts": Path(f"/proc/{edge}/mountinfo").read_text().count("\n"),
        }

    async def come_and_go(count: int) -> None:
        async with platform.client() as client:
            args = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=64)
            async for created in client.run_containers(args, count):
                assert not isinstance(created, Exception), created
                assert (await created.run_shell("echo x")).stdout == "x\n"
                await created.stop()

    asyncio.run(come_and_go(50))  # pools and caches are full
    ids, before = platform.ids_on_host(), held()
    for _ in range(3):
        asyncio.run(come_and_go(50))

    def returned() -> bool:
        now = held()
        return now["mounts"] <= before["mounts"] and now["descriptors"] <= before["descriptors"] + 10 and now["mappings"] <= before["mappings"] + 30

    try:
        wait_for("all is as before", returned)
    except AssertionError:
        raise AssertionError(f"{before} became {held()}") from None
    assert platform.ids_on_host() <= ids


# I4
def test_no_secret_is_logged() -> None:
    """Not a key, a variable, an argument, input, or what a URL of a port holds, with all that can be logged."""
    with Platform("--log-level", "debug") as p:
        p.start()
        p.make_environments()
        word = "s3cr3tw0rd"
        id = p.dsec("run", "-d", "-e", f"TOKEN={word}", IMAGE).stdout.strip()
        p.dsec("exec", "-e", f"TOKEN={word}", "-i", id, "sh", "-c", f"cat; echo {word}; echo {word} >&2", input=word)
        p.dsec("exec", id, "no-such-program", word, check=False)
        token = p.dsec("url", id, "8000").stdout.strip().rpartition("=")[2]
        p.call("CreateSandbox", {"spec": {"image": IMAGE, "env": {"A=B": word}}})
        p.dsec("rm", id)
        log = p.log()
        assert '"level":"DEBUG"' in log
        for secret in (word, token, p.key(), p.key().removeprefix("dsec_")):
            assert len(secret) > 8
            assert secret not in log, f"a line of the log has {secret[:3]}..."


# G7
def test_long_names_and_deep_directories() -> None:
    """Names of people are no part of a path, and a socket's path may be longer than the kernel takes at once."""
    p = Platform()
    top = p.run
    p.run = top / ("deep" * 20) / ("deeper" * 10)
    try:
        p.run.mkdir(parents=True)
        p.start()
        p.make_environments()
        name, label = "n" * 63, "l" * 63
        done = p.dsec("run", "--name", name, "-l", f"{label}={label}", IMAGE, "echo", "well")
        assert done.stdout == "well\n"
    finally:
        p.stop()
        if top.exists():
            for directory in sorted(top.rglob("*"), reverse=True):
                directory.rmdir()
            top.rmdir()


# B4
async def test_a_sandbox_that_is_used_up_answers(platform: Platform, args: DSecContainerRunArgs) -> None:
    """All of its processor, memory and nearly all tasks are taken, again and again."""
    async with platform.client() as client:
        async with await client.run_container(replace(args, memory_limit_mb=64, cpu_cores_limit=0.5, pids_limit=256)) as sandbox:
            aether = platform.aether_pid(sandbox.id)
            for _ in range(8):
                await sandbox.start("while :; do :; done")
            eats = await sandbox.start("while :; do python3 -c 'a = []\nwhile True: a.append(bytearray(1 << 20))'; done")
            async with asyncio.timeout(120):
                while (await sandbox.metrics()).oom_kills < 2:
                    await asyncio.sleep(0.05)
            for i in range(5):
                async with asyncio.timeout(60):  # a guard against hanging, not a promise of speed
                    await sandbox.write_file("/tmp/file", str(i))
                    result = await sandbox.run_shell("echo $(cat /tmp/file)", timeout=50)
                assert (result.stdout, result.timed_out) == (f"{i}\n", False) or result.oom_killed, result
            assert (await eats.poll()).running
            assert platform.aether_pid(sandbox.id) == aether  # it was not among those that the kernel killed
            assert (await sandbox.refresh()).state == State.READY
