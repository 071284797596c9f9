"""A platform in miniature: speaks the public contract over real sockets, runs commands as real local processes.

It runs on an event loop in a thread of its own, so that it serves asynchronous and synchronous clients alike. Faults are
scripted: ``platform.fault(path, Fault(...))`` applies to the next requests whose path begins so.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qs, unquote_to_bytes, urlsplit

import fakeviews

KEY = "dsec_" + "ab" * 32
KEEP = 512 << 10  # bytes of output kept at each end


@dataclass
class Fault:
    """What happens to a request instead of, or around, its proper answer.

    Attributes:
        raw: bytes sent in place of the answer.
        cut_at: the connection is reset after this many bytes of the answer.
        before: the connection is closed before the request is carried out.
        until: before the answer it is waited for this.
        delay: seconds before the answer.
        piece: the answer is written in pieces of this many bytes.
        pause: seconds between pieces.
        prefix: bytes before the answer, for example an interim one.
        chunked: the answer's body is sent in chunks of this many bytes.
        status, error: a Connect error in place of the answer.
        early: answer before the request's body is read, then close.
        mute: does not say that it will close.
        times: how many requests it applies to.
        skip: how many matching requests pass before.
    """

    raw: bytes | None = None
    cut_at: int | None = None
    before: bool = False
    until: Callable[[], bool] = lambda: True
    delay: float = 0.0
    piece: int = 0
    pause: float = 0.0
    prefix: bytes = b""
    chunked: int = 0
    status: int = 0
    error: dict[str, Any] | None = None
    early: bool = False
    mute: bool = False
    times: int = 1
    skip: int = 0


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    reader: asyncio.StreamReader
    raw_query: str
    consumed: bool = False

    async def pieces(self) -> Any:
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int((await self.reader.readline()).split(b";")[0], 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        else:
            left = int(self.headers.get("content-length", "0"))
            while left:
                data = await self.reader.read(min(left, 65536))
                if not data:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(data)
                yield data
        self.consumed = True

    async def body(self) -> bytes:
        return b"".join([p async for p in self.pieces()])


class ApiError(Exception):
    def __init__(self, status: int, code: str, message: str, reason: str, **facts: str) -> None:
        self.status = status
        self.body = {
            "code": code,
            "message": message,
            "details": [
                {"type": "google.rpc.Other", "value": ""},
                {"type": "dsec.v1.ErrorInfo", "value": "", "debug": {"reason": reason, "facts": facts, "sandboxId": "sfake"}},
            ],
        }


def not_found(what: str) -> ApiError:
    return ApiError(404, "not_found", f"there is no such {what}; list them", f"{what}_not_found")


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


def stamp(t: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(t)) + f".{int(t % 1 * 1e9):09d}Z"


class Platform:
    """The fake. ``calls`` counts requests by path; ``boxes`` are its sandboxes."""

    def __init__(self, root: str, key: str = KEY) -> None:
        self.key = key
        self.boxes: dict[str, Box] = {}
        self.calls: Counter[str] = Counter()
        self.connections = 0
        self.open_connections = 0
        self.tombs: set[str] = set()
        self.hold_creates: Callable[[], bool] = lambda: False
        self.create_delay: Callable[[str], float] = lambda key: 0.0
        self.create_error: Callable[[str], ApiError | None] = lambda key: None
        self.requests: list[Request] = []
        self.watches: list[dict[str, Any]] = []
        self.page_size = 3
        self.root = root
        self.url = ""
        self.unix_path = os.path.join(self.root, "api.sock")
        self._faults: list[tuple[str, Fault]] = []
        self._tasks: set[asyncio.Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._ready = threading.Event()

    # Control, from the test's thread.

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def fault(self, path: str, fault: Fault) -> None:
        self._faults.append((path, fault))

    def live(self) -> list[Box]:
        return [b for b in list(self.boxes.values()) if b.state == "STATE_READY"]

    def running(self) -> list[Process]:
        return [p for b in list(self.boxes.values()) for p in list(b.commands.values()) if not p.done.is_set()]

    def drop_connections(self) -> None:
        """Close every connection, as a server does that restarts."""
        done = threading.Event()

        def drop() -> None:
            for task in self._tasks:
                task.cancel()
            done.set()

        self._loop.call_soon_threadsafe(drop)
        assert done.wait(5)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024, limit=1 << 20)
        unix = await asyncio.start_unix_server(self._connection, self.unix_path, limit=1 << 20)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        unix.close()
        for box in self.boxes.values():
            for process in box.commands.values():
                process.kill()
        for process in self.running():
            await process.done.wait()
        while self._tasks:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # from 3.13 on gather does not let callbacks run if all are done

    # One connection.

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open_connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self.open_connections -= 1
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        raw = await reader.readuntil(b"\r\n\r\n")
        lines = raw.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
        parts = urlsplit(target)
        query = {k: v[0] for k, v in parse_qs(parts.query).items()}
        request = Request(method, parts.path, query, headers, reader, parts.query)
        self.calls[parts.path.rsplit("/", 1)[-1] if parts.path.startswith("/dsec") else f"{method} {parts.path}"] += 1
        self.requests.append(request)
        fault = self._take_fault(parts.path) or Fault()
        if fault.before:
            return False
        out = Answer(writer, fault)
        if fault.early:
            await out.error(ApiError(507, "resource_exhausted", "the disk is full", "quota_exceeded"), close=not fault.mute)
            writer.write_eof()  # as servers do that take care that the answer is heard: see RFC 9112, 9.6
            while await reader.read(1 << 20):
                pass
            return False
        while not fault.until():
            await asyncio.sleep(0.01)
        if fault.delay:
            await asyncio.sleep(fault.delay)
        try:
            if fault.raw is not None:
                await request.body()
                writer.write(fault.raw)
                await writer.drain()
                return False
            if fault.status:
                await request.body()
                await out.send(fault.status, json.dumps(fault.error).encode())
                return True
            if headers.get("authorization") != f"Bearer {self.key}":
                await request.body()
                raise ApiError(401, "unauthenticated", "the API key is not known; create one", "unknown_key")
            await self._route(request, out)
        except ApiError as e:
            if not request.consumed:
                await request.body()
            await out.error(e)
        return out.cut_left is None

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def _take_fault(self, path: str) -> Fault | None:
        for i, (prefix, fault) in enumerate(self._faults):
            if prefix in path:
                if fault.skip:
                    fault.skip -= 1
                    return None
                fault.times -= 1
                if fault.times <= 0:
                    del self._faults[i]
                return fault
        return None

    async def _route(self, request: Request, out: Answer) -> None:
        if request.path.startswith("/dsec.v1."):
            method = request.path.rsplit("/", 1)[1]
            handler: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]] | None = getattr(self, f"rpc_{method}", None)
            raw = await request.body()
            if method == "CreateSandboxes":
                assert request.headers["content-type"] == "application/connect+json"
                assert len(raw) == 5 + int.from_bytes(raw[1:5], "big")
                return await self._create_many(json.loads(raw[5:]), out)
            if method in ("WatchMetrics", "WatchSandboxes"):
                message = json.loads(raw[5:])
                self.watches.append(message)
                watch = fakeviews.watch_metrics if method == "WatchMetrics" else fakeviews.watch_sandboxes
                return await watch(self, message, out)
            assert request.headers["content-type"] == "application/json"
            if handler is None:
                raise ApiError(404, "unimplemented", "no such procedure", "no_procedure")
            call = asyncio.ensure_future(handler(json.loads(raw)))
            gone = asyncio.ensure_future(_gone(request.reader))
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():  # the client went away: creates are undone, everything else goes on
                if method == "CreateSandbox":
                    call.cancel()
                self._tasks.add(call)
                call.add_done_callback(self._forget)
                raise ConnectionResetError
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            return await out.send(200, json.dumps(call.result()).encode())
        parts = request.path.split("/")
        box = self._box(parts[3])
        if parts[4] == "files":
            await (self._get_file if request.method == "GET" else self._put_file)(request, box, out)
        elif request.method == "GET":
            await self._get_output(request, self._command(box, parts[5]), parts[6], out)
        else:
            await self._put_stdin(request, self._command(box, parts[5]), out)
        return None

    def _box(self, sandbox_id: str) -> Box:
        box = self.boxes.get(sandbox_id)
        if box is None:
            raise not_found("sandbox")
        if box.state != "STATE_READY":
            raise ApiError(400, "failed_precondition", "the sandbox has ended: deleted", "sandbox_ended")
        return box

    def _command(self, box: Box, command_id: str) -> Process:
        if command_id not in box.commands:
            raise not_found("command")
        return box.commands[command_id]

    # Messages.

    async def rpc_GetInfo(self, _: dict[str, Any]) -> dict[str, Any]:
        node = {"id": "n1", "healthy": True, "memoryBytes": "1073741824", "cpus": 2, "backends": ["container"]}
        return {"version": "0.1", "principal": "tester", "project": "default", "nodes": [node]}

    async def rpc_CreateSandbox(self, m: dict[str, Any]) -> dict[str, Any]:
        return {"sandbox": (await self._create(m["spec"], m.get("idempotencyKey", ""))).message()}

    async def _create(self, spec: dict[str, Any], key: str) -> Box:
        if key in self.tombs:
            raise ApiError(408, "canceled", "the create was cancelled", "create_canceled")
        for box in self.boxes.values():
            if key and box.key == key:
                if box.state == "STATE_STOPPED":
                    raise ApiError(408, "canceled", "the create was cancelled", "create_canceled")
                return box
        if spec["image"].startswith("missing"):
            raise ApiError(
                404, "not_found", "there is no such image; see `dsec image ls`", "environment_not_found", image="missing"
            )
        box = Box(f"sfake{len(self.boxes):019d}", spec, key, state="STATE_CREATING")
        self.boxes[box.id] = box
        try:
            while self.hold_creates():
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.create_delay(key))
            error = self.create_error(key)
            if error is not None:
                raise error
            if box.state != "STATE_CREATING":
                raise ApiError(408, "canceled", "the create was cancelled", "create_canceled")
        except BaseException:
            box.state = "STATE_STOPPED"
            raise
        box.state = "STATE_READY"
        return box

    async def _create_many(self, m: dict[str, Any], out: Answer) -> None:
        await out.begin(200, "application/connect+json", None)

        async def one(i: int) -> dict[str, Any]:
            try:
                return {"index": i, "sandbox": (await self._create(m["spec"], f"{m['idempotencyKey']}/{i}")).message()}
            except ApiError as e:
                info = e.body["details"][1]["debug"]  # type: ignore[index]
                return {"index": i, "failure": {"code": e.body["code"], "message": e.body["message"], "info": info}}

        tasks = [asyncio.ensure_future(one(i)) for i in range(m["count"])]
        try:
            for done in asyncio.as_completed(tasks):
                payload = json.dumps(await done).encode()
                await out.write(b"\0" + len(payload).to_bytes(4, "big") + payload)
            await out.write(b"\2\0\0\0\2{}")
            await out.end()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def rpc_GetMetrics(self, m: dict[str, Any]) -> dict[str, Any]:
        return fakeviews.metrics(self._box(m["sandboxId"]), 0)

    async def rpc_ListProcesses(self, m: dict[str, Any]) -> dict[str, Any]:
        return {"processes": fakeviews.processes(self, self._box(m["sandboxId"]))}

    async def rpc_SignalProcess(self, m: dict[str, Any]) -> dict[str, Any]:
        if not fakeviews.signal(self, m):
            raise not_found("process")
        return {}

    async def rpc_GetSandbox(self, m: dict[str, Any]) -> dict[str, Any]:
        if m["id"] not in self.boxes:
            raise not_found("sandbox")
        return {"sandbox": self.boxes[m["id"]].message()}

    async def rpc_ListSandboxes(self, m: dict[str, Any]) -> dict[str, Any]:
        wanted = m.get("states") or ["STATE_CREATING", "STATE_READY", "STATE_STOPPING"]
        labels = m.get("labels", {}).items()
        found = [b for b in self.boxes.values() if b.state in wanted and labels <= b.spec.get("labels", {}).items()]
        start = int(m.get("pageToken") or 0)
        end = start + self.page_size
        return {
            "sandboxes": [b.message() for b in found[start:end]],
            **({"nextPageToken": str(end)} if end < len(found) else {}),
        }

    async def rpc_DeleteSandbox(self, m: dict[str, Any]) -> dict[str, Any]:
        boxes = [b for b in self.boxes.values() if b.id == m.get("id") or (b.key and b.key == m.get("idempotencyKey"))]
        if not boxes and m.get("idempotencyKey"):
            self.tombs.add(m["idempotencyKey"])  # it may overtake its create
            return {}
        if not boxes:
            raise not_found("sandbox")
        for process in boxes[0].commands.values():
            process.kill()
        boxes[0].state = "STATE_STOPPED"
        return {"sandbox": boxes[0].message()}

    async def rpc_Exec(self, m: dict[str, Any]) -> dict[str, Any]:
        box = self._box(m["sandboxId"])
        process = box.commands.get(m["commandId"])
        if process is None:
            command = m["command"]
            if command.get("session", "") not in {"", *box.sessions}:
                raise not_found("session")
            argv = command.get("argv") or (["bash", "-c", command["shell"]] if "shell" in command else ["sh"])
            process = box.commands[m["commandId"]] = Process(m["commandId"], command)
            await self._spawn(process, argv, command)
        return await self._wait(process, m.get("waitSeconds", 0))

    async def _spawn(self, process: Process, argv: list[str], command: dict[str, Any]) -> None:
        data = base64.b64decode(command["stdin"]) if "stdin" in command else None
        piped = data is not None or command.get("stdinFollows") or "terminal" in command
        try:
            process.proc = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=command.get("cwd") or self.root,
                env={**os.environ, **command.get("env", {})},
                start_new_session=True,
            )
        except FileNotFoundError:
            process.done.set()
            raise ApiError(404, "not_found", f"there is no program {argv[0]!r}", "program_not_found") from None
        process.starts += 1
        if process.killed:
            process.kill()
        if data is not None:
            assert process.proc.stdin is not None
            process.proc.stdin.write(data)
            process.proc.stdin.close()
        silence = command.get("noOutputTimeoutSeconds", 0)
        process.no_output = bool(silence)  # the fake's commands that are given one say nothing
        task = asyncio.ensure_future(self._watch(process, silence or command.get("timeoutSeconds", 0)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, process: Process, timeout: float) -> None:
        assert process.proc is not None

        async def drain(stream: asyncio.StreamReader, name: str) -> None:
            while data := await stream.read(65536):
                process.output[name] += data

        def expire() -> None:
            process.timed_out = True
            process.kill()

        timer = asyncio.get_running_loop().call_later(timeout, expire) if timeout else None
        assert process.proc.stdout is not None
        assert process.proc.stderr is not None
        await asyncio.gather(drain(process.proc.stdout, "stdout"), drain(process.proc.stderr, "stderr"))
        await process.proc.wait()
        if timer is not None:
            timer.cancel()
        process.ended = time.time()
        process.done.set()

    async def _wait(self, process: Process, seconds: float) -> dict[str, Any]:
        if seconds:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.done.wait(), None if seconds < 0 else seconds)
        result: dict[str, Any] = {"commandId": process.id, "startedAt": stamp(process.started)}
        result |= {"tag": process.command.get("tag", ""), "terminal": "terminal" in process.command}
        result["stdinSize"] = str(process.stdin_offset)
        for name in ("stdout", "stderr"):
            data = bytes(process.output[name])
            if data:
                dropped = len(data) > 2 * KEEP
                result[name] = {
                    "data": base64.b64encode(data[:65536]).decode(),
                    "size": str(len(data)),
                    "headSize": str(KEEP if dropped else len(data)),
                    **({"tailSize": str(KEEP)} if dropped else {}),
                }
        if not process.done.is_set():
            return {"result": {**result, "running": True}}
        code = process.proc.returncode if process.proc is not None else 127
        assert code is not None
        result["endedAt"] = stamp(process.ended)
        if code < 0:
            result |= {"signal": -code, "signalName": signal.Signals(-code).name}
        if code:
            result["exitCode"] = 128 - code if code < 0 else code
        for flag in ("timed_out", "killed", "stdin_broken", "no_output"):
            if getattr(process, flag) and (flag != "no_output" or process.timed_out):
                head, _, tail = flag.partition("_")
                result[head + tail.title()] = True
        return {"result": result}

    async def rpc_GetCommand(self, m: dict[str, Any]) -> dict[str, Any]:
        return await self._wait(self._command(self._box(m["sandboxId"]), m["commandId"]), m.get("waitSeconds", 0))

    async def rpc_ListCommands(self, m: dict[str, Any]) -> dict[str, Any]:
        commands = [
            p
            for p in reversed(self._box(m["sandboxId"]).commands.values())
            if m.get("tag", "") in ("", p.command.get("tag")) and not (m.get("running") and p.done.is_set())
        ]
        return {"commands": [{**(await self._wait(p, 0))["result"], "description": "…"} for p in commands]}

    async def rpc_CreateSession(self, m: dict[str, Any]) -> dict[str, Any]:
        box = self._box(m["sandboxId"])
        session = box.sessions.setdefault(m["name"], {"name": m["name"], "shell": "bash", "asked": m})
        return {"session": session}

    async def rpc_ListSessions(self, m: dict[str, Any]) -> dict[str, Any]:
        return {"sessions": list(self._box(m["sandboxId"]).sessions.values())}

    async def rpc_DeleteSession(self, m: dict[str, Any]) -> dict[str, Any]:
        if self._box(m["sandboxId"]).sessions.pop(m["name"], None) is None:
            raise not_found("session")
        return {}

    async def rpc_ResizeTerminal(self, m: dict[str, Any]) -> dict[str, Any]:
        process = self._command(self._box(m["sandboxId"]), m["commandId"])
        process.command["terminal"] |= {"rows": m["rows"], "cols": m["cols"]}
        return {}

    async def rpc_KillCommand(self, m: dict[str, Any]) -> dict[str, Any]:
        process = self._command(self._box(m["sandboxId"]), m["commandId"])
        if m.get("signal") and process.proc is not None:
            os.killpg(process.proc.pid, m["signal"])
        elif not process.done.is_set():
            process.killed = True
            process.kill()
            await process.done.wait()
        return {}

    # Bytes.

    async def _get_output(self, request: Request, process: Process, name: str, out: Answer) -> None:
        offset = int(request.query["offset"])
        data = process.output[name]
        if "tail" in request.query:
            offset = max(offset, len(data) - int(request.query["tail"]))
        if not request.query.get("follow"):
            dropped = len(data) > 2 * KEEP
            if dropped and KEEP <= offset < len(data) - KEEP:
                raise ApiError(404, "not_found", "that part of the output was dropped", "output_dropped")
            end = KEEP if dropped and offset < KEEP else len(data)
            return await out.send(200, bytes(data[offset:end]), "application/octet-stream", {"Dsec-Offset": str(offset)})
        done = {"Dsec-Final": "1"} if process.done.is_set() else {}
        await out.begin(200, "application/octet-stream", None, {"Dsec-Offset": str(offset), **done})
        quiet = time.monotonic() + float(request.query["wait"])
        while True:
            finished = process.done.is_set()
            if len(data) > offset:
                await out.write(bytes(data[offset:]))
                offset = len(data)
                quiet = time.monotonic() + float(request.query["wait"])
            if finished or time.monotonic() > quiet:
                return await out.end({"Dsec-Final": "1"} if finished and not done else {})
            await asyncio.sleep(0.01)

    async def _put_stdin(self, request: Request, process: Process, out: Answer) -> None:
        position = int(request.query["offset"])
        assert process.proc is not None
        stdin = process.proc.stdin
        assert stdin is not None
        async for piece in request.pieces():
            fresh = piece[max(0, process.stdin_offset - position) :]
            position += len(piece)
            if process.done.is_set() or stdin.transport.is_closing():
                process.stdin_broken = True
                continue
            stdin.write(fresh)
            try:
                await stdin.drain()
            except ConnectionError:
                process.stdin_broken = True
            process.stdin_offset = max(process.stdin_offset, position)
        if process.stdin_broken:
            raise ApiError(400, "failed_precondition", "the command no longer reads", "stdin_closed")
        if request.query.get("close"):
            stdin.close()
        await out.send(200, json.dumps({"offset": str(process.stdin_offset)}).encode())

    def _path(self, request: Request) -> bytes:
        raw = next(p for p in request.raw_query.split("&") if p.startswith("path="))
        return os.fsencode(self.root) + b"/files" + unquote_to_bytes(raw[5:])

    async def _get_file(self, request: Request, box: Box, out: Answer) -> None:
        try:
            with open(self._path(request), "rb") as f:
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

    async def _put_file(self, request: Request, box: Box, out: Answer) -> None:
        path = self._path(request)
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


async def _gone(reader: asyncio.StreamReader) -> None:
    """Return when the client has closed the connection; clients here never pipeline."""
    while not reader.at_eof():
        waiter = getattr(reader, "_wait_for_data")  # noqa: B009
        await waiter("_gone")


class Answer:
    """Writes one answer, with the faults that were asked for."""

    def __init__(self, writer: asyncio.StreamWriter, fault: Fault) -> None:
        self._writer = writer
        self._fault = fault
        self._chunked = False
        self.cut_left = fault.cut_at

    @property
    def gone(self) -> bool:
        """Whether the connection has been closed by anybody."""
        return self._writer.is_closing()

    async def error(self, e: ApiError, *, close: bool = False) -> None:
        await self.send(e.status, json.dumps(e.body).encode(), headers={"Connection": "close"} if close else None)

    async def send(
        self, status: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        await self.begin(status, kind, None if self._fault.chunked else len(body), headers)
        step = self._fault.chunked or len(body) or 1
        for start in range(0, len(body), step):
            await self.write(body[start : start + step])
        await self.end()

    async def begin(self, status: int, kind: str, length: int | None, headers: dict[str, str] | None = None) -> None:
        self._chunked = length is None
        lines = [f"HTTP/1.1 {status} Some Reason", f"Content-Type: {kind}", "Date: Thu, 01 Jan 2026 00:00:00 GMT"]
        lines.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
        lines += [f"{k}: {v}" for k, v in (headers or {}).items()]
        await self._raw(self._fault.prefix + "\r\n".join(lines).encode() + b"\r\n\r\n")

    async def write(self, data: bytes) -> None:
        await self._raw(b"%x;ext=1\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def end(self, trailer: dict[str, str] | None = None) -> None:
        if self._chunked:
            lines = [f"{k}: {v}\r\n" for k, v in (trailer or {"Trailer": "x"}).items()]
            await self._raw(b"0\r\n" + "".join(lines).encode() + b"\r\n")

    async def _raw(self, data: bytes) -> None:
        if self.cut_left is not None:
            data = data[: self.cut_left]
            self.cut_left -= len(data)
        step = self._fault.piece or len(data) or 1
        for start in range(0, len(data), step):
            self._writer.write(data[start : start + step])
            await self._writer.drain()
            if self._fault.piece:
                await asyncio.sleep(self._fault.pause)
        if self.cut_left == 0:
            raise ConnectionResetError


@contextlib.contextmanager
def platform() -> Iterator[Platform]:
    """A running fake."""
    # Not below pytest's tmp_path: the path of a Unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="libdsec-test-", ignore_cleanup_errors=True) as root:
        os.mkdir(os.path.join(root, "files"))
        fake = Platform(root)
        fake.start()
        try:
            yield fake
        finally:
            fake.stop()
