#!/usr/bin/env python3
"""How long a command of a session takes through libdsec, and the same script by run_shell in turn.

Usage: sessions.py --image NAME [--rounds N] [--commands N] [--script TEXT]

Where the platform is comes from the environment. Prints a line of JSON for each round: ``{"session": [ms…], "shell": [ms…]}``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from libdsec import CommandResult, DSecClient, DSecContainerRunArgs


async def measure(run: Callable[[str], Awaitable[CommandResult]], script: str, count: int) -> list[float]:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        result = await run(script)
        took.append((time.perf_counter() - began) * 1e3)
        if result.exit_code != 0:
            raise RuntimeError(repr(result))
    return took


async def main(options: argparse.Namespace) -> None:
    args = DSecContainerRunArgs(options.image, memory_limit_mb=512)
    async with DSecClient() as client, await client.run_container(args) as sandbox, await sandbox.session("bench") as session:
        for _ in range(options.rounds):
            round_ = {
                "session": await measure(session.run, options.script, options.commands),
                "shell": await measure(sandbox.run_shell, options.script, options.commands),
            }
            print(json.dumps(round_), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--image", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commands", type=int, default=200)
    parser.add_argument("--script", default="echo hello")
    asyncio.run(main(parser.parse_args()))
