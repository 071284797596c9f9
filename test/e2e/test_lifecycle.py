"""How sandboxes come to be and end, and what is refused: times to live, keys, lists, reasons, clients that vanish."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from platform_under_test import IMAGE, Platform, wait_for

from libdsec import AlreadyExistsError, CommandResult, DSecClient, DSecConfig, DSecError, InvalidArgumentError, Sandbox, State, UnavailableError
from libdsec.sync import DSecClient as SyncClient
from libdsec.sync import Sandbox as SyncSandbox

MIB = 1 << 20


def spec(**changes: object) -> dict[str, object]:
    """A spec as it is on the wire."""
    return {"image": IMAGE, "limits": {"memoryBytes": str(64 * MIB)}, "lifetimeSeconds": "120", **changes}


def reason(answer: dict) -> str:
    """Why a raw request was refused."""
    return answer["details"][0]["debug"]["reason"]


def listed(p: Platform, **more: object) -> list[dict]:
    status, answer = p.call("ListSandboxes", more)
    assert status == 200, answer
    return answer.get("sandboxes", [])


def with_label(p: Platform, value: str) -> list[str]:
    return [s["id"] for s in listed(p, labels={"test": value})]


async def ended(sandbox, seconds: float = 60):
    """What is known of a sandbox once it has ended by itself."""
    async with asyncio.timeout(seconds):
        while not (await sandbox.refresh()).state.terminal:
            await asyncio.sleep(0.05)
    return sandbox.info


# ---- times


async def test_idle_sandbox_ends_and_busy_one_does_not(platform, args):
    async with platform.client() as client:
        idle = await client.run_container(replace(args, ttl_running_stop=3))
        busy = await client.run_container(replace(args, ttl_running_stop=3))
        command = await busy.start("until [ -e /stop ]; do sleep 0.1; done")
        # Asking for a state is a request, but no activity: else a monitor would keep everything alive.
        info = await ended(idle)
        assert (info.state, info.reason.code) == (State.STOPPED, "idle_timeout")
        assert (await busy.refresh()).state == State.READY
        assert busy.info.idle_expires_at is None
        assert busy.info.running_commands == 1
        await busy.write_file("/stop", b"")
        assert (await command.wait()).exit_code == 0
        assert (await ended(busy)).reason.code == "idle_timeout"
        with pytest.raises(DSecError) as e:
            await idle.run_shell("true")
        assert e.value.code in ("not_found", "failed_precondition"), str(e.value)


async def test_lifetime_ends_also_a_busy_one(platform, args):
    async with platform.client() as client:
        sandbox = await client.run_container(replace(args, lifetime=5))
        command = asyncio.create_task(sandbox.run_shell("sleep 300"))
        info = await ended(sandbox)
        assert (info.state, info.reason.code) == (State.STOPPED, "lifetime")
        assert info.created_at < info.ready_at <= info.ended_at
        assert info.ended_at >= info.expires_at
        result: CommandResult | BaseException = (await asyncio.gather(command, return_exceptions=True))[0]
        assert isinstance(result, DSecError) or (isinstance(result, CommandResult) and result.killed)


@pytest.mark.parametrize("field", ["ttl_running_stop", "lifetime"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_sdk_refuses_times(args, field, value):
    with pytest.raises(InvalidArgumentError, match=field):
        replace(args, **{field: value})


@pytest.mark.parametrize("field", ["idleTimeoutSeconds", "lifetimeSeconds"])
@pytest.mark.parametrize("value", ["-1", "-9223372036854775808", "9223372036854775807"])
def test_api_refuses_times(platform, field, value):
    status, answer = platform.call("CreateSandbox", {"spec": spec(**{field: value})})
    assert (status, answer["code"], reason(answer)) == (400, "invalid_argument", "invalid_spec")


# ---- lists


def test_labels_filters_and_pages(platform):
    made = []
    for i in range(5):
        labels = {"test": "pages", "parity": "odd" if i % 2 else "even"}
        status, answer = platform.call("CreateSandbox", {"spec": spec(labels=labels)})
        assert status == 200, answer
        made.append(answer["sandbox"]["id"])
    assert sorted(with_label(platform, "pages")) == sorted(made)
    assert {s["id"] for s in listed(platform, labels={"test": "pages", "parity": "odd"})} == {made[1], made[3]}
    assert not listed(platform, labels={"test": "pages", "parity": ""})

    seen, token = [], ""
    for _ in range(3):
        status, answer = platform.call("ListSandboxes", {"labels": {"test": "pages"}, "pageSize": 2, "pageToken": token})
        assert status == 200, answer
        seen += [s["id"] for s in answer["sandboxes"]]
        token = answer.get("nextPageToken", "")
    assert token == ""
    assert sorted(seen) == sorted(made)

    for id in made[:2]:
        assert platform.call("DeleteSandbox", {"id": id, "wait": True})[0] == 200
    assert sorted(with_label(platform, "pages")) == sorted(made[2:])
    stopped = listed(platform, labels={"test": "pages"}, states=["STATE_STOPPED"])
    assert {s["id"] for s in stopped} == set(made[:2])
    assert {s["reason"]["code"] for s in stopped} == {"deleted"}
    for id in made[2:]:
        platform.call("DeleteSandbox", {"id": id, "wait": True})


@pytest.mark.parametrize(
    ("request_", "why"),
    [({"pageSize": -1}, "invalid_page_size"), ({"pageToken": "../../etc"}, "invalid_page_token"), ({"pageToken": "A" * 9999}, "invalid_page_token")],
)
def test_pages_refused(platform, request_, why):
    status, answer = platform.call("ListSandboxes", request_)
    assert (status, reason(answer)) == (400, why)


# ---- ends


async def test_killed_from_outside(platform, args):
    async with platform.client() as client:
        sandbox = await client.run_container(args)
        os.kill(platform.aether_pid(sandbox.id), signal.SIGKILL)
        info = await ended(sandbox)
        assert (info.state, info.reason.code) == (State.FAILED, "killed"), info.reason
        assert info.reason.message
        with pytest.raises(DSecError) as e:
            await sandbox.run_shell("true")
        assert sandbox.id in str(e.value) or info.reason.code in str(e.value), "the error says what became of it"
        await sandbox.stop()
        assert (await sandbox.refresh()).reason.code == "killed", "a delete does not hide what happened"


def unknown_id(node: str) -> str:
    """An id that nobody has, with check characters that are right."""
    alphabet = "abcdefghijklmnopqrstuvwxyz234567"
    body, h = "s" + node + "a" * 16, 0
    for c in body.encode():
        h = (h * 33 + c) % 1021
    return body + alphabet[h >> 5] + alphabet[h & 31]


def test_delete_twice_and_unknown(platform):
    made = platform.call("CreateSandbox", {"spec": spec()})[1]["sandbox"]["id"]
    for _ in range(2):
        status, answer = platform.call("DeleteSandbox", {"id": made, "wait": True})
        assert (status, answer["sandbox"]["state"], answer["sandbox"]["reason"]["code"]) == (200, "STATE_STOPPED", "deleted")
    for method in ("GetSandbox", "DeleteSandbox"):
        status, answer = platform.call(method, {"id": unknown_id(made[1:6])})
        assert (status, reason(answer)) == (404, "sandbox_not_found")
        status, answer = platform.call(method, {"id": unknown_id("aaaaa")})  # on a node that is not there
        assert (status, reason(answer)) == (404, "sandbox_not_found")
        mistyped = made[:-1] + ("a" if made[-1] != "a" else "b")
        status, answer = platform.call(method, {"id": mistyped})
        assert (status, reason(answer)) == (400, "bad_id")


@pytest.mark.parametrize("bad", ["", "x", "../../etc/passwd", "s" * 5000, "S" + "A" * 23, "s\0aaa", "säää"])
def test_malformed_id(platform, bad):
    for method in ("GetSandbox", "DeleteSandbox"):
        status, answer = platform.call(method, {"id": bad})
        assert status in (400, 404), answer
        assert answer["message"]
        assert len(answer["message"]) < 500


def test_delete_while_creating(platform):
    """A delete by key meets a create wherever it is; none of them is left, and none answers with a sandbox that goes on."""
    answers: dict[int, tuple[int, dict]] = {}

    def create(i: int) -> None:
        request = {"spec": spec(labels={"test": "early"}), "idempotencyKey": f"early-{i}"}
        answers[i] = platform.call("CreateSandbox", request)

    def delete(i: int) -> bool:
        status, answer = platform.call("DeleteSandbox", {"idempotencyKey": f"early-{i}", "wait": True})
        assert status in (200, 404, 400, 412), answer
        return status == 200

    for i in range(10):
        thread = threading.Thread(target=create, args=(i,))
        thread.start()
        wait_for("the create is found by its key", lambda: delete(i))
        thread.join()
    assert not with_label(platform, "early")
    for status, answer in answers.values():
        assert status == 200 or reason(answer) == "create_canceled", answer


# ---- keys


async def test_idempotency_key(platform, args):
    async with platform.client() as client:
        many = await asyncio.gather(*(client.run_container(args, idempotency_key="same") for _ in range(5)))
        assert len({s.id for s in many}) == 1
        with pytest.raises(AlreadyExistsError) as e:
            await client.run_container(replace(args, memory_limit_mb=65), idempotency_key="same")
        assert e.value.reason == "idempotency_key_reused"
        await many[0].stop()
    status, answer = platform.call("CreateSandbox", {"spec": spec(), "idempotencyKey": "k" * 129})
    assert (status, answer["code"]) == (400, "invalid_argument")


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "code", "why"),
    [
        ({"image": "no-such-image:1"}, "not_found", "environment_not_found"),
        ({"image": IMAGE + "x"}, "not_found", "environment_not_found"),
        ({"workspace": "no-such:1"}, "not_found", "environment_not_found"),
        ({"toolkits": ["no-such:1"]}, "not_found", "environment_not_found"),
        ({"image": "debian-python@sha256:" + "0" * 64}, "not_found", "environment_not_found"),
        ({"image": ""}, "invalid_argument", "invalid_spec"),
        ({"image": "../../etc"}, "invalid_argument", "invalid_name"),
        ({"image": "/etc/passwd"}, "invalid_argument", "invalid_name"),
        ({"image": "a/../b:1"}, "invalid_argument", "invalid_name"),
        ({"workspace": "w:../../x"}, "invalid_argument", "invalid_name"),
        ({"toolkits": ["t@sha256:../../x"]}, "invalid_argument", "invalid_name"),
        ({"limits": {"memoryBytes": str(16 * MIB - 1)}}, "invalid_argument", "invalid_spec"),
        ({"limits": {"memoryBytes": "-1"}}, "invalid_argument", "invalid_spec"),
        ({"limits": {"pids": "1"}}, "invalid_argument", "invalid_spec"),
        ({"limits": {"cpuCores": "NaN"}}, "invalid_argument", "invalid_spec"),
        ({"hostname": "../x"}, "invalid_argument", "invalid_spec"),
        ({"user": "a b"}, "invalid_argument", "invalid_spec"),
        ({"workdir": "relative"}, "invalid_argument", "invalid_spec"),
        ({"env": {"A=B": "c"}}, "invalid_argument", "invalid_env"),
        ({"labels": {"../x": "c"}}, "invalid_argument", "invalid_spec"),
        ({"backend": "microvm"}, "unimplemented", "unknown_backend"),
        ({"networkRules": {"no-such-service": True}}, "not_found", "unknown_network_service"),
        ({"networkRules": {"example.org": True}}, "invalid_argument", "invalid_network_rule"),
        ({"networkRules": {"169.254.169.254:80": True}}, "invalid_argument", "network_rule_forbidden"),
        ({"networkRules": {"10.9.0.1:80": True, "10.0.0.0/8": False}}, "invalid_argument", "network_rules_conflict"),
        ({"limits": {"networkBytesPerSecond": "1"}}, "invalid_argument", "invalid_spec"),
        ({"limits": {"networkConnections": "-1"}}, "invalid_argument", "invalid_spec"),
    ],
)
def test_refused_create(platform, changes, code, why):
    status, answer = platform.call("CreateSandbox", {"spec": spec(labels={"test": "refused"}) | changes})
    assert (answer.get("code"), status >= 400 and reason(answer)) == (code, why), answer
    assert not with_label(platform, "refused")


def test_network_rule_false_is_granted(platform):
    status, answer = platform.call("CreateSandbox", {"spec": spec(networkRules={"pypi": False})})
    assert status == 200, answer
    platform.call("DeleteSandbox", {"id": answer["sandbox"]["id"], "wait": True})


async def test_unknown_user_is_refused_at_create_or_command(platform, args):
    async with platform.client() as client:
        with pytest.raises(DSecError) as e:
            async with await client.run_container(replace(args, init_user="nosuchuser")) as sandbox:
                await sandbox.run_shell("true")
        assert e.value.reason == "user_not_found"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"spec": 1}', b'{"spec": {"image": {}}}', b"\xff\xfe", b'{"nope": 1}', b"[" * 100_000])
def test_malformed_body(platform, body):
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {platform.key()}"}
    connection.request("POST", "/dsec.v1.SandboxService/CreateSandbox", body, headers)
    answer = connection.getresponse()
    assert answer.status == 400
    assert json.loads(answer.read())["code"] == "invalid_argument"
    connection.close()


# ---- clients that vanish

CLIENT = """
import asyncio, sys
from libdsec import DSecClient, DSecContainerRunArgs
import libdsec.sync as blocking

