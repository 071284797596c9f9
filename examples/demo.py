#!/usr/bin/env python3
"""The demo: the published session, then a burst of sandboxes that do what a rollout does.

Each sandbox of the burst is composed from one base, one workspace (a real project with its own tests) and one toolkit. In
it the project's tests run, one file is edited, and they run again. What every sandbox reports is compared with a run on
this host, without any sandbox. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from libdsec import CommandResult, DSecClient, DSecContainerRunArgs, Sandbox

IMAGE = "debian-python:12"
WORKSPACE = "sqlparse:0.6.1"
TOOLKIT = "ripgrep:13"
PROJECT = "workspace/sqlparse"
ARCHIVE = Path(__file__).resolve().parent.parent / "build" / "workspace.tar"

# Edits that an agent could make: file, text, replacement. Each breaks some of the project's tests, and each other ones.
EDITS = [
    ("sqlparse/keywords.py", "'SELECT': tokens.Keyword.DML", "'SELECT': tokens.Keyword"),
    ("sqlparse/sql.py", "def get_alias(self):", "def get_alias(self):\n        return None\n\n    def get_alias_before(self):"),
    ("sqlparse/engine/statement_splitter.py", "return 1", "return 0"),
    ("sqlparse/filters/others.py", "stmt.tokens", "stmt.tokens[:0]"),
]
# Without the tests that measure seconds: a burst keeps the machine busy, and this compares results.
PYTEST = "python3 -m pytest -q -p no:cacheprovider -rfE --tb=no --ignore tests/test_dos_prevention.py tests"


@dataclass(frozen=True)
class Outcome:
    """What a test run says, without its times: exit code, counts, and which tests failed."""

    exit_code: int
    summary: str
    failed: tuple[str, ...]


def outcome(exit_code: int, output: str) -> Outcome:
    lines = output.strip().splitlines()
    summary = re.sub(r" in [0-9.]+s.*", "", lines[-1]).strip("= ") if lines else ""
    failed = sorted(line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR ")))
    return Outcome(exit_code, summary, tuple(failed))


def brief(result: CommandResult) -> str:
    """A result for an error message: a command may have written megabytes."""
    ends = ", ".join(f"{name} {text[-300:]!r}" for name, text in (("stdout", result.stdout), ("stderr", result.stderr)) if text)
    return f"exit code {result.exit_code}, {ends or 'no output'}"


def edited(text: str, edit: tuple[str, str, str]) -> str:
    path, old, new = edit
    if old not in text:
        raise SystemExit(f"demo: {path} no longer holds {old!r}")
    return text.replace(old, new)


def local_runs() -> tuple[Outcome, list[Outcome]]:
    """The same on this host with the same Python and pytest: before the edit, and after each of the edits."""

    def run(root: Path) -> Outcome:
        done = subprocess.run(
            ["sh", "-c", PYTEST], cwd=root, env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return outcome(done.returncode, done.stdout)

    with tempfile.TemporaryDirectory() as tmp:
        with tarfile.open(ARCHIVE) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(tmp, filter="data")
            else:  # Debian 12's own Python; the archive is of our own making
                tar.extractall(tmp)
        root = Path(tmp) / PROJECT
        before, after = run(root), []
        for edit in EDITS:
            file = root / edit[0]
            original = file.read_text()
            file.write_text(edited(original, edit))
            after.append(run(root))
            file.write_text(original)
        return before, after


class Clock:
    """Latencies by name, in seconds."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self.samples.setdefault(name, []).append(seconds)

    def report(self) -> None:
        print(f"  {'step':<28}{'count':>6}{'p50':>10}{'p90':>10}{'max':>10}")
        for name, values in self.samples.items():
            v = sorted(values)
            cells = "".join(f"{1000 * x:>8.1f}ms" for x in (v[len(v) // 2], v[len(v) * 9 // 10], v[-1]))
            print(f"  {name:<28}{len(v):>6}{cells}")


async def published_session() -> None:
    """The session that was published for DSec, with an image name of ours."""
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(
        container_image=IMAGE,
        memory_limit_mb=4096, cpu_cores_limit=4,
        ttl_running_stop=300,  # idle timeout
        network_rules={"npm": False, "pypi": True},
        init_user="root",
    )  # fmt: skip
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    network = await reached(sandbox)
    await sandbox.stop()
    if result.stdout != "hello world\n" or result.exit_code != 0:
        raise SystemExit(f"demo: the published session did not print hello world: {brief(result)}")
    print(f"  {sandbox.id}: {result.stdout.strip()!r}, exit code {result.exit_code}")
    print(f"  of the network: {network}")
    await client.close()


REACH = """
import socket, ssl, sys
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # whether it answers; the image has no certificates
for host in sys.argv[1:]:
    try:
        with socket.create_connection((host, 443), 10) as s, context.wrap_socket(s, server_hostname=host):
            print(host, "answers")
    except OSError as e:
        print(host, "does not answer:", getattr(e, "strerror", None) or e)
"""


async def reached(sandbox: Sandbox) -> str:
    """What the rules come to on this machine. One without a way to the internet has the sandbox all the same, without packages."""
    said = (await sandbox.exec(["python3", "-c", REACH, "pypi.org", "registry.npmjs.org"], timeout=60)).stdout.splitlines()
    if len(said) != 2 or said[1].endswith(" answers"):
        raise SystemExit(f"demo: npm is denied, and yet: {said}")
    errors = [f"{rule.rule}: {rule.error}" for rule in (await sandbox.network()).rules if rule.allowed and rule.error]
    return "; ".join([*said, *errors])


async def rollout(sandbox: Sandbox, index: int, clock: Clock, turns: asyncio.Semaphore) -> tuple[Outcome, Outcome]:
    """What one sandbox of the burst does. The heavy part waits for its turn."""

    async def timed(name, awaitable):
        start = time.perf_counter()
        value = await awaitable
        clock.add(name, time.perf_counter() - start)
        return value

    edit = EDITS[index % len(EDITS)]
    tool = await timed("first command (rg, toolkit)", sandbox.exec(["rg", "--count", "def ", f"/{PROJECT}/sqlparse/sql.py"]))
    if tool.exit_code != 0 or not re.fullmatch(r"[1-9][0-9]+\n", tool.stdout):  # ten or more
        raise SystemExit(f"demo: the toolkit's rg said {brief(tool)}")
    shell = f"cd /{PROJECT} && {PYTEST} 2>&1"
    async with turns:
        first = await timed("tests", sandbox.run_shell(shell, timeout=600))
    text = (await timed("read file", sandbox.read_file(f"/{PROJECT}/{edit[0]}"))).decode()
    await timed("write file", sandbox.write_file(f"/{PROJECT}/{edit[0]}", edited(text, edit)))
    async with turns:
        second = await timed("tests after the edit", sandbox.run_shell(shell, timeout=600))
    await timed("stop", sandbox.stop())
    return outcome(first.exit_code, first.stdout), outcome(second.exit_code, second.stdout)


def print_difference(when: str, local: Outcome, there: Outcome) -> None:
    if there == local:
        return
    print(f"    {when}: exit code {there.exit_code} instead of {local.exit_code}, {there.summary!r} instead of {local.summary!r}")
    for test in sorted(set(local.failed) ^ set(there.failed)):
        print(f"      {'only here' if test in local.failed else 'only in the sandbox'}: {test}")


async def burst(count: int, at_once: int, before: Outcome, after: list[Outcome]) -> int:
    """Returns how many sandboxes differ from the local run."""
    clock, turns, wrong, done = Clock(), asyncio.Semaphore(at_once), 0, 0
    args = DSecContainerRunArgs(
        container_image=IMAGE, workspace=WORKSPACE, toolkits=[TOOLKIT], memory_limit_mb=1024, cpu_cores_limit=1,
        ttl_running_stop=1800, network_rules={"npm": False, "pypi": False}, labels={"job": "demo"},
    )  # fmt: skip
    async with DSecClient() as client:
        start = time.perf_counter()
        tasks: dict[asyncio.Task[tuple[Outcome, Outcome]], int] = {}
        try:
            async for created in client.run_containers(args, count, timeout=600):
                if isinstance(created, Exception):
                    raise SystemExit(f"demo: a sandbox was not created: {created}")
                clock.add("created (since the request)", time.perf_counter() - start)
                tasks[asyncio.create_task(rollout(created, len(tasks), clock, turns))] = len(tasks)
            print(f"  {count} sandboxes ready after {time.perf_counter() - start:.2f} s; running the project's tests in each, twice, {at_once} at a time")
            waiting = set(tasks)
            while waiting:
                finished, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    i, done = tasks[task], done + 1
                    first, second = task.result()
                    if first != before or second != after[i % len(EDITS)]:
                        wrong += 1
                        print(f"\n  sandbox {i} differs from the local run")
                        print_difference("before the edit", before, first)
                        print_difference("after the edit", after[i % len(EDITS)], second)
                if sys.stdout.isatty():
                    print(f"\r  {done}/{count} done, {time.perf_counter() - start:.0f} s", end="", flush=True)
        finally:  # where one has failed, the others end before the client does
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        seconds = time.perf_counter() - start
        print(f"{chr(13) if sys.stdout.isatty() else ''}  {done}/{count} done in {seconds:.1f} s, {2 * done / seconds:.2f} test runs/s; {wrong} differ from the local run")
        left = [s async for s in client.list_sandboxes(labels={"job": "demo"})]
        if left:
            raise SystemExit(f"demo: {len(left)} sandboxes are still there")
    clock.report()
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="sandboxes in the burst (default 50; 0: only the published session)")
    at_once = 2 * (os.cpu_count() or 1)
    parser.add_argument("--at-once", type=int, default=at_once, help="test runs at a time, of all the sandboxes (default: 2 for each CPU)")
    options = parser.parse_args()
    count = options.count
    print("the published session")
    asyncio.run(published_session())
    if count == 0:
        return
    print("the same tests on this host, without a sandbox")
    start = time.perf_counter()
    before, after = local_runs()
    print(f"  {before.summary}; after the edits: {'; '.join(o.summary for o in after)} ({time.perf_counter() - start:.1f} s for {1 + len(after)} runs)")
    if before.exit_code != 0 or any(o == before for o in after):
        raise SystemExit("demo: the local run is not what the demo expects")
    print(f"a burst of {count}: {IMAGE} < {WORKSPACE} < {TOOLKIT}")
    if asyncio.run(burst(count, options.at_once, before, after)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
