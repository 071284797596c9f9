"""Archives from strangers, and a sandbox that changes the ground under them: nothing outside the target, and nothing without bound."""

from __future__ import annotations

import gzip
import io
import socket
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress

import pytest
from attacked import ATTACKS, Box, wait_for
from platform_under_test import Platform

New = Callable[..., AbstractContextManager[Box]]
MIB = 1 << 20
END = bytes(1024)


def entry(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", content: bytes = b"", size: int | None = None, pax: dict[str, str] | None = None) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.pax_headers = kind, link, len(content) if size is None else size, pax or {}
    return info.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512)


def link(name: str, to: str) -> bytes:
    return entry(name, tarfile.SYMTYPE, link=to)


def hard(name: str, to: str) -> bytes:
    return entry(name, tarfile.LNKTYPE, link=to)


def connect(platform: Platform, box: Box, target: str, more: str = "") -> socket.socket:
    """Begins an upload of an archive whose length is not known."""
    s = socket.create_connection(("127.0.0.1", platform.port), timeout=120)
    head = f"PUT /v1/sandboxes/{box.sandbox.id}/archive?path={target}{more} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {platform.key()}\r\n"
    s.sendall((head + "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n").encode())
    return s


def send(s: socket.socket, data: bytes) -> None:
    s.sendall(b"%x\r\n%s\r\n" % (len(data), data))


def put(platform: Platform, box: Box, target: str, pieces: Iterable[bytes], more: str = "") -> tuple[int, str]:
    """The status and the beginning of the answer to an archive, which may come before all was sent."""
    with connect(platform, box, target, more) as s:
        with suppress(OSError):
            for piece in pieces:
                send(s, piece)
                s.setblocking(False)
                try:
                    early = s.recv(1, socket.MSG_PEEK)
                except BlockingIOError:
                    early = b""
                s.settimeout(120)
                if early:
                    break
            else:
                s.sendall(b"0\r\n\r\n")
        answer = b""
        with suppress(OSError):
            while (more_of_it := s.recv(4096)) and len(answer) < 4096 and b'reason"' not in answer:
                answer += more_of_it
        return int(answer[9:12] or b"0"), answer.decode(errors="replace")


TRAVERSAL = {
    "upwards": [entry("../out/victim", content=b"x")],
    "upwards later": [entry("a/../../out/victim", content=b"x")],
    "absolute": [entry("/t/out/victim", content=b"x")],
    "a link, and a file through it": [link("l", "../out"), entry("l/victim", content=b"x")],
    "an absolute link": [link("l", "/t/out"), entry("l/victim", content=b"x")],
    "a link to a link": [link("a", ".."), link("b", "a/out"), entry("b/victim", content=b"x")],
    "a link in the place of a directory": [entry("d", tarfile.DIRTYPE), link("d", "../out"), entry("d/victim", content=b"x")],
    "a directory through a link": [link("l", "../out"), entry("l/new", tarfile.DIRTYPE)],
    "a link through a link": [link("l", "../out"), link("l/new", "/etc/shadow")],
    "a hard link to outside": [hard("h", "../out/victim"), entry("h", content=b"x")],
    "an absolute hard link": [hard("h", "/t/out/victim")],
    "a hard link through a link": [link("l", "../out"), hard("h", "l/victim")],
    "a link that was there": [entry("was/victim", content=b"x")],
    "a hard link through one that was there": [hard("h", "was/victim")],
    "a pipe through a link": [link("l", "../out"), entry("l/pipe", tarfile.FIFOTYPE)],
    "a name with a NUL": [entry("a", pax={"path": "../out/victim\0"})],
    "an extended name": [entry("a", pax={"path": "../out/victim"}, content=b"x")],
    "an extended hard link": [entry("h", tarfile.LNKTYPE, link="x", pax={"linkpath": "../out/victim"})],
}


@pytest.mark.parametrize("name", TRAVERSAL)
def test_traversal(platform: Platform, box: Box, name: str) -> None:
    box.out("rm -rf /t; mkdir -p /t/out /t/in; echo whole > /t/out/victim; ln -s ../out /t/in/was; touch -d @1 /t/out/victim /t/out")
    status, answer = put(platform, box, "/t/in", [b"".join(TRAVERSAL[name]) + END])
    assert (status, "unsafe_entry" in answer or "bad_archive" in answer) == (400, True), answer
    assert box.out("cat /t/out/victim; ls -A /t/out; stat -c '%Y %h' /t/out/victim; stat -c %Y /t/out; find /t -xdev -name '.dsec-*'") == "whole\nvictim\n1 1\n1"