kind, image, label, ttl = sys.argv[1:]
args = DSecContainerRunArgs(container_image=image, memory_limit_mb=64, ttl_running_stop=int(ttl), labels={"test": label})

async def shell():
    async with DSecClient() as client, await client.run_container(args) as sandbox:
        print("go", flush=True)
        await sandbox.run_shell("sleep 300")

async def many():
    async with DSecClient() as client:
        async for sandbox in client.run_containers(args, 20):
            print("go", flush=True)
            sandbox.id

def sync_shell():
    with blocking.DSecClient() as client, client.run_container(args) as sandbox:
        print("go", flush=True)
        sandbox.run_shell("sleep 300")

def sync_many():
    with blocking.DSecClient() as client:
        for sandbox in client.run_containers(args, 20):
            print("go", flush=True)
            sandbox.id

if kind.startswith("sync"):
    {"sync_shell": sync_shell, "sync_many": sync_many}[kind]()
else:
    asyncio.run({"shell": shell, "many": many}[kind]())
print("ended in order", flush=True)
"""


def interrupted(platform: Platform, kind: str, label: str, how: int, ttl: int) -> tuple[int, str]:
    """Runs a client, sends it a signal in the middle; its exit code and the rest of its output."""
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, kind, IMAGE, label, str(ttl)], env=platform.env, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert client.stdout is not None
        first = client.stdout.readline()
        if first != "go\n":
            raise AssertionError(first + client.communicate(timeout=60)[0])
        client.send_signal(how)
        rest, _ = client.communicate(timeout=60)
        return client.returncode, rest
    finally:
        client.kill()
        client.wait()


@pytest.mark.parametrize("kind", ["shell", "many", "sync_shell", "sync_many"])
def test_interrupt_leaves_no_sandbox(platform, kind):
    code, rest = interrupted(platform, kind, f"interrupt-{kind}", signal.SIGINT, 3600)
    assert code != 0, rest
    assert "KeyboardInterrupt" in rest
    assert "ended in order" not in rest
    wait_for("all are gone", lambda: not with_label(platform, f"interrupt-{kind}"))  # long before their time to live


def test_client_killed_in_an_exec(platform):
    interrupted(platform, "shell", "killed-shell", signal.SIGKILL, 10)
    (left,) = listed(platform, labels={"test": "killed-shell"})  # its command runs on: a client may come back
    platform.call("Exec", {"sandboxId": left["id"], "command": {"shell": "kill $(grep -lx sleep /proc/[0-9]*/comm | cut -d/ -f3)"}, "waitSeconds": -1})
    wait_for("it ends when it is idle", lambda: not with_label(platform, "killed-shell"))


def test_client_killed_in_a_create(platform):
    interrupted(platform, "many", "killed-many", signal.SIGKILL, 3)
    wait_for("all end when they are idle", lambda: not with_label(platform, "killed-many"))


def test_connection_broken_in_a_create(platform):
    """Whoever goes away before the answer gets no sandbox."""
    for i in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {platform.key()}"}
        body = json.dumps({"spec": spec(labels={"test": "broken"}), "idempotencyKey": f"broken-{i}"})
        connection.request("POST", "/dsec.v1.SandboxService/CreateSandbox", body, headers)
        connection.close()
    everything = [f"STATE_{s}" for s in ("CREATING", "READY", "STOPPING", "STOPPED", "FAILED")]

    def settled() -> bool:
        states = [s["state"] for s in listed(platform, labels={"test": "broken"}, states=everything)]
        return all(s in ("STATE_STOPPED", "STATE_FAILED") for s in states)

    wait_for("none goes on", settled)


# ---- what libdsec promises, on a real platform


async def none_running(sandbox) -> None:
    """A kill is answered before the command's end is known."""
    async with asyncio.timeout(60):
        while [c for c in await sandbox.list_commands() if c.running]:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", ["one request", "many requests"])
