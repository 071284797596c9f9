"""Trees and large files, up and down: as they were, within the quota, and whole or refused."""

from __future__ import annotations

import asyncio
import base64
import filecmp
import hashlib
import http.client
import io
import os
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from platform_under_test import BIN, Platform, wait_for

from libdsec import DSecError, InvalidArgumentError, NotFoundError, PermissionDeniedError, ResourceExhaustedError, Sandbox

MIB = 1 << 20
ATTRIBUTE = b"\xff\0of a file"
LIST = r"cd %s && find . -mindepth 1 \( -type d -printf '%%P %%y %%m %%T@\n' -o -printf '%%P %%y %%m %%s %%T@ %%l\n' \) | sort"


def make_tree(root: Path) -> None:
    (root / "deep" / ("long name " * 15)).mkdir(parents=True)
    (root / "deep" / ("long name " * 15) / "file").write_bytes(b"deep")
    (root / "script").write_bytes(b"#!/bin/sh\necho ran\n")
    (root / "script").chmod(0o755)
    os.link(root / "script", root / "deep" / "twin")
    (root / "link").symlink_to("deep")
    (root / "large").write_bytes(os.urandom(3 * MIB + 17))
    os.mkfifo(root / "fifo", 0o620)
    with open(root / "holes", "wb") as f:
        f.truncate(64 * MIB)
        f.seek(33 * MIB)
        f.write(b"data")
    for name in ("script", "deep"):
        os.setxattr(root / name, "user.note", ATTRIBUTE)
    os.utime(root / "large", ns=(0, 1_234_567_890_123_456_789))
    (root / "deep").chmod(0o710)


def listed(root: Path) -> str:
    return subprocess.run(["sh", "-c", LIST % root], capture_output=True, text=True, check=True).stdout


async def output(s: Sandbox, script: str, **more: object) -> str:
    return (await s.run_shell(script, check=True, **more)).stdout  # type: ignore[arg-type]


def raw(platform: Platform, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=60)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {platform.key()}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


