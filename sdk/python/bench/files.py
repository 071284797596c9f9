#!/usr/bin/env python3
"""Write many files of a KiB in one call: prints the seconds that it took.

Usage: files.py SANDBOX COUNT DIRECTORY
"""

from __future__ import annotations

import sys
import time

from libdsec.sync import DSecClient


def main(sandbox_id: str, count: int, directory: str) -> None:
    """Measure one call, with its connection."""
    files = {f"{directory}/{i % 100}/{i}": bytes(1024) for i in range(count)}
    with DSecClient() as client:
        sandbox = client.get_sandbox(sandbox_id)
        start = time.perf_counter()
        done = sandbox.write_files(files)
        took = time.perf_counter() - start
    if done.entries != count:
        raise SystemExit(f"{done.entries} files of {count}")
    print(took)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