def test_links_of_the_target_are_followed_within_it(platform: Platform, box: Box) -> None:
    """As by docker cp: /bin of a system whose /bin is a link to usr/bin."""
    box.out("test -L /bin || { mkdir -p /m/usr/bin; ln -s usr/bin /m/bin; }")
    target = box.out("test -L /bin && echo / || echo /m")
    before = box.out(f"readlink {target}/bin; stat -c %a {target}/usr/bin")
    status, answer = put(platform, box, target, [entry("bin", tarfile.DIRTYPE) + entry("bin/from-archive", content=b"x") + hard("bin/hard", "bin/from-archive") + END])
    assert status == 200, answer
    assert box.out(f"cat {target}/usr/bin/from-archive {target}/usr/bin/hard; readlink {target}/bin; stat -c %a {target}/usr/bin") == "xx" + before


def test_a_directory_that_becomes_a_link_while_it_is_unpacked_into(platform: Platform, box: Box) -> None:
    box.out("rm -rf /t; mkdir -p /t/out/sub /t/in/d/sub; echo whole > /t/out/sub/victim; ln -s ../out /t/in/link; touch -d @1 /t/out/sub/victim /t/out/sub /t/out")
    before = box.out("cd /t/out; find . -printf '%p %y %m %s %T@ %n\\n' | sort")
    attacker = box.sandbox.start([ATTACKS, "swap", "/t/in/name", "/t/in/d", "../out"])
    packed = b"".join(
        entry("name/sub/victim", content=b"x") + entry("name/sub/new", content=b"x") + entry("name/sub", tarfile.DIRTYPE) + hard("h", "name/sub/victim") + entry("other")
        for _ in range(50)
    )  # fmt: skip
    answers = {put(platform, box, "/t/in", [packed + END])[0] for _ in range(60)}
    attacker.kill()
    assert answers <= {200, 400, 404, 409, 412}, answers
    assert box.out("cd /t/out; find . -printf '%p %y %m %s %T@ %n\\n' | sort") == before
    box.assert_well()


def test_compressed_bombs(platform: Platform, new_box: New) -> None:
    """The platform expands nothing. What the command line expands, and what is only said to be large, ends at the quota."""
    with new_box(disk_limit_mb=64) as box:
        for magic, word in ((gzip.compress(END), "gzip"), (b"\x28\xb5\x2f\xfd" + bytes(600), "zstd"), (b"\xfd7zXZ" + bytes(600), "xz")):
            status, answer = put(platform, box, "/tmp", [magic])
            assert (status, word in answer) == (400, True), answer
        small = io.BytesIO()
        with gzip.GzipFile(fileobj=small, mode="wb", compresslevel=1) as z:  # 4 GiB of zeros are 18 MiB: once is enough to be too much
            z.write(entry("bomb", size=4 << 30))
            for _ in range(256):
                z.write(bytes(MIB))
        done = platform.dsec("cp", "-", f"{box.sandbox.id}:/tmp", input=small.getvalue(), text=False, check=False)
        assert done.returncode == 1, done.stderr  # by the quota, or where the answer came while it was sending, by a cut
        assert b"quota" in done.stderr or b"broke" in done.stderr, done.stderr
        # Holes cost nothing, and say so; what no file can be is refused.
        holes = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "holes", "GNU.sparse.realsize": str(1 << 40)}
        status, answer = put(platform, box, "/tmp", [entry("x", content=b"0\n".ljust(512, b"\0"), pax=holes) + END])
        assert status == 200, answer
        assert box.out("stat -c '%s %b' /tmp/holes") == f"{1 << 40} 0"
        status, answer = put(platform, box, "/tmp", [entry("x", content=b"0\n".ljust(512, b"\0"), pax={**holes, "GNU.sparse.realsize": str(1 << 60)}) + END])
        assert (status, "bad_archive" in answer) == (400, True), answer
        assert box.out("find / -xdev -name '.dsec-*'") == ""
        box.assert_well()