async def test_a_tree_comes_back_as_it_was(new_sandbox, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    make_tree(source)
    async with new_sandbox(disk_limit_mb=32) as s:  # less than its holes
        sent = await s.upload(source, "/work/some/where")
        assert await output(s, LIST % "/work/some/where") == listed(source)
        assert await output(s, "stat -c '%U %G' /work/some /work/some/where /work/some/where/script | sort -u") == "root root\n"
        assert await output(s, "/work/some/where/deep/twin; stat -c %h /work/some/where/script") == "ran\n2\n"
        attributes = "import os; print([os.getxattr('/work/some/where/' + n, 'user.note') for n in ('script', 'deep')])"
        assert (await s.exec(["python3", "-c", attributes], check=True)).stdout == f"{[ATTRIBUTE] * 2}\n"
        got = await s.download("/work/some/where", tmp_path / "back")
        assert (got.entries, got.skipped) == (sent.entries + 1, 0)  # and the directory itself
        assert listed(tmp_path / "back") == listed(source)
        for name in ("script", "deep"):
            assert os.getxattr(tmp_path / "back" / name, "user.note") == ATTRIBUTE
        for name in ("large", "holes", "script"):
            assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
        assert (tmp_path / "back" / "holes").stat().st_blocks < 1024
        assert (tmp_path / "back" / "script").stat().st_nlink == 2


async def test_one_file_up_and_down(new_sandbox, tmp_path):
    (tmp_path / "a").write_bytes(b"content")
    async with new_sandbox() as s:
        await s.upload(tmp_path / "a", "/new/dir/b")
        await s.upload(tmp_path / "a", "/new/dir/")
        assert await output(s, "cat /new/dir/a /new/dir/b") == "contentcontent"
        await s.download("/new/dir/b", tmp_path / "c" / "d")
        assert (tmp_path / "c" / "d").read_bytes() == b"content"
        await s.download("/etc/os-release", tmp_path)  # a link: what it leads to
        assert b"Debian" in (tmp_path / "os-release").read_bytes()
        with pytest.raises(NotFoundError):
            await s.download("/nowhere", tmp_path / "n")
        with pytest.raises(FileNotFoundError):
            await s.upload(tmp_path / "nowhere", "/x")


async def test_thousands_of_small_files(new_sandbox):
    files = {f"/work/data/d{i % 50}/f{i}": f"content {i}".encode() * (i % 100) for i in range(5000)}
    async with new_sandbox() as s:
        done = await s.write_files(files)
        assert done.entries == len(files)
        assert await output(s, "find /work/data -type f | wc -l; find / -xdev -name '.dsec-*' | wc -l") == "5000\n0\n"
        assert await s.read_files(files) == files
        await s.write_files([("/tmp/mine/run", "#!/bin/sh\necho ran", 0o755), (b"/tmp/mine/\xff\n", b"odd")], user="nobody")
        assert await output(s, "/tmp/mine/run; stat -c '%U %a' /tmp/mine/run /tmp/mine") == "ran\nnobody 755\nnobody 755\n"
        with pytest.raises(PermissionDeniedError):
            await s.write_files({"/etc/new": b""}, user="nobody")
        with pytest.raises(NotFoundError, match="none"):
            await s.read_files(["/etc/passwd", "/none"])
        with pytest.raises(PermissionDeniedError, match="shadow"):
            await s.read_files(["/etc/shadow"], user="nobody")


@pytest.mark.parametrize("size", [0, 1, 18 << 10, 16 * MIB, 64 * 1024 + 1])
async def test_what_is_sent_is_there(new_sandbox, tmp_path, size):
    """As bytes, as a local file, in pieces of unknown number, and as a tree: the same content, or an error."""
    content = os.urandom(size)
    local = tmp_path / "local"
    local.write_bytes(content)

    async def pieces():
        for at in range(0, size, 100_000):
            yield content[at : at + 100_000]

    async with new_sandbox() as s:
        await s.write_file("/a", content)
        await s.write_file("/b", local)
        await s.write_file("/c", pieces())
        await s.upload(local, "/d")
        sums = (await output(s, "sha256sum /a /b /c /d | cut -d' ' -f1 | sort -u")).split()
        assert sums == [hashlib.sha256(content).hexdigest()]
        await s.download("/a", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == content == await s.read_file("/b")


@pytest.mark.long
@pytest.mark.limit(1500)
async def test_large_files_take_no_memory(args, tmp_path):
    """20 GiB of data with their digest, and 20 GiB of a file with holes, while no hop grows."""
    local = tmp_path / "local"
    local.write_bytes(os.urandom(1 << 30))
    with open(tmp_path / "sparse", "wb") as f:
        f.truncate(20 << 30)
        f.seek(13 << 30)
        f.write(b"data")
    sent = hashlib.sha256()

    async def repeated():
        for _ in range(20):
            with open(local, "rb") as f:
                while piece := f.read(MIB):
                    sent.update(piece)
                    yield piece

    large = replace(args, disk_limit_mb=24 << 10, memory_limit_mb=256, ttl_running_stop=1500)
    with Platform(pool="28g") as platform:
        platform.start()
        platform.make_environments()
        async with platform.client() as c, await c.run_container(large) as s:
            up, edge = platform.up, platform.edge_pid()
            assert up and edge
            pids = {"up": up.pid, "edge": edge, "aether": platform.aether_pid(s.id), "us": os.getpid()}
            before = {name: anonymous(pid) for name, pid in pids.items()}
            await s.write_file("/a", repeated())
            assert (await output(s, "stat -c %s /a; sha256sum /a")).split() == [str(20 << 30), sent.hexdigest(), "/a"]
            back = hashlib.sha256()
            async for piece in s.iter_file("/a"):
                back.update(piece)
            assert back.hexdigest() == sent.hexdigest()
            await s.upload(local, "/local")
            await s.download("/local", tmp_path / "local back")
            assert filecmp.cmp(local, tmp_path / "local back", shallow=False)
            await s.upload(tmp_path / "sparse", "/sparse")
            assert await output(s, "stat -c %s /sparse") == f"{20 << 30}\n"
            await s.download("/sparse", tmp_path / "sparse back")
            assert os.stat(tmp_path / "sparse back").st_size == 20 << 30
            for name, pid in pids.items():
                assert anonymous(pid) - before[name] < 32 * MIB, name


@pytest.mark.long
@pytest.mark.limit(1500)
async def test_a_million_entries_take_no_memory(platform, new_sandbox):
    """Listed through the SDK and at the command line, entry by entry."""
    async with new_sandbox(disk_limit_mb=4096, memory_limit_mb=1024) as s:
        fill = "import os\nfor d in range(100):\n os.makedirs(f'/many/{d}')\n for i in range(9999): os.mknod(f'/many/{d}/{i}')"
        await output(s, f'python3 -c "{fill}"')
        pids = {"up": platform.up.pid, "edge": platform.edge_pid(), "aether": platform.aether_pid(s.id), "us": os.getpid()}
        before = {name: anonymous(pid) for name, pid in pids.items()}
        count = 0
        async for _ in s.list_files("/many", depth=-1):
            count += 1
        assert count == 1_000_000
        for flag in ("-U", "-Ul", "--json"):
            lines, most = await asyncio.to_thread(lines_of, platform, "files", "ls", "-R", flag, s.id, "/many")
            assert lines == 1_000_000
            assert most < 96 * MIB, flag  # with the program itself
        for name, pid in pids.items():
            assert anonymous(pid) - before[name] < 32 * MIB, name


def lines_of(platform: Platform, *args: str) -> tuple[int, int]:
    """How many lines the command line prints, and how much memory it has had at most."""
    with subprocess.Popen([str(BIN / "dsec"), *args], env=platform.env, stdout=subprocess.PIPE) as p:
        assert p.stdout is not None
        lines = 0
        while piece := p.stdout.read(MIB):
            lines += piece.count(b"\n")
        _, status, usage = os.wait4(p.pid, 0)
        p.returncode = os.waitstatus_to_exitcode(status)
    assert p.returncode == 0
    return lines, usage.ru_maxrss << 10


def anonymous(pid: int) -> int:
    """Bytes of memory of a process's own."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError(pid)


async def test_a_full_disk_is_told(new_sandbox, tmp_path):
    (tmp_path / "tree").mkdir()
    for i in range(6):
        (tmp_path / "tree" / f"f{i}").write_bytes(os.urandom(16 * MIB))
    async with new_sandbox(disk_limit_mb=64) as s:
        with pytest.raises(ResourceExhaustedError, match='entry "f') as caught:
            await s.upload(tmp_path / "tree", "/work")
        assert caught.value.reason == "quota_exceeded"
        assert await output(s, "find / -xdev -name '.dsec-*' | wc -l; cmp /work/f0 - && echo same", stdin=(tmp_path / "tree/f0").read_bytes()) == "0\nsame\n"
        await s.run_shell("rm -r /work", check=True)
        await s.upload(tmp_path / "tree" / "f1", "/work/f1")
        assert await output(s, "stat -c %s /work/f1") == f"{16 * MIB}\n"


async def test_archives_of_strangers(platform, new_sandbox):
    """GNU tar reads ours, ours reads GNU tar's, and what leads out, is truncated or compressed is refused by name."""
    async with new_sandbox() as s:
        at = f"/v1/sandboxes/{s.id}/archive?path="
        await s.run_shell("mkdir /t && cd /t && echo x > f && ln f g && ln -s f l && truncate -s 1G h && chown 1000:1000 f", check=True)
        status, data = await asyncio.to_thread(raw, platform, "GET", at + "/t")
        assert status == 200
        names = subprocess.run(["tar", "-tv", "--numeric-owner"], input=data, capture_output=True, check=True).stdout.decode()
        assert "1000/1000" in names
        assert "link to t/" in names
        assert len(data) < 100_000
        status, answer = await asyncio.to_thread(raw, platform, "PUT", at + "/u/v&parents=1&keep_owners=1", data)
        assert status == 200, answer
        assert await output(s, "stat -c '%u %s %h' /u/v/t/f; readlink /u/v/t/l; stat -c %s /u/v/t/h") == f"1000 2 2\nf\n{1 << 30}\n"
        by_gnu = await s.run_shell("tar -C /t -S -c . | base64 -w0", check=True)
        status, answer = await asyncio.to_thread(raw, platform, "PUT", at + "/w&parents=1", base64.b64decode(by_gnu.stdout))
        assert status == 200, answer
        assert await output(s, "diff -r /t /w && stat -c %U /w/f") == "root\n"

        def archive(name: str, **more: object) -> bytes:
            out = io.BytesIO()
            with tarfile.open(fileobj=out, mode="w") as t:
                info = tarfile.TarInfo(name)
                for key, value in more.items():
                    setattr(info, key, value)
                t.addfile(info, io.BytesIO(bytes(info.size)))
            return out.getvalue()

        await s.run_shell("ln -s /etc /w/out", check=True)
        for bad, word in (
            (archive("../etc/evil"), "unsafe_entry"), (archive("/etc/evil"), "unsafe_entry"), (archive("out/evil"), "unsafe_entry"),
            (archive("h", type=tarfile.LNKTYPE, linkname="out/passwd"), "unsafe_entry"), (b"\x1f\x8b" + bytes(600), "gzip"),
            (archive("cut", size=5000)[:3000], "truncated"), (b"", "truncated"), (archive("huge", size=0)[:124] + b"8" * 12, "bad_archive"),
        ):  # fmt: skip
            status, answer = await asyncio.to_thread(raw, platform, "PUT", at + "/w", bad)
            assert status == 400, (word, answer)
            assert word in answer.decode(), answer
        assert await output(s, "ls /etc/evil /w/cut 2>&1 | grep -c 'No such'") == "2\n"


async def test_trees_of_the_kernel_are_left_out(platform, new_sandbox, tmp_path):
    async with new_sandbox() as s:
        await s.run_shell("mkdir /t && python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/t/s\")' && touch /t/f", check=True)
        got = await s.download("/t", tmp_path / "t")
        assert (got.entries, got.skipped) == (2, 1)
        with pytest.raises(InvalidArgumentError):
            await s.download("/proc/self", tmp_path / "p")
        await s.run_shell("ln -s /etc /t/out; ln -s f /t/in", check=True)
        got = await s.download("/t", tmp_path / "t2")
        assert (got.skipped, sorted(p.name for p in (tmp_path / "t2").iterdir())) == (2, ["f", "in"])
        await s.download("/t", tmp_path / "t3", outside_links=True)
        assert os.readlink(tmp_path / "t3" / "out") == "/etc"


async def test_a_killed_edge_costs_an_attempt(platform, new_sandbox, tmp_path):
    (tmp_path / "tree").mkdir()
    for i in range(40):
        (tmp_path / "tree" / f"f{i:02d}").write_bytes(os.urandom(2 * MIB))
    async with new_sandbox() as s:
        up = asyncio.create_task(s.upload(tmp_path / "tree", "/work"))
        await until(s, "test -e /work/f03")
        await asyncio.to_thread(platform.kill_edge)
        await up
        down = asyncio.create_task(s.download("/work", tmp_path / "back"))
        await asyncio.to_thread(wait_for, "some has come", lambda: (tmp_path / "back" / "f00").exists() or (tmp_path / "back").exists())
        await asyncio.to_thread(platform.kill_edge)
        await down
        for i in range(40):
            assert (tmp_path / "back" / f"f{i:02d}").read_bytes() == (tmp_path / "tree" / f"f{i:02d}").read_bytes()
        await until(s, "test -z \"$(find / -xdev -name '.dsec-*')\"")


async def until(s: Sandbox, script: str) -> None:
    for _ in range(600):
        try:
            if (await s.run_shell(script)).exit_code == 0:
                return
        except DSecError as e:
            if e.code != "unavailable":
                raise
        await asyncio.sleep(0.05)
    raise AssertionError(f"never: {script}")


CLIENT = """
import sys
from libdsec.sync import DSecClient
def pieces():
    yield bytes(1 << 20)
    print("begun", flush=True)
    while True:
        yield bytes(1 << 20)
client = DSecClient()
s = client.get_sandbox(sys.argv[1])
if sys.argv[2] == "file":
    s.write_file("/kept", pieces())
else:
    from pathlib import Path
    s.upload(Path(sys.argv[3]), "/work")
"""


async def test_a_killed_client_leaves_the_old_file(platform, new_sandbox):
    async with new_sandbox() as s:
        await s.write_file("/kept", b"old")
        client = subprocess.Popen([sys.executable, "-c", CLIENT, s.id, "file"], env=platform.env, stdout=subprocess.PIPE)
        assert client.stdout is not None
        assert await asyncio.to_thread(client.stdout.readline) == b"begun\n"
        client.send_signal(signal.SIGKILL)
        client.wait()
        client.stdout.close()
        await until(s, "test -z \"$(find / -xdev -name '.dsec-*')\"")
        assert await s.read_file("/kept") == b"old"


async def test_paths_of_any_bytes(platform, new_sandbox):
    async with new_sandbox() as s:
        await s.run_shell("mkdir /t && cd /t && touch \"$(printf 'a\\nb\\377')\"", check=True)
        status, data = await asyncio.to_thread(raw, platform, "GET", f"/v1/sandboxes/{s.id}/archive?path={quote(b'/t')}&content=1", TE="trailers")
        with tarfile.open(fileobj=io.BytesIO(data)) as t:
            assert [os.fsencode(n) for n in t.getnames()] == [b"a\nb\xff"]
        assert status == 200