async def test_batch_left_in_the_middle(platform, args, kind):
    """What a loop over run_containers has not got when it is left is gone when the client is."""
    label = f"left-{kind[:3]}"
    one = replace(args, labels={"test": label})
    async with platform.client() as client:
        async for first in client.run_containers(one, 12) if kind == "one request" else client.run_containers([one] * 12):
            async with asyncio.timeout(60):
                while len(with_label(platform, label)) < 12:
                    await asyncio.sleep(0.05)
            break
    assert isinstance(first, Sandbox)
    wait_for("all but one are gone", lambda: with_label(platform, label) == [first.id])
    async with platform.client() as client:
        await (await client.get_sandbox(first.id)).stop()


def test_batch_left_in_the_middle_by_the_synchronous_client(platform, args):
    with SyncClient(platform.url, platform.key()) as client:
        for first in client.run_containers(replace(args, labels={"test": "left-sync"}), 12):
            break
    assert isinstance(first, SyncSandbox)
    wait_for("all but one are gone", lambda: with_label(platform, "left-sync") == [first.id])
    with SyncClient(platform.url, platform.key()) as client:
        client.get_sandbox(first.id).stop()


async def test_more_commands_than_connections(platform, args):
    config = DSecConfig(platform.url, platform.key(), max_connections=4, request_timeout=30, command_poll_seconds=1)
    async with DSecClient(config=config) as client, await client.run_container(args) as sandbox:
        results = await asyncio.gather(*(sandbox.run_shell(f"sleep 2; echo {i}") for i in range(24)))
        assert [r.stdout for r in results] == [f"{i}\n" for i in range(24)]
        assert not [c for c in await sandbox.list_commands() if c.running]


