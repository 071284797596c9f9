"""Archives of trees without a sandbox: what is packed is what others read, and nothing hostile gets out of its target."""

from __future__ import annotations

import io
import os
import random
import socket
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from libdsec import DataLossError, DSecError
from libdsec._async.tree import Download, contents_of
from libdsec._errors import InvalidArgumentError
from libdsec._tar import (
    END,
    FIFO,
    FILE,
    LINK,
    SYMLINK,
    Entry,
    Packed,
    Packer,
    _block,
    coalesced,
    header,
    pack_contents,
    padding,
)
from libdsec._untar import Reader, Unpacker, gather

LONG = "long name " * 12


def make_tree(root: Path) -> None:
    deep = root / "deep" / LONG / LONG
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"deep")
    (root / "empty").write_bytes(b"")
    (root / "large").write_bytes(bytes(range(256)) * 3000)
    (root / "large").chmod(0o440)
    os.link(root / "large", root / "deep" / "twin")
    (root / "link").symlink_to("deep/" + LONG)
    (root / "deep" / "up").symlink_to("../empty")
    os.mkfifo(root / "fifo", 0o620)
    Path(os.fsdecode(os.fsencode(root) + b"/odd\n\xff")).write_bytes(b"odd")
    with open(root / "holes", "wb") as f:
        f.truncate(1 << 26)
        for at in (0, 1 << 20, (1 << 26) - 3):
            f.seek(at)
            f.write(b"xyz")
    os.utime(root / "empty", ns=(0, -1_500_000_001))
    os.utime(root / "deep", ns=(0, 1_234_567_890_123_456_789))
    (root / "deep").chmod(0o750)


def scan(root: Path) -> dict[str, object]:
    """What is in a tree, by an independent walk."""
    found: dict[str, object] = {}
    first: dict[int, str] = {}
    for above, dirs, files in os.walk(root):
        for name in sorted(dirs + files):
            path = Path(above, name)
            st = path.lstat()
            rel = str(path.relative_to(root))
            what: object = path.is_symlink() and os.readlink(path)
            if path.is_file() and not path.is_symlink():
                what = (path.read_bytes(), st.st_blocks <= 1024)
                first.setdefault(st.st_ino, rel)
            found[rel] = (st.st_mode, st.st_mtime_ns, what, first.get(st.st_ino))
    return found


def unpack(target: Path, pieces: Iterator[bytes] | list[bytes], *, outside_links: bool = False) -> Unpacker:
    u = Unpacker(os.fsencode(target), outside_links=outside_links)
    try:
        r = Reader(u.sink)
        for piece in pieces:
            r.feed(piece)
        r.finish()
        u.finish()
    finally:
        u.close()
    return u


def cut(data: bytes, seed: int) -> Iterator[bytes]:
    """The same bytes in pieces of any size."""
    rng = random.Random(seed)
    while data:
        n = rng.choice([1, 7, 511, 512, 513, 5000, 100_000])
        yield data[:n]
        data = data[n:]


