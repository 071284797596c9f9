"""The part of the platform in miniature that is looked at: metrics, processes, and events of many sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fake import Platform
    from fakebox import Box
    from fakehttp import Answer

TICKS = "7"


async def _send(out: Answer, message: dict[str, Any]) -> None:
    payload = json.dumps(message).encode()
    await out.write(b"\0" + len(payload).to_bytes(4, "big") + payload)


def metrics(box: Box, n: int) -> dict[str, Any]:
    figures = {"cpuSeconds": 1.5 + n, "memoryBytes": str(1 << 33), "pids": "3", "oomKills": "1", "cpuLimitCores": 2}
    return {"metrics": {"sandboxId": box.id, "at": "2026-01-01T00:00:00Z", **figures, "unavailable": ["memory_peak_bytes"]}}


async def watch_metrics(platform: Platform, m: dict[str, Any], out: Answer) -> None:
    box = platform._box(m["sandboxId"])
    await out.begin(200, "application/connect+json", None)
    n = 0
    while box.state == "STATE_READY":
        await _send(out, metrics(box, n))
        n += 1
        if out.gone:
            raise ConnectionResetError
        await asyncio.sleep(m["intervalSeconds"])
    error = {
        "code": "failed_precondition",
        "message": "it has ended",
        "details": [{"type": "dsec.v1.ErrorInfo", "debug": {"reason": "sandbox_ended"}}],
    }
    payload = json.dumps({"error": error}).encode()
    await out.write(b"\2" + len(payload).to_bytes(4, "big") + payload)
    await out.end()


def processes(platform: Platform, box: Box) -> list[dict[str, Any]]:
    running = [p for p in box.commands.values() if p.proc is not None and not p.done.is_set()]
    found = [
        {"pid": p.proc.pid, "name": "sh", "argv": ["sh", "-c"], "state": "S", "startedTicks": TICKS, "commandId": p.id}
        for p in running
        if p.proc
    ]
    return sorted(found, key=lambda p: p["pid"])


def signal(platform: Platform, m: dict[str, Any]) -> bool:
    """Whether there is such a process."""
    ticks = str(m.get("startedTicks", "0"))
    if all(p["pid"] != m["pid"] for p in processes(platform, platform._box(m["sandboxId"]))) or ticks not in ("0", TICKS):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(m["pid"], m.get("signal") or 15)
    return True


async def watch_sandboxes(platform: Platform, m: dict[str, Any], out: Answer) -> None:
    """Sends what there is, ``synced``, and then every change, each end of a command once."""
    await out.begin(200, "application/connect+json", None)
    labels, ids = m.get("labels", {}).items(), m.get("ids", [])
    since = m.get("commandsSince")
    after = datetime.fromisoformat(since.replace("Z", "+00:00")).timestamp() if since else None
    states: dict[str, str] = {}
    told: set[tuple[str, str]] = set()
    synced = False
    while True:
        for box in list(platform.boxes.values()):
            if not labels <= box.spec.get("labels", {}).items() or (ids and box.id not in ids):
                continue
            if states.get(box.id) != box.state:
                states[box.id] = box.state
                await _send(out, {"sandbox": box.message()})
            for process in list(box.commands.values()) if m.get("commands") else ():
                key = (box.id, process.id)
                if key in told or not process.done.is_set():
                    continue
                told.add(key)
                if synced or (after is not None and process.ended >= after):
                    result = (await process.wait(0))["result"]
                    await _send(out, {"command": {"sandboxId": box.id, "result": result}})
        if not synced:
            synced = True
            await _send(out, {"synced": True})
            await _send(out, {"alive": True})
        if out.gone:
            raise ConnectionResetError
        await asyncio.sleep(0.01)
