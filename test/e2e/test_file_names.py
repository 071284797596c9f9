"""Names of files may be any bytes: each operation takes them, through the SDK and at the command line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from platform_under_test import IMAGE, Platform

from libdsec import DSecError, FileEventKind, NotFoundError, Sandbox

New = Callable[..., AbstractAsyncContextManager[Sandbox]]
BAD = b"b\xff\xfe\n\\"


async def test_each_operation(new_sandbox: New, tmp_path: Path) -> None:
    def at(name: bytes) -> bytes:
        return b"/d\xff/" + name + BAD

    async with new_sandbox() as s:
        await s.make_directory(at(b"sub/"), parents=True)
        async with s.watch_files(b"/d\xff", recursive=True) as events:

            async def until(kind: FileEventKind, name: bytes) -> None:
                async with asyncio.timeout(60):
                    async for e in events:
                        if (e.kind, os.fsencode(e.path)) == (kind, name + BAD):
                            return

            await s.write_file(at(b"a"), "a")
            await s.copy_file(at(b"a"), at(b"b"))
            await s.move_file(at(b"b"), at(b"c"))
            await until(FileEventKind.MOVED_TO, b"c")
            await s.chmod(at(b"c"), 0o600)
            await s.chown(at(b"c"), "7:8")
            await s.symlink(at(b"a"), at(b"l"))
            await s.hardlink(at(b"a"), at(b"h"))
            await s.append_file(at(b"a"), "b")
            entries = {os.fsencode(e.path): e async for e in s.list_files(b"/d\xff", depth=-1)}
            assert set(entries) == {n + BAD for n in (b"a", b"c", b"l", b"h", b"sub/")} | {b"sub"}
            c, link, target, none = await s.stat_files([at(b"c"), at(b"l"), "/d\udcff/" + os.fsdecode(b"h" + BAD), at(b"none")])
            assert not isinstance(c, DSecError) and (c.mode, c.uid, c.gid) == (0o600, 7, 8)
            assert not isinstance(link, DSecError) and os.fsencode(link.link_target) == at(b"a")
            assert not isinstance(target, DSecError) and target.links == 2 and os.fsencode(target.path) == at(b"h")
            assert isinstance(none, NotFoundError)
            assert await s.read_file(at(b"l")) == b"ab"
            await s.download(b"/d\xff", tmp_path / "got", outside_links=True)
            got = os.fsencode(tmp_path / "got") + b"/"
            assert Path(os.fsdecode(got + b"c" + BAD)).read_text() == "a" and os.readlink(got + b"l" + BAD) == at(b"a")
            os.unlink(got + b"l" + BAD)
            await s.upload(tmp_path / "got", at(b"up"))
            assert await s.read_file(at(b"up") + b"/a" + BAD) == b"ab"
            await s.remove_file(at(b"a"))
            await until(FileEventKind.REMOVED, b"a")
        # What a listing told of it is a name of it.
        for path in [f"/d\udcff/{e.path}" async for e in s.list_files(b"/d\xff")]:
            await s.remove_file(path, recursive=True)
        assert [e async for e in s.list_files(b"/d\xff")] == []
        with pytest.raises(NotFoundError) as missing:
            await s.read_file(at(b"a"))
        assert "b\ufffd" in str(missing.value)


def test_at_the_command_line(platform: Platform, tmp_path: Path) -> None:
    box = platform.dsec("run", "-d", "-m", "256m", "--ttl", "10m", IMAGE).stdout.strip()
    name = os.fsdecode(BAD)
    local = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + BAD))
    local.write_text("x")
    platform.dsec("files", "mkdir", box, f"/srv/{name}")
    platform.dsec("cp", local, f"{box}:/srv/{name}/")
    platform.dsec("files", "cp", box, f"/srv/{name}/{name}", f"/srv/{name}/2{name}")
    platform.dsec("files", "mv", box, f"/srv/{name}/2{name}", f"/srv/{name}/3{name}")
    platform.dsec("files", "ln", "-s", box, name, f"/srv/{name}/l{name}")
    platform.dsec("files", "chmod", box, "600", f"/srv/{name}/3{name}")
    platform.dsec("files", "chown", box, "7:8", f"/srv/{name}/3{name}")
    shown = r"b\xff\xfe\n\\"
    assert platform.dsec("files", "ls", box, f"/srv/{name}").stdout.splitlines() == ["3" + shown, shown, "l" + shown]
    assert platform.dsec("files", "stat", box, f"/srv/{name}/3{name}").stdout.split()[:2] == ["-rw-------", "7:8"]
    platform.dsec("cp", f"{box}:/srv/{name}", tmp_path / "all")
    assert Path(os.fsdecode(os.fsencode(tmp_path / "all") + b"/3" + BAD)).read_text() == "x"
    platform.dsec("files", "rm", "-r", box, f"/srv/{name}")
    assert platform.dsec("files", "ls", box, "/srv").stdout == ""
    platform.dsec("rm", box)


async def test_errors_say_which_sandbox(platform: Platform, new_sandbox: New, tmp_path: Path) -> None:
    async with new_sandbox() as s:

        async def listing() -> None:
            async for _ in s.list_files("/none"):
                pass

        async def watching() -> None:
            async with s.watch_files("/none"):
                pass

        failing = [
            s.read_file("/none"), s.read_file("/etc"), s.write_file("/none/x", b""), s.append_file("/none/x", b""), s.read_files(["/none"]), s.download("/none", tmp_path / "x"),
            s.write_files({"/etc/passwd/x": b""}), s.upload(tmp_path, "/etc/passwd"), s.stat_file("/none"), s.remove_file("/none"), s.chmod("/none", 0), listing(), watching(),
        ]  # fmt: skip
        for i, call in enumerate(failing):
            with pytest.raises(DSecError) as error:
                await call
            assert error.value.sandbox_id == s.id, (i, error.value)
        (one,) = await s.stat_files(["/none"])
        assert isinstance(one, DSecError)
        assert one.sandbox_id == s.id
        # At the command line, and so with the Go client.
        for args in (["cp", f"{s.id}:/none", "-"], ["files", "ls", s.id, "/none"], ["files", "rm", "--json", s.id, "/none"]):
            done = platform.dsec(*args, check=False)
            assert done.returncode == 1, done
        assert s.id in done.stderr, done.stderr