async def test_cancelled_command_is_killed(new_sandbox):
    async with new_sandbox() as s:
        task = asyncio.create_task(s.run_shell("sleep 299 & echo $! >/pid; wait"))
        async with asyncio.timeout(60):
            while not (await s.run_shell("cat /pid")).stdout.strip():
                await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await none_running(s)
        assert not (await s.run_shell("kill -0 $(cat /pid)")).ok


async def test_failed_input_ends_the_command(new_sandbox):
    async def pieces():
        yield b"x"
        raise UnavailableError("mine")

    async with new_sandbox() as s:
        with pytest.raises(UnavailableError, match="mine"):
            await s.exec(["cat"], stdin=pieces())
        await none_running(s)


async def test_input_in_several_writes_and_signals(new_sandbox):
    async with new_sandbox() as s:
        command = await s.start("trap 'echo got' USR1; echo ready; cat; exit 5", stdin_open=True)
        async for piece in command.iter_stdout():
            assert piece == b"ready\n"
            break
        assert await command.write_stdin(b"one ", close=False)
        assert await command.write_stdin(b"two ", close=False)
        assert await command.write_stdin(b"three\n")
        result = await command.wait()
        assert (result.stdout, result.exit_code) == ("ready\none two three\n", 5)
        command = await s.start("trap 'echo got' USR1; echo ready; until [ -e /go ]; do sleep 0.05; done")
        async for piece in command.iter_stdout():
            break
        await command.kill(signal.SIGUSR1)
        async for piece in command.iter_stdout(len("ready\n")):
            break
        await s.write_file("/go", b"")
        assert (await command.wait()).stdout == "ready\ngot\n"