@pytest.mark.limit(900)
@pytest.mark.parametrize("kind", ["files", "directories", "links"])
def test_ten_million_entries(platform: Platform, new_box: New, kind: str) -> None:
    """Entries without content are bounded as content is."""

    def million() -> Iterator[bytes]:
        for i in range(0, 10_000_000, 500):
            if kind == "links":
                yield b"".join(link(f"l{i + n}", "x") for n in range(500))
            elif kind == "directories":
                yield b"".join(entry(f"d{i + n}", tarfile.DIRTYPE) for n in range(500))
            else:
                yield b"".join(entry(f"f{i + n}") for n in range(500))
        yield END

    with new_box(disk_limit_mb=16) as box:
        box.sandbox.make_directory("/many")
        status, answer = put(platform, box, "/many", million())
        assert (status, any(r in answer for r in ("quota_exceeded", "no_space", "no_inodes"))) == (429, True), answer
        box.sandbox.remove_file("/many", recursive=True)
        wait_for("there is room again", lambda: box.sh("head -c 1M /dev/urandom > /room").exit_code == 0)
        box.assert_well()


def test_deeply_nested(platform: Platform, box: Box) -> None:
    status, answer = put(platform, box, "/tmp", [entry("n", tarfile.DIRTYPE), *(entry("n/" * i, tarfile.DIRTYPE) for i in range(2, 2000)), END])
    assert (status, "deep" in answer) == (400, True), answer
    status, answer = put(platform, box, "/tmp", [entry("a", pax={"path": "d/" * 400_000 + "f"}), END])
    assert status == 400, answer
    box.sandbox.remove_file("/tmp/n", recursive=True)
    box.assert_well()


@pytest.mark.parametrize("kind", ["files", "directories", "small records", "holes"])
def test_long_headers_of_many_at_once(platform: Platform, box: Box, kind: str) -> None:
    """64 uploads, each with a header of a MiB that is still needed: aether's memory holds, and all are answered."""
    value = "v" * (60 << 10)
    headers = {f"SCHILY.xattr.user.x{i}": value for i in range(16)}
    if kind == "small records":
        headers = {f"SCHILY.xattr.user.{i:05}": "" for i in range(30_000)}
    begin = entry("file", size=1 << 30, pax=headers)[: -(1 << 30) or None]
    if kind == "directories":
        headers = {f"SCHILY.xattr.user.x{i}": value[:3000] for i in range(300)}
        begin = entry("d", tarfile.DIRTYPE, pax=headers) + entry("d/e", tarfile.DIRTYPE, pax=headers) + entry("d/e/f", size=1 << 30)
    if kind == "holes":
        segments = 60_000
        count = f"{segments}\n".encode() + b"".join(b"%d\n1\n" % (i * 2) for i in range(segments))
        count = count.ljust(-(-len(count) // 512) * 512, b"\0")
        sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "holes", "GNU.sparse.realsize": str(1 << 40)}
        begin = entry("x", size=len(count) + segments, pax=sparse)[: 512 * 4] + count
    aether = platform.aether_pid(box.sandbox.id)
    full = threading.Barrier(64)

    def upload(i: int) -> int:
        box_dir = f"/tmp/{kind.replace(' ', '-')}/{i}"
        with connect(platform, box, box_dir, "&parents=1") as s:
            with suppress(OSError):
                send(s, begin + bytes(1024))
            full.wait(120)
            with suppress(OSError):
                s.settimeout(0.5 if i == 0 else 0.1)
                return int(s.recv(4096)[9:12])
            return 0  # it goes on

    with ThreadPoolExecutor(64) as pool:
        statuses = list(pool.map(upload, range(64)))
    assert set(statuses) <= {0, 429} and 0 in statuses, statuses
    assert platform.aether_pid(box.sandbox.id) == aether
    assert box.sandbox.metrics().oom_kills == 0
    wait_for("all have ended", lambda: box.out("find /tmp -xdev -name '.dsec-*' | wc -l") == "0")
    status, answer = put(platform, box, "/tmp", [entry("file", pax={"SCHILY.xattr.user.x": value[:2000]}) + END])
    assert status == 200, answer
    box.assert_well()
