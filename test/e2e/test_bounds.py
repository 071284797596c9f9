"""One caller cannot take all: what a project has under way is bounded, and daemons without descriptors say so and go on."""

from __future__ import annotations

import http.client
import json
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from platform_under_test import IMAGE, Platform, wait_for

from libdsec.sync import DSecClient, DSecContainerRunArgs, Sandbox

STREAMS, CALLS, FILES = 24, 12, 600
CONNECTIONS = (FILES - FILES // 4) // 2  # what the apiserver makes of it


@pytest.fixture(scope="module")
def small() -> Iterator[Platform]:
    """A platform with little of everything."""
    with Platform("--project-streams", str(STREAMS), "--project-calls", str(CALLS), files=FILES) as p:
        p.start()
        p.make_environments()
        yield p


@pytest.fixture
def box(small: Platform) -> Iterator[Sandbox]:
    with (
        DSecClient(small.url, small.key()) as client,
        client.run_container(DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=256)) as s,
    ):
        assert s.run_shell("echo there").stdout == "there\n"
        yield s


class Answer:
    """An answer whose head has come; its connection is kept until close()."""

    def __init__(self, p: Platform, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", p.port, timeout=60)
        self.connection.request(method, path, body, {"Authorization": f"Bearer {p.key()}", "Content-Type": kind})
        self.response = self.connection.getresponse()
        self.status = self.response.status

    def close(self) -> None:
        self.response.close()
        self.connection.close()

    def body(self) -> bytes:
        try:
            return self.response.read()
        finally:
            self.close()

    def refusal(self) -> str:
        """The reason of a refusal that is one in every way."""
        body = self.body()
        if self.status == 200 and body[:1] == b"\2":  # the end of a Connect stream
            error = json.loads(body[5:])["error"]
        else:
            assert self.status == 429, (self.status, body)
            error = json.loads(body)
        assert error["code"] == "resource_exhausted", error
        assert "try again" in error["message"], error
        return error["details"][0]["debug"]["reason"]


def envelope(message: object) -> bytes:
    data = json.dumps(message).encode()
    return b"\0" + len(data).to_bytes(4, "big") + data


def rpc(p: Platform, method: str, message: object) -> Answer:
    return Answer(p, "POST", f"/dsec.v1.SandboxService/{method}", json.dumps(message).encode())


def follow(p: Platform, box: Sandbox, command: str) -> Answer:
    return Answer(p, "GET", f"/v1/sandboxes/{box.id}/commands/{command}/stdout?follow=1")


def start(p: Platform, box: Sandbox, shell: str) -> str:
    name = secrets.token_hex(4)
    answer = rpc(p, "Exec", {"sandboxId": box.id, "commandId": name, "command": {"shell": shell}})
    assert answer.status == 200, answer.body()
    answer.close()
    return name


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_streams_of_one_project(small: Platform, box: Sandbox) -> None:
    """One too many is refused, of whatever kind; calls go on; libdsec waits for a place."""
    command = start(small, box, "exec sleep 1000")
    with ExitStack() as open_ones:
        for _ in range(STREAMS):
            a = follow(small, box, command)
            open_ones.callback(a.close)
            assert a.status == 200
        here = f"/v1/sandboxes/{box.id}"
        for method, path, body, kind in (
            ("GET", f"{here}/commands/{command}/stdout?follow=1", b"", ""),
            ("GET", f"{here}/files?path=/etc/passwd", b"", ""),
            ("PUT", f"{here}/files?path=/tmp/x", b"x" * (1 << 20), ""),
            ("GET", f"{here}/ports/80/http/", b"", ""),
            ("POST", "/dsec.v1.SandboxService/WatchSandboxes", envelope({}), "application/connect+json"),
            ("POST", "/dsec.v1.SandboxService/WatchMetrics", envelope({"sandboxId": box.id}), "application/connect+json"),
        ):
            a = Answer(small, method, path, body, kind)
            assert a.response.headers["Retry-After"] == "1", path
            assert a.refusal() == "too_many_requests", path
        assert box.run_shell("echo on").stdout == "on\n"
        out = small.dsec("ps", "-q").stdout
        assert box.id in out

        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(box.read_file("/etc/hostname")))
        reader.start()  # it is refused until one of the others ends
    reader.join(60)
    assert got and got[0]
    wait_for("places are free", lambda: Answer(small, "GET", f"{here}/files?path=/etc/passwd").body().startswith(b"root:"))


def test_calls_of_one_project(small: Platform, box: Sandbox) -> None:
    """Those that wait take the places of the others, and not of those that end something."""
    names = [secrets.token_hex(4) for _ in range(CALLS)]
    statuses: list[int] = []

    def run(name: str) -> None:
        while True:
            a = rpc(small, "Exec", {"sandboxId": box.id, "commandId": name, "command": {"shell": "exec sleep 1000"}, "waitSeconds": 300})
            a.body()
            if a.status != 429:  # else one that looks whether it is full had the last place
                break
        statuses.append(a.status)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for t in threads:
        t.start()

    def full() -> bool:
        a = rpc(small, "ListSandboxes", {})
        if a.status == 200:
            a.close()
            return False
        return a.refusal() == "too_many_requests"

    wait_for("all places are taken", full)
    for name in names:
        a = rpc(small, "KillCommand", {"sandboxId": box.id, "commandId": name, "signal": 9})
        assert a.status in (200, 404), a.body()  # one that has not begun yet
        a.close()
        if a.status == 404:
            wait_for("it has begun", lambda n=name: rpc(small, "KillCommand", {"sandboxId": box.id, "commandId": n, "signal": 9}).status == 200)  # type: ignore[misc]
    for t in threads:
        t.join(60)
    assert statuses == [200] * CALLS