@pytest.mark.parametrize("size", [0, 1, 18 << 10, (64 << 10) + 1, 16 << 20])
async def test_files_come_back_as_they_were(new_sandbox, tmp_path, size):
    data = os.urandom(size)
    local = tmp_path / "local"
    local.write_bytes(data)

    async def pieces():
        for start in range(0, size, 70_000):
            yield data[start : start + 70_000]

    async with new_sandbox() as s:
        for content in (data, local, pieces()):
            await s.write_file("/tmp/a b/ü\n", content, mode=0o750, make_parents=True)
            assert await s.read_file("/tmp/a b/ü\n") == data
        assert await s.read_file("/tmp/a b/ü\n", 1, 10) == data[1:11]
        async with await s.open_read("/tmp/a b/ü\n") as reader:
            assert (reader.info.size, reader.info.mode) == (size, 0o750)
            assert b"".join([p async for p in reader]) == data
        with pytest.raises(IsADirectoryError):  # the caller's own, and not a failure of the connection
            await s.write_file("/tmp/f", tmp_path)


# ---- environments


def make_tar(path: Path, files: dict[str, bytes], special: Callable[[tarfile.TarFile], None] | None = None) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
        if special:
            special(tar)
    return path


async def test_image_without_a_shell(platform, args, tmp_path):
    source = tmp_path / "hello.c"
    source.write_text('#include <stdio.h>\nint main(int c, char **v) { printf("%d %s\\n", c, v[1]); return 9; }\n')
    subprocess.run(["musl-gcc", "-static", "-O1", "-o", tmp_path / "hello", source], check=True)
    tar = make_tar(tmp_path / "t.tar", {"hello": (tmp_path / "hello").read_bytes()})
    platform.dsec("image", "create", "shellless:1", "--from-tar", tar)
    async with platform.client() as client, await client.run_container(replace(args, container_image="shellless:1")) as s:
        r = await s.exec(["/hello", "world"])
        assert (r.stdout, r.exit_code) == ("2 world\n", 9)
        with pytest.raises(DSecError) as e:
            await s.run_shell("echo hi")
        assert e.value.reason == "no_shell", str(e.value)
        await s.write_file("/tmp/x", b"files need no shell")
        assert await s.read_file("/tmp/x") == b"files need no shell"
    platform.dsec("image", "rm", "shellless:1")


