"""The sandboxes of the platform in miniature: commands are local processes, files are below a local directory."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from urllib.parse import unquote_to_bytes

from fakehttp import Answer, ApiError, Request, not_found

KEEP = 512 << 10  # bytes of output kept at each end


def stamp(t: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(t)) + f".{int(t % 1 * 1e9):09d}Z"


@dataclass
class Process:
    id: str
    command: dict[str, Any]
    proc: asyncio.subprocess.Process | None = None
    output: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    started: float = field(default_factory=time.time)
    ended: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    timed_out: bool = False
    no_output: bool = False
    killed: bool = False
    stdin_offset: int = 0
    stdin_broken: bool = False
    starts: int = 0

    def kill(self) -> None:
        if self.proc is not None and self.proc.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.proc.pid, signal.SIGKILL)

    async def spawn(self, argv: list[str], root: str) -> None:
        command = self.command
        data = base64.b64decode(command["stdin"]) if "stdin" in command else None
        piped = data is not None or command.get("stdinFollows") or "terminal" in command
        try:
            self.proc = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=command.get("cwd") or root,
                env={**os.environ, **command.get("env", {})},
                start_new_session=True,
            )
        except FileNotFoundError:
            self.done.set()
            raise ApiError(404, "not_found", f"there is no program {argv[0]!r}", "program_not_found") from None
        self.starts += 1
        if self.killed:
            self.kill()
        if data is not None:
            assert self.proc.stdin is not None
            self.proc.stdin.write(data)
            self.proc.stdin.close()

    async def watch(self) -> None:
        """Take what it writes until its end, which comes with its time-out at the latest."""
        silence = self.command.get("noOutputTimeoutSeconds", 0)
        self.no_output = bool(silence)  # the fake's commands that are given one say nothing
        timeout = silence or self.command.get("timeoutSeconds", 0)
        assert self.proc is not None

        async def drain(stream: asyncio.StreamReader, name: str) -> None:
            while data := await stream.read(65536):
                self.output[name] += data

        def expire() -> None:
            self.timed_out = True
            self.kill()

        timer = asyncio.get_running_loop().call_later(timeout, expire) if timeout else None
        assert self.proc.stdout is not None
        assert self.proc.stderr is not None
        await asyncio.gather(drain(self.proc.stdout, "stdout"), drain(self.proc.stderr, "stderr"))
        await self.proc.wait()
        if timer is not None:
            timer.cancel()
        self.ended = time.time()
        self.done.set()

    async def wait(self, seconds: float) -> dict[str, Any]:
        if seconds:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.done.wait(), None if seconds < 0 else seconds)
        result: dict[str, Any] = {"commandId": self.id, "startedAt": stamp(self.started)}
        result |= {"tag": self.command.get("tag", ""), "terminal": "terminal" in self.command}
        result["stdinSize"] = str(self.stdin_offset)
        for name in ("stdout", "stderr"):
            data = bytes(self.output[name])
            if data:
                dropped = len(data) > 2 * KEEP
                result[name] = {
                    "data": base64.b64encode(data[:65536]).decode(),
                    "size": str(len(data)),
                    "headSize": str(KEEP if dropped else len(data)),
                    **({"tailSize": str(KEEP)} if dropped else {}),
                }
        if not self.done.is_set():
            return {"result": {**result, "running": True}}
        code = self.proc.returncode if self.proc is not None else 127
        assert code is not None
        result["endedAt"] = stamp(self.ended)
        if code < 0:
            result |= {"signal": -code, "signalName": signal.Signals(-code).name}
        if code:
            result["exitCode"] = 128 - code if code < 0 else code
        for flag in ("timed_out", "killed", "stdin_broken", "no_output"):
            if getattr(self, flag) and (flag != "no_output" or self.timed_out):
                head, _, tail = flag.partition("_")
                result[head + tail.title()] = True
        return {"result": result}

    async def get_output(self, request: Request, name: str, out: Answer) -> None:
        offset = int(request.query["offset"])
        data = self.output[name]
        if "tail" in request.query:
            offset = max(offset, len(data) - int(request.query["tail"]))
        if not request.query.get("follow"):
            dropped = len(data) > 2 * KEEP
            if dropped and KEEP <= offset < len(data) - KEEP:
                raise ApiError(404, "not_found", "that part of the output was dropped", "output_dropped")
            end = KEEP if dropped and offset < KEEP else len(data)
            return await out.send(200, bytes(data[offset:end]), "application/octet-stream", {"Dsec-Offset": str(offset)})
        done = {"Dsec-Final": "1"} if self.done.is_set() else {}
        await out.begin(200, "application/octet-stream", None, {"Dsec-Offset": str(offset), **done})
        quiet = time.monotonic() + float(request.query["wait"])
        while True:
            finished = self.done.is_set()
            if len(data) > offset:
                await out.write(bytes(data[offset:]))
                offset = len(data)
                quiet = time.monotonic() + float(request.query["wait"])
            if finished or time.monotonic() > quiet:
                return await out.end({"Dsec-Final": "1"} if finished and not done else {})
            await asyncio.sleep(0.01)

    async def put_stdin(self, request: Request, out: Answer) -> None:
        position = int(request.query["offset"])
        assert self.proc is not None
        stdin = self.proc.stdin
        assert stdin is not None
        async for piece in request.pieces():
            fresh = piece[max(0, self.stdin_offset - position) :]
            position += len(piece)
            if self.done.is_set() or stdin.transport.is_closing():
                self.stdin_broken = True
                continue
            stdin.write(fresh)
            try:
                await stdin.drain()
            except ConnectionError:
                self.stdin_broken = True
            self.stdin_offset = max(self.stdin_offset, position)
        if self.stdin_broken:
            raise ApiError(400, "failed_precondition", "the command no longer reads", "stdin_closed")
        if request.query.get("close"):
            stdin.close()
        await out.send(200, json.dumps({"offset": str(self.stdin_offset)}).encode())


@dataclass
class Box:
    id: str
    spec: dict[str, Any]
    key: str
    state: str = "STATE_READY"
    commands: dict[str, Process] = field(default_factory=dict)
    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "state": self.state,
            "generation": "1",
            "spec": self.spec,
            "project": "default",
            "node": "n1",
            "createdAt": "2026-01-02T03:04:05.123456789Z",
            "stepSeconds": {"rootfs": 0.001},
            **({"reason": {"code": "deleted", "message": "by request"}} if self.state == "STATE_STOPPED" else {}),
        }


def _path(root: str, request: Request) -> bytes:
    raw = next(p for p in request.raw_query.split("&") if p.startswith("path="))
    return os.fsencode(root) + b"/files" + unquote_to_bytes(raw[5:])


async def get_file(root: str, request: Request, out: Answer) -> None:
    try:
        with open(_path(root, request), "rb") as f:
            info = os.fstat(f.fileno())
            f.seek(int(request.query.get("offset", 0)))
            data = f.read(int(request.query.get("length", -1)))
    except FileNotFoundError:
        raise not_found("file") from None
    headers = {
        "Dsec-Mode": f"{info.st_mode & 0o7777:04o}",
        "Dsec-Mtime": stamp(info.st_mtime_ns / 1e9),
        "Dsec-Uid": str(info.st_uid),
        "Dsec-Gid": str(info.st_gid),
        "Dsec-Size": str(info.st_size),
    }
    await out.send(200, data, "application/octet-stream", headers)


async def put_file(root: str, request: Request, out: Answer) -> None:
    path = _path(root, request)
    digest = sha256()
    if request.query.get("parents"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    if request.query.get("exclusive") and os.path.exists(path):
        raise ApiError(409, "already_exists", "the file exists", "file_exists")
    try:
        with open(path + b".tmp", "wb") as f:
            async for piece in request.pieces():
                digest.update(piece)
                f.write(piece)
    except FileNotFoundError:
        raise not_found("directory") from None
    if request.headers.get("dsec-sha256", digest.hexdigest()) != digest.hexdigest():
        raise ApiError(400, "data_loss", "the content differs from its digest", "digest_mismatch")
    os.chmod(path + b".tmp", int(request.query.get("mode", "0644"), 8))
    os.rename(path + b".tmp", path)
    answer = {"size": os.path.getsize(path), "sha256": digest.hexdigest()}
    await out.send(200, json.dumps(answer).encode())
