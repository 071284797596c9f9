"""A platform in miniature: speaks the public contract over real sockets, runs commands as real local processes.

It runs on an event loop in a thread of its own, so that it serves asynchronous and synchronous clients alike. Faults are
scripted: ``platform.fault(path, Fault(...))`` applies to the next requests whose path begins so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import fakenetworks
import fakeviews
from fakebox import Box, Process, get_file, put_file
from fakehttp import Answer, ApiError, Fault, Request, gone, not_found

KEY = "dsec_" + "ab" * 32


class Platform:
    """The fake. ``calls`` counts requests by path; ``boxes`` are its sandboxes."""

    def __init__(self, root: str, key: str = KEY) -> None:
        self.key = key
        self.services: fakenetworks.Services = {}
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
            left = asyncio.ensure_future(gone(request.reader))
            await asyncio.wait({call, left}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():  # the client went away: creates are undone, everything else goes on
                if method == "CreateSandbox":
                    call.cancel()
                self._tasks.add(call)
                call.add_done_callback(self._forget)
                raise ConnectionResetError
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            return await out.send(200, json.dumps(call.result()).encode())
        parts = request.path.split("/")
        box = self._box(parts[3])
        if parts[4] == "files":
            await (get_file if request.method == "GET" else put_file)(self.root, request, out)
        elif request.method == "GET":
            await self._command(box, parts[5]).get_output(request, parts[6], out)
        else:
            await self._command(box, parts[5]).put_stdin(request, out)
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

    async def rpc_SetNetwork(self, m: dict[str, Any]) -> dict[str, Any]:
        box = self._box(m["sandboxId"])
        box.spec = {**box.spec, "networkRules": m["networkRules"]}
        return {"sandbox": box.message()}

    async def rpc_GetNetwork(self, m: dict[str, Any]) -> dict[str, Any]:
        return {"network": fakenetworks.status(self._box(m["sandboxId"]).spec)}

    async def rpc_PutService(self, m: dict[str, Any]) -> dict[str, Any]:
        return fakenetworks.put(self.services, m)

    async def rpc_GetService(self, m: dict[str, Any]) -> dict[str, Any]:
        return {"service": fakenetworks.find(self.services, m["name"])}

    async def rpc_ListServices(self, m: dict[str, Any]) -> dict[str, Any]:
        return fakenetworks.page(self.services, m)

    async def rpc_RemoveService(self, m: dict[str, Any]) -> dict[str, Any]:
        fakenetworks.find(self.services, m["name"])
        del self.services[m["name"]]
        return {}

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
            await process.spawn(argv, self.root)
            task = asyncio.ensure_future(process.watch())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await process.wait(m.get("waitSeconds", 0))

    async def rpc_GetCommand(self, m: dict[str, Any]) -> dict[str, Any]:
        return await self._command(self._box(m["sandboxId"]), m["commandId"]).wait(m.get("waitSeconds", 0))

    async def rpc_ListCommands(self, m: dict[str, Any]) -> dict[str, Any]:
        commands = [
            p
            for p in reversed(self._box(m["sandboxId"]).commands.values())
            if m.get("tag", "") in ("", p.command.get("tag")) and not (m.get("running") and p.done.is_set())
        ]
        return {"commands": [{**(await p.wait(0))["result"], "description": "…"} for p in commands]}

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
