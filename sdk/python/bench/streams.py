"""Reads a command's standard output in one process with libdsec; prints MB/s.

Usage: streams.py SANDBOX BYTES COMMAND...
"""

from __future__ import annotations

import asyncio
import sys
import time

import libdsec


async def main(sandbox_id: str, size: int, argv: list[str]) -> None:
    """Start the command, follow it, count."""
    async with libdsec.DSecClient() as client:
        sandbox = await client.get_sandbox(sandbox_id)
        command = await sandbox.start(argv)
        begin = time.perf_counter()
        have = 0
        async for piece in command.iter_stdout():
            have += len(piece)
        took = time.perf_counter() - begin
    if have != size:
        raise SystemExit(f"{have} bytes of {size}")
    print(size / 1e6 / took)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
