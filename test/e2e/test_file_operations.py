"""Files of a sandbox through the SDK: list, stat, change, watch, append; and what goes wrong."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from platform_under_test import Platform, wait_for

from libdsec import (
    AlreadyExistsError,
    DSecContainerRunArgs,
    DSecError,
    FailedPreconditionError,
    FileChange,
    FileEntry,
    FileEventKind,
    FileType,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    Sandbox,
    UnavailableError,
)

New = Callable[..., AbstractAsyncContextManager[Sandbox]]

NAMES = ["a b", "new\nline", "ünï", "日本語", "-rf *", "quote'\"\\", "n" * 255, "%2e%2e", "?q=1&x#y", "bad\udcff\udcfe"]


async def out(sandbox: Sandbox, script: str) -> str:
    return (await sandbox.run_shell(script, check=True)).stdout.strip()


async def listing(sandbox: Sandbox, path: str, depth: int = 1, user: str | None = None) -> dict[str, FileEntry]:
    entries = [e async for e in sandbox.list_files(path, depth=depth, user=user)]
    assert len({e.path for e in entries}) == len(entries)
    return {e.path: e for e in entries}


async def test_names_and_types(new_sandbox: New) -> None:
    async with new_sandbox() as s:
        await s.make_directory("/w/sub", parents=True)
        for name in NAMES[:-1]:
            await s.write_file(f"/w/sub/{name}", name)
            assert await s.read_file(f"/w/sub/{name}") == name.encode()
            assert (await s.stat_file(f"/w/sub/{name}")).path == f"/w/sub/{name}"
        await out(s, "cd /w; : > \"sub/$(printf 'bad\\377\\376')\"; mkfifo fifo; ln -s 'to\n' link; truncate -s 5G holes")
        found = await listing(s, "/w", -1)
        assert set(found) == {"sub", "fifo", "link", "holes"} | {f"sub/{n}" for n in NAMES}
        assert os.fsencode(found["sub/bad\udcff\udcfe"].path) == b"sub/bad\xff\xfe"
        await s.write_file(b"/w/sub/bad\xff\xfe", "by bytes")
        assert await s.read_file("/w/sub/bad\udcff\udcfe") == b"by bytes"
        assert found["fifo"].type is FileType.FIFO and found["link"].link_target == "to\n" and found["link"].is_symlink
        assert found["holes"].size == 5 << 30 and found["holes"].allocated_bytes < 1 << 20
        assert found["sub/a b"].mode == 0o644 and found["sub/a b"].uid == 0 and found["sub/a b"].name == "a b"
        assert set(await listing(s, "/w")) == {"sub", "fifo", "link", "holes"}
        assert set(await listing(s, "/w/sub", 1)) == set(NAMES)
        stats = await s.stat_files(["/w/sub", "/none", "/w/link", "/w/fifo/x"])
        assert [e.reason if isinstance(e, DSecError) else e.type.value for e in stats] == ["directory", "file_not_found", "symlink", "not_directory"]
        assert await s.file_exists("/w/sub") and not await s.file_exists("/w/none") and not await s.file_exists("/w/link/x")
        for path, error in {"/none": NotFoundError, "/w/fifo": FailedPreconditionError, "/proc": InvalidArgumentError}.items():
            with pytest.raises(error):
                await listing(s, path)
        everything = await listing(s, "/", -1)  # /proc and /sys are entries, and no more
        assert "proc" in everything and "proc/1" not in everything and "w/sub/a b" in everything


async def test_changes(new_sandbox: New) -> None:
    async with new_sandbox() as s:
        await s.change_files([FileChange.make_directory(f"/many/{i}/{i}", parents=True) for i in range(1500)])
        assert len(await listing(s, "/many", -1)) == 3000
        # A directory of the image cannot be renamed where it is: it is copied, and is the same.
        before = await out(s, "cd /usr/share && find . -printf '%P %y %m %U:%G %T@ %l\\n' | sort | sha256sum; find . -type f | wc -l")
        await s.move_file("/usr/share", "/moved")
        after = await out(s, "cd /moved && find . -printf '%P %y %m %U:%G %T@ %l\\n' | sort | sha256sum; find . -type f | wc -l")
        assert before == after and not await s.file_exists("/usr/share")
        await s.copy_file("/moved", "/usr/share", recursive=True)
        assert await out(s, "diff -r --no-dereference /moved /usr/share && echo same") == "same"
        await s.chmod("/moved", 0o700, recursive=True)
        await s.chown("/moved", "7:8", recursive=True)
        assert await out(s, "find /moved ! -type l ! -perm 700 | wc -l; find /moved ! -uid 7 -o ! -gid 8 | wc -l") == "0\n0"
        await s.remove_file("/moved", recursive=True)
        await s.remove_file("/moved", recursive=True, missing_ok=True)
        with pytest.raises(NotFoundError):
            await s.remove_file("/moved", recursive=True)
        await s.write_file("/a", "a")
        await s.symlink("/a", "/l")
        await s.hardlink("/a", "/h")
        assert (await s.stat_file("/a")).links == 2 and (await s.stat_file("/l", follow=True)).size == 1
        with pytest.raises(AlreadyExistsError):
            await s.move_file("/a", "/h", exclusive=True)
        with pytest.raises(FailedPreconditionError, match="recursive") as full:
            await s.remove_file("/many")
        assert full.value.reason == "directory_not_empty"
        with pytest.raises(AlreadyExistsError) as which:
            await s.change_files([FileChange.make_directory("/one"), FileChange.make_directory("/one"), FileChange.remove("/a")])
        assert which.value.facts["index"] == "1" and await s.file_exists("/a")
        # Somebody else's rights.
        await s.make_directory("/theirs")
        await s.chown("/theirs", "1000:1000")
        await s.make_directory("/theirs/x", user="1000:1000")
        assert (await s.stat_file("/theirs/x")).uid == 1000
        for change in (FileChange.remove("/a"), FileChange.chown("/theirs", "0"), FileChange.chmod("/a", 0o777), FileChange.copy("/etc/shadow", "/theirs/s")):
            with pytest.raises(PermissionDeniedError):
                await s.change_files([change], user="1000:1000")
        with pytest.raises(PermissionDeniedError):
            await listing(s, "/root", user="1000:1000")


@pytest.mark.limit(900)
async def test_sizes_both_ways(new_sandbox: New, tmp_path: Path) -> None:
    async with new_sandbox(disk_limit_mb=6 << 10) as s:
        for size in (0, 1, 18 << 10, (64 << 10) + 1, 16 << 20, 2 << 30):
            local = tmp_path / "local"
            with local.open("wb") as f:
                f.write(os.urandom(min(size, 1 << 20)))
                f.truncate(size)
                if size > 1 << 20:
                    f.seek(size - 7)
                    f.write(b"the end")
            await s.write_file("/up", local)
            assert (await s.stat_file("/up")).size == size
            want = hashlib.sha256()
            with local.open("rb") as f:
                while block := f.read(1 << 20):
                    want.update(block)
            assert (await out(s, "sha256sum < /up")).split()[0] == want.hexdigest()
            got = hashlib.sha256()
            async for piece in s.iter_file("/up"):
                got.update(piece)
            assert got.hexdigest() == want.hexdigest()


async def test_append_and_ranges(new_sandbox: New) -> None:
    async with new_sandbox() as s:
        await s.append_file("/log/x", "one\n", make_parents=True)
        await s.append_file("/log/x", b"two\n")
        await s.write_file("/log/x", "ONE", offset=0)
        assert await s.read_file("/log/x") == b"ONE\ntwo\n"
        await s.write_file("/log/x", "!", offset=3, truncate=True)
        assert await s.read_file("/log/x") == b"ONE!"
        await s.write_file("/log/x", "x", offset=6)
        assert await s.read_file("/log/x") == b"ONE!\0\0x"
        await s.write_file("/log/x", "")  # a whole file has no old tail
        assert await s.read_file("/log/x") == b""
        pieces = [bytes([i]) * 100_000 for i in range(50)]

        async def body() -> AsyncIterator[bytes]:
            for p in pieces:
                yield p

        await s.append_file("/log/x", body())
        assert await s.read_file("/log/x") == b"".join(pieces)
        await out(s, "cp /bin/sleep /run-me; /run-me 60 & sleep 0.2")
        with pytest.raises(FailedPreconditionError) as busy:
            await s.append_file("/run-me", "x")
        assert busy.value.reason == "file_busy"
        with pytest.raises(InvalidArgumentError):
            await s.write_file("/log/x", "x", truncate=True)


async def test_watch(new_sandbox: New) -> None:
    async with new_sandbox() as s:
        await out(s, "mkdir -p /w/a/b")
        async with s.watch_files("/w", recursive=True) as events:

            async def until(kind: FileEventKind, path: str) -> None:
                async with asyncio.timeout(60):
                    async for e in events:
                        assert ".dsec-" not in e.path  # uploads are not there before they are complete
                        if (e.kind, e.path) == (kind, path):
                            return

            for kind in (FileEventKind.CREATED, FileEventKind.CHANGED):
                await s.write_file("/w/a/b/new\nline", "x")
                await until(kind, "a/b/new\nline")
            await s.write_files({f"/w/a/{i}": "x" for i in range(50)})
            await until(FileEventKind.CREATED, "a/49")
            await out(s, "echo y > /w/a/b/f; mkdir -p /w/c/d && : > /w/c/d/e; mv /w/a /w/z; : > /w/z/b/g")
            await until(FileEventKind.CHANGED, "a/b/f")
            await until(FileEventKind.CREATED, "c/d/e")
            await until(FileEventKind.MOVED_TO, "z")
            await until(FileEventKind.CREATED, "z/b/g")
            await out(s, "rm -r /w/c")
            await until(FileEventKind.REMOVED, "c")
            await s.remove_file("/w", recursive=True)
            with pytest.raises(NotFoundError):
                await until(FileEventKind.UNKNOWN, "")
        with pytest.raises(NotFoundError):
            async with s.watch_files("/none"):
                pass
        # Who leaves leaves nothing: more in a row than there may be at once.
        for _ in range(20):
            async with asyncio.timeout(60):
                while True:
                    try:
                        async with s.watch_files("/", recursive=False):
                            break
                    except ResourceExhaustedError:  # the one before is still on its way out
                        await asyncio.sleep(0.05)


async def test_hostile_trees(new_sandbox: New) -> None:
    """Somebody inside exchanges directories and links while root changes whole trees: nothing outside of them changes."""
    async with new_sandbox() as s:
        await out(s, "mkdir -p /outside/x && echo keep > /outside/x/file && chmod 644 /outside/x/file && mkdir -p /t/d/e && : > /t/d/e/f")
        race = await s.start(
            "cd /t; while :; do mkdir -p d/e; : > d/e/file 2>/dev/null; ln -sfn /outside/x d/link; mv d/e d/q 2>/dev/null;"
            " ln -s /outside/x d/e 2>/dev/null; rm -rf d/q; rm -f d/e; mkfifo d/fifo 2>/dev/null; done 2>/dev/null"
        )
        for i in range(60):
            for change in (
                FileChange.chown("/t/d", "1234:1234", recursive=True), FileChange.chmod("/t/d", 0o777, recursive=True),
                FileChange.copy("/t/d", f"/copy{i}", recursive=True), FileChange.remove("/t/d", recursive=True, missing_ok=True),
            ):  # fmt: skip
                try:
                    await s.change_files([change])
                except (NotFoundError, FailedPreconditionError, InvalidArgumentError, AlreadyExistsError):
                    pass  # the tree is another by now
        await race.kill()
        assert await out(s, "cat /outside/x/file; stat -c '%a %u' /outside/x/file; ls /outside/x | wc -l; find / -xdev -name '.dsec-*' | wc -l") == "keep\n644 0\n1\n0"
        # Links of the kernel, devices and FIFOs are not opened, and loops not followed.
        await out(s, "mkdir /l; ln -s /l /l/loop; ln -s self /self; mkfifo /l/fifo")
        assert set(await listing(s, "/l", -1)) == {"loop", "fifo"}
        for path in ("/self", "/proc/self/fd/3", "/proc/self/root/etc"):
            with pytest.raises(InvalidArgumentError):
                await s.chmod(path, 0o777)
        for path in ("/l/fifo", "/dev/zero"):
            with pytest.raises(InvalidArgumentError):
                await s.append_file(path, "x")
        with pytest.raises(InvalidArgumentError, match="memory"):
            await s.copy_file("/etc", "/dev/shm/etc", recursive=True)


@pytest.mark.limit(600)
async def test_deep_and_wide_trees(new_sandbox: New) -> None:
    async with new_sandbox(memory_limit_mb=512) as s:
        deep = "import os\nos.mkdir('/deep'); os.chdir('/deep')\nfor i in range(10000):\n os.mkdir('d'); os.chdir('d')"
        await out(s, f'perl -e \'mkdir "/deep"; chdir "/deep"; for (1..10000) {{ mkdir "d"; chdir "d" }}\' || python3 -c "{deep}"')
        await s.chmod("/deep", 0o711, recursive=True)
        assert len(await listing(s, "/deep", -1)) == 10_000
        await s.remove_file("/deep", recursive=True)
        await out(s, "mkdir /wide && cd /wide && seq 1 60000 | xargs touch")
        assert len(await listing(s, "/wide")) == 60_000
        await s.copy_file("/wide", "/wide2", recursive=True)
        assert len(await listing(s, "/wide2")) == 60_000
        await s.remove_file("/wide", recursive=True)
        assert not await s.file_exists("/wide")


async def test_full_disk(new_sandbox: New) -> None:
    async with new_sandbox(disk_limit_mb=64) as s:
        await s.write_file("/half", bytes(24 << 20))
        await s.run_shell("head -c 200M /dev/urandom > /rest")
        for write in (
            s.write_file("/more", bytes(1 << 20)), s.append_file("/rest", bytes(1 << 20)), s.copy_file("/usr", "/usr2", recursive=True),
        ):  # fmt: skip
            with pytest.raises(ResourceExhaustedError, match="remove files") as full:
                await write
            assert full.value.reason in ("quota_exceeded", "no_space")
        assert not await s.file_exists("/more")
        assert ".dsec" not in await out(s, "find / -xdev -name '.dsec-*'")
        await s.remove_file("/rest")  # what is full can be emptied
        with pytest.raises(ResourceExhaustedError, match="remove files"):
            await s.write_file("/large", bytes(60 << 20))  # it begins to fit
        assert ".dsec" not in await out(s, "find / -xdev -name '.dsec-*'")
        await s.write_file("/more", bytes(1 << 20))


@pytest.mark.limit(600)
async def test_edge_killed_in_the_middle(args: DSecContainerRunArgs) -> None:
    """kill -9 of the edge during every kind of operation: errors that say so, nothing half-made, and the next edge goes on."""
    with Platform() as p:
        p.start()
        p.make_environments()
        async with p.client() as client, await client.run_container(replace(args, memory_limit_mb=512)) as s:
            await out(s, "mkdir -p /src && cd /src && for i in $(seq 200); do mkdir $i; (cd $i; seq 100 | xargs touch); done; head -c 200M /dev/urandom > big")

            async def append() -> None:
                async def slowly() -> AsyncIterator[bytes]:
                    for _ in range(1000):
                        yield b"x" * 1000
                        await asyncio.sleep(0.01)

                await s.append_file("/appended", slowly())

            async def watch() -> None:
                async with s.watch_files("/src", recursive=True) as events:
                    async for _ in events:
                        pass

            killed = asyncio.Event()

            async def copies() -> None:
                while not killed.is_set():
                    await s.copy_file("/src", "/dst", recursive=True, exclusive=True)
                    await s.remove_file("/dst", recursive=True)

            async def lists() -> None:  # goes on where it had not begun
                while not killed.is_set():
                    assert len(await listing(s, "/src", -1)) == 20_201

            jobs = [asyncio.create_task(j) for j in (append(), watch(), copies(), lists())]
            await asyncio.sleep(1)
            p.kill_edge()
            killed.set()
            ends = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 120)
            assert all(isinstance(e, UnavailableError) for e in ends[:2]), ends
            assert all(e is None or isinstance(e, UnavailableError) for e in ends), ends
            wait_for("the sandbox", lambda: p.edge_pid())
            assert len(await listing(s, "/src", -1)) == 20_201
            async with asyncio.timeout(60):  # what was under way is undone, beside us
                while await out(s, "find / -xdev -name '.dsec-*'"):
                    await asyncio.sleep(0.1)
            size = (await s.stat_file("/appended")).size
            assert (await s.read_file("/appended")) == b"x" * size