async def test_device_nodes_are_dropped(platform, args, tmp_path):
    def nodes(tar: tarfile.TarFile) -> None:
        for name, kind, numbers in (("evil/mem", tarfile.CHRTYPE, (1, 1)), ("evil/disk", tarfile.BLKTYPE, (254, 0)), ("dev/mem", tarfile.CHRTYPE, (1, 1))):
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o666
            info.devmajor, info.devminor = numbers
            tar.addfile(info)

    tar = make_tar(tmp_path / "t.tar", {"evil/file": b"kept"}, nodes)
    platform.dsec("workspace", "create", "devices:1", "--from-tar", tar)
    shown = json.dumps(json.loads(platform.dsec("workspace", "inspect", "devices:1", "--json").stdout))
    for name in ("evil/mem", "evil/disk", "dev/mem"):
        assert name in shown
    async with platform.client() as client, await client.run_container(replace(args, workspace="devices:1")) as s:
        r = await s.run_shell("cat /evil/file; ls /evil; [ -e /dev/mem ] && echo mem; mknod /tmp/m c 1 1 && head -c1 /tmp/m; mknod /tmp/d b 254 0")
        assert r.stdout == "keptfile\n"
        assert r.exit_code != 0
    platform.dsec("workspace", "rm", "devices:1")


async def test_layers_cover_each_other(platform, args, tmp_path):
    three = {"all": "base", "base-workspace": "base", "base-toolkit": "base"}
    for kind, names in (("workspace", ("all", "base-workspace")), ("toolkit", ("all", "base-toolkit"))):
        tar = make_tar(tmp_path / "t.tar", {f"etc/covered/{n}": kind.encode() for n in names})
        platform.dsec(kind, "create", "covers:1", "--from-tar", tar)
    base = tmp_path / "base.tar"
    base.write_bytes((Path(__file__).parents[2] / "build/base.tar").read_bytes())
    with tarfile.open(base, "a") as archive:
        for name, text in three.items():
            info = tarfile.TarInfo(f"./etc/covered/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    platform.dsec("image", "create", "covered:1", "--from-tar", base)
    changes = {"container_image": "covered:1", "workspace": "covers:1", "toolkits": ["covers:1"]}
    async with platform.client() as client, await client.run_container(replace(args, **changes)) as s:
        r = await s.run_shell("cd /etc/covered && for f in all base-workspace base-toolkit; do echo $f $(cat $f); done")
        assert r.stdout == "all toolkit\nbase-workspace workspace\nbase-toolkit toolkit\n"
    async with platform.client() as client, await client.run_container(replace(args, container_image="covered:1")) as s:
        assert (await s.run_shell("cat /etc/covered/*")).stdout == "basebasebase"
    for kind, name in (("image", "covered:1"), ("workspace", "covers:1"), ("toolkit", "covers:1")):
        platform.dsec(kind, "rm", name)


async def test_sandboxes_do_not_see_each_other(new_sandbox):
    async with new_sandbox() as a, new_sandbox() as b:
        await a.run_shell("echo a >/etc/whose; echo a >/tmp/only-a; rm /etc/hostname; sleep 300 &")
        r = await b.run_shell("cat /etc/whose /tmp/only-a; ls /tmp; test -e /etc/debian_version; echo $?; grep -lx sleep /proc/[0-9]*/comm")
        assert r.stdout == "0\n"
        await b.run_shell("echo b >/etc/whose")
        assert await a.read_file("/etc/whose") == b"a\n"