def test_round_trip(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make_tree(source)
    packed = Packed()
    data = b"".join(packed.sent(coalesced(Packer(packed).tree(os.fsencode(source)))))
    assert packed.size == len(data) < 4 << 20  # holes are kept
    want = scan(source)
    assert packed.entries == len(want)
    for seed in range(3):
        target = tmp_path / f"target{seed}"
        target.mkdir()
        for _ in range(2):  # the second time over what is there
            assert unpack(target, cut(data, seed)).entries == len(want)
            assert scan(target) == want
        assert not list(target.rglob(".dsec-*"))


def test_tarfile_reads_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make_tree(source)
    packed = Packed()
    data = b"".join(Packer(packed).tree(os.fsencode(source)))
    with tarfile.open(fileobj=io.BytesIO(data)) as t:
        members = t.getmembers()
        assert len(members) == packed.entries
        for m in members:
            if m.isreg():
                content = t.extractfile(m)
                assert content is not None
                assert content.read() == (source / m.name).read_bytes()
            assert m.name.rstrip("/") in {str(p.relative_to(source)) for p in source.rglob("*")}


def test_contents(tmp_path: Path) -> None:
    files: dict[Any, str | bytes] = {"/a/b/x": "text", b"/a/b/\xff": b"bytes", "/a/b/c/" + LONG: b""}
    base, contents = contents_of(files, 0o640)
    assert base == b"/a/b"
    packed = Packed()
    data = b"".join(packed.sent(pack_contents(contents, packed)))
    found: dict[bytes, bytes] = {}
    r = Reader(lambda e: gather(e, found.__setitem__))
    for piece in cut(data, 1):
        r.feed(piece)
    r.finish()
    assert found == {b"x": b"text", b"\xff": b"bytes", b"c/" + LONG.encode(): b""}
    assert (packed.entries, packed.size, r.size) == (3, len(data), len(data))
    assert contents_of([("/x", b"", 0o755), ("/y/z", "")], 0o600)[0] == b"/"
    assert contents_of([("/x", b"", 0o755), ("/y/z", "")], 0o600)[1] == [(b"x", b"", 0o755), (b"y/z", b"", 0o600)]
    wrong: tuple[Any, ...] = (
        {"relative": b""},
        {"/a/../b": b""},
        {"/a\0": b""},
        {"/dir/": b""},
        {"/": b""},
        {"/a": 5},
        [("/a", b"", -1)],
    )
    for bad in wrong:
        with pytest.raises(InvalidArgumentError):
            contents_of(bad, 0o644)


def entry(e: Entry, content: bytes = b"") -> bytes:
    e.size = e.size or len(content)
    return header(e) + content + bytes(padding(len(content)))


def sym(name: bytes, to: bytes) -> bytes:
    return entry(Entry(name, SYMLINK, link=to))


OUT: dict[str, Callable[[bytes], bytes]] = {
    "absolute": lambda out: entry(Entry(out + b"/victim"), b"x"),
    "upwards": lambda out: entry(Entry(b"../outside/victim"), b"x"),
    "upwards inside": lambda out: entry(Entry(b"a/../../outside/victim"), b"x"),
    "through its own link": lambda out: sym(b"l", out) + entry(Entry(b"l/victim"), b"x"),
    "through a relative link": lambda out: sym(b"l", b"../outside") + entry(Entry(b"l/victim"), b"x"),
    "a link that was there": lambda out: entry(Entry(b"was/victim"), b"x"),
    "a hard link outside": lambda out: entry(Entry(b"h", LINK, link=out + b"/victim")) + entry(Entry(b"h"), b"x"),
    "a hard link upwards": lambda out: entry(Entry(b"h", LINK, link=b"../outside/victim")),
    "a hard link by a link": lambda out: entry(Entry(b"h", LINK, link=b"was/victim")),
    "a directory by a link": lambda out: sym(b"l", out) + entry(Entry(b"l/sub/", b"5")),
    "a chain of links": lambda out: (
        entry(Entry(b"d/e/", b"5")) + sym(b"d/e/up", b"../..") + sym(b"l", b"d/e/up/../outside") + entry(Entry(b"l/victim"), b"x")
    ),
}  # fmt: skip


@pytest.mark.parametrize("outside_links", [False, True])
@pytest.mark.parametrize("what", OUT)
def test_nothing_leads_out(tmp_path: Path, what: str, outside_links: bool) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (outside / "victim").write_bytes(b"whole")
    (target / "was").symlink_to(outside)
    before = scan(outside)
    reason = ""
    try:
        unpack(target, [OUT[what](os.fsencode(outside)) + END], outside_links=outside_links)
    except DSecError as e:
        reason = e.reason
    assert reason in (
        ("unsafe_entry",) if outside_links else ("", "unsafe_entry")
    )  # a link may be left out, and no longer in the way
    assert scan(outside) == before
    if not outside_links:
        for path in target.rglob("*"):
            assert path.name == "was" or path.resolve().is_relative_to(target.resolve())


def test_links_are_replaced_not_followed(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (outside / "victim").write_bytes(b"whole")
    (target / "dir").symlink_to(outside)
    (target / "file").symlink_to(outside / "victim")
    unpack(
        target,
        [entry(Entry(b"dir/", b"5", mode=0o755)) + entry(Entry(b"dir/victim"), b"x") + entry(Entry(b"file"), b"x") + END],
    )
    assert (outside / "victim").read_bytes() == b"whole"
    assert (target / "dir/victim").read_bytes() == (target / "file").read_bytes() == b"x"


def test_modes_are_masked(tmp_path: Path) -> None:
    unpack(tmp_path, [entry(Entry(b"s", mode=0o6755), b"x") + entry(Entry(b"d/", b"5", mode=0o3777)) + END])
    assert (tmp_path / "s").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "d").stat().st_mode & 0o7777 == 0o777


def test_broken_archives(tmp_path: Path) -> None:
    good = entry(Entry(b"f"), b"content") + entry(Entry(b"h", size=1 << 30, data=[(4096, 3)]), b"abc") + END
    for n in range(0, len(good) - 1024, 100):
        target = tmp_path / str(n)
        target.mkdir()
        with pytest.raises(DataLossError):
            unpack(target, [good[:n]])
        assert not list(target.rglob(".dsec-*"))
    huge = header(Entry(b"h", size=1 << 62, data=[]))
    overlap = entry(Entry(b"h", size=100, data=[(50, 10), (40, 10)]), bytes(20))
    beyond = entry(Entry(b"h", size=100, data=[(95, 10)]), bytes(10))
    many = _block(b"x", b"x", 0, 0, 0, 1 << 21, 0)
    for bad in (huge, overlap, beyond, many, b"x" * 512, header(Entry(b"c", kind=b"3"))):
        with pytest.raises(DataLossError):
            unpack(tmp_path, [bad + END])


def test_hostile_bytes(tmp_path: Path) -> None:
    """Nothing but DataLossError or an error of the file system comes of broken bytes, and nothing outside is made."""
    target = tmp_path / "target"
    target.mkdir()
    good = (
        entry(Entry(b"a/" + LONG.encode(), mtime_ns=5), b"content")
        + entry(Entry(b"h", size=1 << 20, data=[(4096, 3)]), b"abc")
        + sym(b"l", b"a")
        + END
    )
    rng = random.Random(7)
    for _ in range(1500):
        data = bytearray(good)
        at = rng.randrange(len(data) // 512) * 512
        for _ in range(rng.randrange(1, 4)):
            data[at + rng.randrange(512)] = rng.choice(b"\0/.0179 =\n\xff")
        if rng.random() < 0.7:  # with a right checksum
            block = data[at : at + 512]
            total = sum(block) - sum(block[148:156]) + 256
            data[at + 148 : at + 156] = b"%06o\0 " % (total & 0o777777)
        try:
            unpack(target, [bytes(data)])
        except (DataLossError, OSError, StopIteration):
            pass
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_download_names(tmp_path: Path) -> None:
    def put(local: Path, data: bytes) -> None:
        d = Download(local, outside_links=False)
        sink, end = d.begin()
        r = Reader(sink)
        try:
            r.feed(data)
            r.finish()
        except BaseException:
            end(False)
            raise
        end(True)

    file = entry(Entry(b"name", mode=0o600), b"x") + END
    put(tmp_path / "new" / "other", file)
    assert (tmp_path / "new" / "other").read_bytes() == b"x"
    put(tmp_path / "new", file)
    assert (tmp_path / "new" / "name").read_bytes() == b"x"
    tree = (
        entry(Entry(b"top/", b"5", mode=0o711))
        + entry(Entry(b"top/f"), b"y")
        + entry(Entry(b"top/g", LINK, link=b"top/f"))
        + END
    )
    put(tmp_path / "tree", tree)
    assert (tmp_path / "tree" / "g").read_bytes() == b"y"
    assert (tmp_path / "tree").stat().st_mode & 0o777 == 0o711
    for bad in (
        entry(Entry(b"top/", b"5")) + entry(Entry(b"else"), b"x") + END,
        entry(Entry(b"top/", b"5")) + entry(Entry(b"top/f", LINK, link=b"else")) + END,
        entry(Entry(b"one"), b"x") + entry(Entry(b"two"), b"x") + END,
        entry(Entry(b"../name"), b"x") + END,
        entry(Entry(b".."), b"x") + END,
    ):
        with pytest.raises(DataLossError):
            put(tmp_path / "bad" / "local", bad)
    assert not (tmp_path / "name").exists()


def test_sockets_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("s")
        packed = Packed()
        list(Packer(packed).tree(os.fsencode(tmp_path)))
    assert (packed.entries, packed.skipped) == (0, 1)


def test_kinds() -> None:
    assert (FILE, FIFO) == (b"0", b"6")
