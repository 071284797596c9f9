#!/usr/bin/env python3
"""How many commands a second one Python process runs on a real platform.

Usage: execs.py --image NAME [--sandboxes N] [--in-flight N] [--seconds S] [--rounds N] [--program PATH]... [--upload FILE]
                [--paced]

Where the platform is comes from the environment, as always. Prints JSON, one object a line: ``{"begin": PROGRAM}`` and then
what a round with that program found, so that whoever reads along can look at the rest of the machine meanwhile. With --paced
each round waits for a line of input after its begin, so that something else can be measured in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Sandbox

UPLOADED = "/opt/uploaded"
WARM_UP = 1.0  # seconds: connections are made, caches filled


async def make(client: DSecClient, args: DSecContainerRunArgs, count: int) -> list[Sandbox]:
    boxes = []
    async for made in client.run_containers(args, count):
        if isinstance(made, DSecError):
            raise made
        boxes.append(made)
    return boxes


async def measure(boxes: list[Sandbox], program: str, seconds: float, in_flight: int) -> dict[str, Any]:
    latencies: list[float] = []
    started = 0
    start, cpu = time.monotonic(), time.process_time()
    end = start + seconds

    async def worker(i: int) -> None:
        nonlocal started
        box = boxes[i % len(boxes)]
        while (began := time.monotonic()) < end:
            started += 1
            result = await box.exec([program])
            if result.exit_code != 0:
                raise RuntimeError(f"{program}: {result!r}")
            if (now := time.monotonic()) < end:
                latencies.append(now - began)

    await asyncio.gather(*(worker(i) for i in range(in_flight)))
    used = time.process_time() - cpu
    latencies.sort()
    count = len(latencies)
    return {
        "program": program,
        "execs": started,  # with those under way at the end: all that took processor time
        "per_second": count / seconds,
        "cpu_us": used / started * 1e6,
        "p50_ms": latencies[count // 2] * 1e3,
        "p99_ms": latencies[count * 99 // 100] * 1e3,
    }


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


async def main(options: argparse.Namespace) -> None:
    args = DSecContainerRunArgs(options.image, memory_limit_mb=512, cpu_cores_limit=1, pids_limit=256)
    programs = options.program or ["/bin/true"]
    async with DSecClient() as client:
        boxes = await make(client, args, options.sandboxes)
        if options.upload:
            content = Path(options.upload).read_bytes()  # noqa: ASYNC240 - before anything runs
            for box in boxes:
                await box.write_file(UPLOADED, content, mode=0o755)
            programs = [*programs, UPLOADED]
        for program in programs:
            await measure(boxes, program, WARM_UP, options.in_flight)
        for _ in range(options.rounds):
            for program in programs:
                say({"begin": program})
                if options.paced and not await asyncio.to_thread(sys.stdin.readline):
                    raise EOFError("whoever paces this has gone")
                say(await measure(boxes, program, options.seconds, options.in_flight))
        await asyncio.gather(*(box.stop() for box in boxes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--image", required=True)
    parser.add_argument("--sandboxes", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--program", action="append", help="in the image; may be repeated; /bin/true if not given")
    parser.add_argument("--paced", action="store_true", help="wait for a line of input before each round")
    parser.add_argument("--upload", help=f"a program to be put into each sandbox as {UPLOADED}, and measured as well")
    asyncio.run(main(parser.parse_args()))
