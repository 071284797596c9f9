"""A real platform of the test's own: `dsec up` with directories, port and config file that nobody else uses."""

from __future__ import annotations

import functools
import http.client
import json
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from libdsec import DSecClient

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("DSEC_BIN", ROOT / "bin"))
IMAGE, WORKSPACE, TOOLKIT = "debian-python:12", "sqlparse:0.6.1", "ripgrep:13"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(what: str, check: Callable[[], object], seconds: float = 60) -> object:
    """Polls until check returns something true, and returns it."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


class Platform:
    def __init__(self, *flags: str, env: dict[str, str] | None = None, pool: str = "8g", alone: bool = True, files: int = 0) -> None:
        """alone: no other platform works on this host meanwhile, so that in CI everything new there is of this one. files: descriptors that
        each of its daemons may have; 0 = as many as this process."""
        word = secrets.token_hex(4)
        self.base = Path(tempfile.mkdtemp(prefix=f"dsec-e2e-{word}-", dir="/var/tmp"))  # a disk: not a tmpfs
        self.data, self.run = self.base / "data", Path(f"/run/dsec-e2e-{word}")
        self.port, self.flags = free_port(), ["--pool-size", pool, "--max-sandboxes", "1000", *flags]
        self.before, self.strict = host_state(), alone and bool(os.environ.get("CI"))
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = self.base / "config.json"
        self.env = {**os.environ, "PYTHONPATH": str(ROOT / "sdk/python/src"), "DSEC_CONFIG": str(self.config), "DSEC_BIN": str(BIN), **(env or {})}
        for name in ("DSEC_URL", "DSEC_API_KEY", "DSEC_CONTEXT"):
            self.env.pop(name, None)
        self.files = files
        self.up: subprocess.Popen[bytes] | None = None
        self.code = ""  # of its edge, once it has run

    # ---- the daemons

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, **env: str) -> None:
        """Starts `dsec up` in the foreground, as a child of ours, and waits until it is ready."""
        command = [BIN / "dsec", "up", "--data-dir", self.data, "--run-dir", self.run, "--listen", f"127.0.0.1:{self.port}"]
        with open(self.base / "log", "ab") as log:
            self.up = subprocess.Popen(
                [*map(str, command), *self.flags],
                env={**self.env, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (self.files, self.files))) if self.files else None,
            )  # fmt: skip
        wait_for("the platform is ready", self._ready, 120)

    def _ready(self) -> bool:
        assert self.up is not None
        if self.up.poll() is not None:
            raise AssertionError(f"dsec up ended with {self.up.returncode}:\n{self.log()[-3000:]}")
        state = self.state()
        return state.get("pid") == self.up.pid

    def state(self) -> dict[str, object]:
        try:
            state = json.loads((self.data / "up.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        self.code = state.get("code") or self.code
        return state

    def names(self) -> tuple[str, ...]:
        """What the names of all that it makes on the host begin with or hold."""
        return (str(self.base), str(self.run), *([f"dsec-{self.code}", f"s{self.code}"] if self.code else []))

    def ids_on_host(self) -> set[str]:
        """Ids of sandboxes that anything on the host is named after: mounts, groups, sockets, directories."""
        found = re.compile(rf"\bs{self.code}[a-z2-7]{{18}}\b")
        return {i for line in host_state(str(self.run), str(self.data / "edge" / "uppers")) for i in found.findall(line)}

    def log(self) -> str:
        return (self.base / "log").read_text(errors="replace")

    def edge_pid(self) -> int | None:
        """The edge's process. None while there is none."""
        up = self.up  # another thread may set it
        for pid in children(up.pid) if up is not None else ():
            try:
                args = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
            if len(args) > 1 and args[1] == b"edge":
                return pid
        return None

    def kill_edge(self) -> None:
        pid = wait_for("an edge runs", self.edge_pid)
        os.kill(pid, signal.SIGKILL)  # type: ignore[arg-type]

    def kill_up(self) -> None:
        assert self.up is not None
        edge = self.edge_pid()
        self.up.kill()
        self.up.wait()
        self.up = None
        if edge is not None:  # it notices that its parent is gone
            wait_for("the edge has ended", lambda: not Path(f"/proc/{edge}/exe").exists() or is_zombie(edge))

    def stop(self) -> None:
        """Ends the platform in order and removes its data. Works also where it was killed. What cannot be ended stays to be seen."""
        try:
            done = self.dsec("down", "--purge", "--data-dir", self.data, "--run-dir", self.run, check=False, timeout=120)
            assert done.returncode == 0, f"{done.stderr}{self.log()[-3000:]}\nit is left in {self.base} and {self.run}"
            if self.up is not None:
                assert self.up.wait(60) == 0, self.log()[-3000:]
        finally:
            if self.up is not None and self.up.poll() is None:
                self.up.kill()
                self.up.wait()
        subprocess.run(["rm", "-rf", "--one-file-system", str(self.base)], check=True)
        self.assert_host_as_before()

    def assert_host_as_before(self) -> None:
        """Nothing of the platform is left: in CI nothing new at all, elsewhere nothing that bears its names. Any host has services that come
        and go with processes and control groups: of these only those that bear our names count."""
        names = self.names()
        left: set[str] = set()

        def counts(line: str) -> bool:
            if line.startswith("process "):
                return bool(re.match(r"process \d+ (aether|dsec|stage)\b", line)) and self.strict
            if line.startswith("cgroup ") and "/dsec-" not in line:
                return False
            return self.strict or any(name in line for name in names)

        def clean() -> bool:
            nonlocal left
            left = {line for line in host_state() - self.before if counts(line)}
            return not left

        try:
            wait_for("the host is as before", clean)
        except AssertionError as e:
            raise AssertionError(f"{e}:\n" + "\n".join(sorted(left))) from None

    # ---- clients

    def dsec(self, *args: object, check: bool = True, timeout: float = 120, text: bool = True, **more: object) -> subprocess.CompletedProcess:
        if "input" not in more:
            more.setdefault("stdin", subprocess.DEVNULL)
        command = [str(BIN / "dsec"), *map(str, args)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=text, timeout=timeout, **more)  # type: ignore[call-overload]
        if check:
            assert done.returncode == 0, f"dsec {args}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def key(self) -> str:
        return json.loads(self.config.read_text())["contexts"]["local"]["api_key"]

    def client(self) -> DSecClient:
        return DSecClient(self.url, self.key())

    def call(self, method: str, request: Mapping[str, object], *, timeout: float = 120) -> tuple[int, dict]:
        """One raw request to the public API: the status and the answer's JSON. For what the SDK hides or mends."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key()}"}
            connection.request("POST", f"/dsec.v1.SandboxService/{method}", json.dumps(request), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def make_environments(self) -> None:
        subprocess.run([ROOT / "scripts/demo-envs.sh"], env=self.env, check=True, stdin=subprocess.DEVNULL, timeout=300)

    # ---- the host

    def cgroup(self, sandbox_id: str, part: str = "aether") -> Path:
        """The v2 group of a sandbox's part."""
        code = sandbox_id[1:6]
        for root in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
            path = Path(root) / f"dsec-{code}" / sandbox_id / part
            if path.exists():
                return path
        raise AssertionError(f"{sandbox_id} has no control group")

    def aether_pid(self, sandbox_id: str) -> int:
        return int((self.cgroup(sandbox_id) / "cgroup.procs").read_text().split()[0])


def children(pid: int) -> list[int]:
    """Children of all threads of a process; none if it has ended."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def is_zombie(pid: int) -> bool:
    try:
        return re.search(r"^State:\s+[ZX]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is not None
    except (FileNotFoundError, ProcessLookupError):
        return True


def host_state(*dirs: str) -> set[str]:
    """What is on the host, one line a thing, with the files below dirs."""
    out = subprocess.run([str(hoststate_program()), *dirs], capture_output=True, text=True, check=True).stdout
    return {line for line in out.splitlines() if "hoststate" not in line}


@functools.cache
def hoststate_program() -> Path:
    program = ROOT / "build" / "hoststate"
    subprocess.run(["go", "build", "-o", str(program), "./test/hoststate"], cwd=ROOT, check=True, env={**os.environ, "CGO_ENABLED": "0"})
    return program