def test_idle_connections_of_anybody(small: Platform, box: Sandbox) -> None:
    """Who has no key and only connects cannot keep others out for longer than it stays, and they are told."""
    kept = http.client.HTTPConnection("127.0.0.1", small.port, timeout=60)
    kept.request("GET", "/healthz")
    assert kept.getresponse().read() == b"ok\n"
    with ExitStack() as idle:
        for _ in range(CONNECTIONS + 20):
            idle.enter_context(socket.create_connection(("127.0.0.1", small.port)))
        a = wait_for("it is full", lambda: (lambda a: a if a.status == 429 else a.close())(Answer(small, "GET", "/healthz")))
        assert isinstance(a, Answer)
        assert a.refusal() == "too_many_requests"
        kept.request("GET", "/healthz")
        assert kept.getresponse().read() == b"ok\n"
    kept.close()
    wait_for("there is room again", lambda: Answer(small, "GET", "/healthz").body() == b"ok\n")
    assert box.run_shell("echo on").stdout == "on\n"


@contextmanager
def descriptors(pid: int, most: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("spare", [0, 2, 5])
@pytest.mark.parametrize("who", ["edge", "apiserver"])
def test_descriptors_run_out(small: Platform, box: Sandbox, who: str, spare: int) -> None:
    """Every answer is right or a typed error, lists are never short, nothing spins, no sandbox is lost, and it is over when there are
    descriptors again."""
    edge = small.edge_pid()
    assert edge is not None and small.up is not None
    pid = edge if who == "edge" else small.up.pid
    command = start(small, box, "exec sleep 1000")
    names = sorted(f.path for f in box.list_files("/usr/bin"))

    def fine(a: Answer) -> bytes | None:
        """The body of what went well; None for a typed error."""
        code, body = a.status, a.body()
        error = json.loads(body[5:]).get("error") if body[:1] == b"\2" else json.loads(body) if code != 200 else None
        if error is None:
            return body
        reason = error["details"][0]["debug"]["reason"]
        assert error["code"] in ("resource_exhausted", "unavailable", "failed_precondition") and reason, error
        return None

    def everything() -> int:
        failed = 0
        for a in (
            lambda: rpc(small, "ListSandboxes", {}),
            lambda: rpc(small, "Exec", {"sandboxId": box.id, "commandId": secrets.token_hex(4), "command": {"shell": "echo on"}, "waitSeconds": 30}),
            lambda: Answer(small, "GET", f"/v1/sandboxes/{box.id}/files?path=/etc/passwd"),
            lambda: Answer(small, "PUT", f"/v1/sandboxes/{box.id}/files?path=/tmp/x", b"x" * 100_000),
            lambda: rpc(small, "CreateSandbox", {"spec": {"image": IMAGE, "labels": {"test": "short"}}, "timeoutSeconds": "60"}),
            lambda: Answer(small, "POST", "/dsec.v1.SandboxService/ListFiles", envelope({"sandboxId": box.id, "path": "/usr/bin"}), "application/connect+json"),
        ):
            body = fine(a())
            failed += body is None
            if body is not None and body[:1] == b"{" and b'"sandboxes"' in body:
                assert box.id in {s["id"] for s in json.loads(body)["sandboxes"]}
        return failed

    with ExitStack() as open_ones, descriptors(pid, open_files(pid) + spare):
        for _ in range(8):  # each takes a connection at both
            a = follow(small, box, command)
            if a.status == 200:
                open_ones.callback(a.close)
            else:
                assert fine(a) is None
        failed = sum(everything() for _ in range(4))
        before, began = cpu_seconds(pid), time.monotonic()
        waiting = [socket.create_connection(("127.0.0.1", small.port)) for _ in range(3)]
        time.sleep(1)
        spent, took = cpu_seconds(pid) - before, time.monotonic() - began
        for w in waiting:
            w.close()
        assert spent < took / 2, f"it spins: {spent:.2f} s of CPU in {took:.2f} s"
    assert failed > 0 or spare > 0
    wait_for("all is well again", lambda: everything() == 0)
    assert (small.edge_pid(), small.up.poll()) == (edge, None)
    assert sorted(f.path for f in box.list_files("/usr/bin")) == names
    assert box.run_shell("echo on").stdout == "on\n"
    for s in small.call("ListSandboxes", {"labels": {"test": "short"}})[1].get("sandboxes", []):
        small.call("DeleteSandbox", {"id": s["id"], "wait": True})
