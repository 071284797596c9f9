"""Watching many sandboxes and their commands over one connection."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime, timedelta, timezone
from typing import Any, Union

from .. import _aio as net
from .._args import invalid, string_map
from .._errors import DSecError
from .._models import CommandResult, Message, SandboxInfo, command_result, sub, text
from .._retry import Backoff
from .._views import CommandEndedEvent, EdgeLost, SandboxEvent, Synced, WatchEvent
from .api import Api
from .command import Command

MAX_IDS = 100_000
SILENCE = 60.0  # the platform says every 15 s that all is well
OVERLAP = 10.0  # seconds of ends that are asked for again after a connection broke: what was on its way
SKEW = 600.0  # by how much this machine's clock may be wrong
REMEMBERED = 120.0  # seconds for which an end is known as one that was told

Completed = tuple[Command, Union[CommandResult, DSecError]]
"""What ``as_completed`` yields: a command, and its result or why there is none."""


class Watch:
    """Yields what happens to sandboxes, and to their commands, as it happens. Made by ``DSecClient.watch``.

    An async context manager and an async iterator. A connection that breaks is made anew; UnavailableError comes only after
    ``retry_seconds`` without any answer. Of a sandbox that changes faster than events are taken only the last state is told; no
    end of a command is left out, and none told twice.
    """

    def __init__(self, api: Api, request: dict[str, Any], since: datetime | None) -> None:
        self._api = api
        self._request = request
        self._since = since
        self._last: datetime | None = None  # the latest end that was told
        self._told: dict[tuple[str, str], datetime] = {}
        self._events = self._run()

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> WatchEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        """End the watch."""
        await self._events.aclose()

    async def _run(self) -> AsyncGenerator[WatchEvent, None]:
        backoff = Backoff(self._api.config.retry_seconds, None, net.monotonic)
        begun = datetime.fromtimestamp(time.time() - SKEW, timezone.utc)
        connected = False
        while True:
            request = dict(self._request)
            since = self._since
            if connected:
                since = self._last - timedelta(seconds=OVERLAP) if self._last else since or begun
            if since is not None and request["commands"]:
                request["commandsSince"] = since.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
            try:
                stream = self._api.server_stream("WatchSandboxes", request, wait=SILENCE, stall=SILENCE)
                async with aclosing(stream) as messages:
                    async for message in messages:
                        connected = True
                        backoff.progress()
                        event = self._event(message)
                        if event is not None:
                            yield event
            except DSecError as e:
                pause = backoff.delay(e)
            else:
                pause = 0.1  # it ends for no reason that we know; that is no answer either
            await net.sleep(pause)

    def _event(self, m: Message) -> WatchEvent | None:
        """Return what a message says; None for nothing new."""
        if m.get("sandbox"):
            return SandboxEvent(SandboxInfo.from_wire(sub(m, "sandbox")))
        if m.get("command"):
            event = sub(m, "command")
            return self._ended(text(event, "sandboxId"), command_result(sub(event, "result"))[0])
        if m.get("synced"):
            return Synced()
        if m.get("edgeLost"):
            return EdgeLost(text(sub(m, "edgeLost"), "node"))
        return None

    def _ended(self, sandbox_id: str, result: CommandResult) -> CommandEndedEvent | None:
        key = (sandbox_id, result.command_id)
        if key in self._told:
            return None
        at = result.ended_at
        if at is not None:
            self._told[key] = at
            if self._last is None or at > self._last:
                self._last = at
            self._forget(self._last - timedelta(seconds=REMEMBERED))
        return CommandEndedEvent(sandbox_id, result)

    def _forget(self, before: datetime) -> None:
        """Drop what can no longer come twice. It is in the order of its coming, which is nearly that of the ends."""
        while self._told:
            key = next(iter(self._told))
            if self._told[key] >= before:
                return
            del self._told[key]


def watch_request(labels: Mapping[str, str] | None, ids: Iterable[str] | None, *, commands: bool) -> dict[str, Any]:
    """Return dsec.v1.WatchSandboxesRequest."""
    string_map("labels", labels or {})
    wanted = list(ids) if ids is not None else []
    if ids is not None and (isinstance(ids, str) or not all(isinstance(i, str) for i in wanted)):
        raise invalid("ids must be a sequence of ids of sandboxes")
    if ids is not None and not wanted:
        raise invalid("ids holds no id; None stands for all sandboxes of the project")
    if len(wanted) > MAX_IDS:
        raise invalid(f"{len(wanted)} ids; at most {MAX_IDS}: watch by labels, or the whole project", "too_many_ids")
    return {"labels": dict(labels or {}), "ids": wanted, "commands": commands}


async def as_completed(api: Api, commands: Iterable[Command], *, output: bool) -> AsyncGenerator[Completed, None]:
    """Yield commands of any number of sandboxes as they end. See ``DSecClient.as_completed``."""
    pending = {(c.sandbox_id, c.id): c for c in commands}
    if not pending:
        return
    request = watch_request(None, sorted({sandbox for sandbox, _ in pending}), commands=True)
    since = datetime.fromtimestamp(min(c.known_since for c in pending.values()), timezone.utc)
    seen: set[str] = set()  # sandboxes that the platform has told of since the last Synced
    async with Watch(api, request, since) as events:
        async for event in events:
            due: list[tuple[str, str]] = []
            if isinstance(event, CommandEndedEvent):
                key = (event.sandbox_id, event.result.command_id)
                command = pending.pop(key, None)
                if command is not None:
                    yield command, await _result(command) if output else event.result
            elif isinstance(event, SandboxEvent):
                seen.add(event.info.id)
                if event.info.state.terminal:
                    due = [key for key in pending if key[0] == event.info.id]
            elif isinstance(event, Synced):
                # Ends that the platform remembers have come before. What is left runs, or is not known there any more.
                due = [key for key in pending if key[0] not in seen]
                seen.clear()
            for key in due:
                command = pending.pop(key)
                yield command, await _result(command)
            if not pending:
                return


async def _result(command: Command) -> CommandResult | DSecError:
    try:
        return await command.wait()
    except DSecError as e:
        return e
