"""dsec cp, as somebody expects it who knows docker's: directories, archives, links, owners, and hostile content."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from platform_under_test import IMAGE, Platform


@pytest.fixture
def sandbox(platform: Platform) -> Iterator[str]:
    made = platform.dsec("run", "-d", "-m", "256m", "--ttl", "10m", IMAGE).stdout.strip()
    yield made
    platform.dsec("rm", made, check=False)


def inside(platform: Platform, sandbox: str, script: str) -> str:
    return str(platform.dsec("exec", "--shell", script, sandbox).stdout)


def tree(at: Path) -> Path:
    (at / "sub").mkdir(parents=True)
    (at / "a").write_text("content of a")
    (at / "sub" / "x").write_bytes(bytes(range(256)))
    (at / "sub" / "x").chmod(0o751)
    (at / "link").symlink_to("sub/x")
    os.link(at / "a", at / "same")
    with open(at / "holes", "wb") as f:
        f.seek(50 << 20)
        f.write(b"end")
    for name in ("sub", "sub/x"):
        os.setxattr(at / name, "user.note", b"\xff\0of a file")
    os.utime(at / "sub" / "x", ns=(10**18, 10**18 + 7))
    at.chmod(0o750)
    return at


LIST = "find . -printf '%P %y %m %s %n %l\\n' | sort"


def described(root: Path) -> str:
    return subprocess.run(LIST, shell=True, cwd=root, capture_output=True, text=True, check=True).stdout


def without_size_of_directories(text: str) -> list[str]:
    lines = (line.split(" ") for line in text.splitlines())
    return [" ".join([*f[:3], *([] if f[1] == "d" else f[3:])]) for f in lines]


def test_tree_in_and_out(platform: Platform, sandbox: str, tmp_path: Path) -> None:
    src = tree(tmp_path / "src")
    platform.dsec("cp", src, f"{sandbox}:/srv")
    want = without_size_of_directories(described(src))
    assert without_size_of_directories(inside(platform, sandbox, f"cd /srv/src && {LIST}")) == want
    assert inside(platform, sandbox, "stat -c '%u:%g %.Y' /srv/src/sub/x; du -k /srv/src/holes | cut -f1") == "0:0 1000000000.000000007\n4\n"
    attribute = "import os; print([os.getxattr('/srv/src/' + n, 'user.note') for n in ('sub', 'sub/x')] == 2 * [b'\\xff\\0of a file'])"
    assert inside(platform, sandbox, f'python3 -c "{attribute}"') == "True\n"
    platform.dsec("cp", f"{sandbox}:/srv/src", tmp_path / "back")
    assert [os.getxattr(tmp_path / "back" / n, "user.note") for n in ("sub", "sub/x")] == 2 * [b"\xff\0of a file"]
    assert without_size_of_directories(described(tmp_path / "back")) == want
    assert (tmp_path / "back" / "sub" / "x").read_bytes() == bytes(range(256))
    assert (tmp_path / "back" / "sub" / "x").stat().st_mtime_ns == 10**18 + 7
    assert (tmp_path / "back" / "holes").stat().st_blocks < 1000


@pytest.mark.parametrize(
    ("source", "target", "made"),
    [
        ("src", "/srv", "/srv/src/a"),
        ("src/", "/srv/", "/srv/src/a"),
        ("src/.", "/srv", "/srv/a"),
        ("src", "/srv/new", "/srv/new/a"),
        ("src/.", "/srv/new", "/srv/new/a"),
        ("src/a", "/srv", "/srv/a"),
        ("src/a", "/srv/b", "/srv/b"),
        ("src/link", "/srv", "/srv/link"),
    ],
)
def test_where_it_goes_in(platform: Platform, sandbox: str, tmp_path: Path, source: str, target: str, made: str) -> None:
    tree(tmp_path / "src")
    os.chdir(tmp_path)
    for _ in range(2 if target != "/srv/new" else 1):  # again over itself
        platform.dsec("cp", source, f"{sandbox}:{target}")
    assert inside(platform, sandbox, f"ls -d {made}").strip() == made


@pytest.mark.parametrize(
    ("source", "target", "made"),
    [
        ("/srv/d", ".", "d/f"),
        ("/srv/d/.", ".", "f"),
        ("/srv/d", "new", "new/f"),
        ("/srv/d/f", ".", "f"),
        ("/srv/d/f", "g", "g"),
        ("/srv/l", ".", "l"),
    ],
)
def test_where_it_goes_out(platform: Platform, sandbox: str, tmp_path: Path, source: str, target: str, made: str) -> None:
    inside(platform, sandbox, "mkdir /srv/d && echo x > /srv/d/f && ln -s d /srv/l")
    os.chdir(tmp_path)
    platform.dsec("cp", f"{sandbox}:{source}", target)
    assert os.path.lexists(tmp_path / made)
    assert os.path.islink(tmp_path / made) == (made == "l")


def test_refused(platform: Platform, sandbox: str, tmp_path: Path) -> None:
    src = tree(tmp_path / "src")
    for args, says in [
        ((src, f"{sandbox}:/etc/passwd"), "is a file"),
        ((src / "a", f"{sandbox}:/none/"), "no directory"),
        ((src, f"{sandbox}:/no/where"), "--parents"),
        ((src / "a", f"{sandbox}:/no/where"), "--parents"),
        ((f"{sandbox}:/etc", src / "a"), "is a file"),
        ((f"{sandbox}:/none", tmp_path), "there is no /none in the sandbox"),
        ((tmp_path / "none", f"{sandbox}:/srv"), f"there is no {tmp_path}/none here"),
        ((f"{sandbox}:/etc/passwd", f"{tmp_path}/none/"), "no directory"),
        ((f"{sandbox}:/etc/passwd", tmp_path / "no" / "where"), f"there is no directory {tmp_path}/no here"),
        ((f"{sandbox}:/etc", tmp_path / "no" / "where"), f"there is no directory {tmp_path}/no here"),
    ]:
        done = platform.dsec("cp", *args, check=False)
        assert done.returncode == 1 and says in done.stderr, (args, done)
    assert inside(platform, sandbox, "ls /srv; ls -d /no 2>/dev/null || echo none") == "none\n"


def test_archives(platform: Platform, sandbox: str, tmp_path: Path) -> None:
    src = tree(tmp_path / "src")
    packed = subprocess.run(["tar", "cz", "-C", tmp_path, "src"], capture_output=True, check=True).stdout
    platform.dsec("cp", "-", f"{sandbox}:/srv", input=packed, text=False)
    assert without_size_of_directories(inside(platform, sandbox, f"cd /srv/src && {LIST}")) == without_size_of_directories(described(src))
    out = platform.dsec("cp", f"{sandbox}:/srv/src", "-", text=False).stdout
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        assert {m.name.rstrip("/") for m in archive} == {"src", *(f"src/{n}" for n in ("a", "same", "link", "holes", "sub", "sub/x"))}
    done = platform.dsec("cp", "-", f"{sandbox}:/srv", input=b"no archive" * 100, text=False, check=False)
    assert done.returncode == 1 and b"archive" in done.stderr
    done = platform.dsec("cp", "-", f"{sandbox}:/srv", input=packed[: len(packed) // 2], text=False, check=False)
    assert done.returncode == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owners(platform: Platform, sandbox: str, tmp_path: Path) -> None:
    src = tree(tmp_path / "src")
    for name in ("", "a", "sub/x"):
        os.chown(src / name, 1234, 5678)
    platform.dsec("cp", "-a", src, f"{sandbox}:/srv")
    assert inside(platform, sandbox, "stat -c %u:%g /srv/src /srv/src/a /srv/src/sub/x /srv/src/sub") == "1234:5678\n" * 3 + "0:0\n"
    platform.dsec("cp", "-a", src / "a", f"{sandbox}:/srv/one")
    assert inside(platform, sandbox, "stat -c %u:%g /srv/one") == "1234:5678\n"
    platform.dsec("cp", "-a", f"{sandbox}:/srv/src", tmp_path / "back")
    assert [(tmp_path / "back" / n).stat().st_uid for n in ("", "a", "sub/x", "sub")] == [1234, 1234, 1234, 0]
    platform.dsec("cp", f"{sandbox}:/srv/src", tmp_path / "mine")
    assert (tmp_path / "mine" / "a").stat().st_uid == 0


@pytest.mark.parametrize("name", ["a b", "ü", "new\nline", "quote'\"", "back\\slash", "%41", "-dash", "\x01\x7f", "&q=1;#x", "水🍌"])
def test_names(platform: Platform, sandbox: str, tmp_path: Path, name: str) -> None:
    """C7: whatever a file is called, it is copied, alone and in a directory."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_text("x" + name)
    platform.dsec("cp", tmp_path / "d" / name, f"{sandbox}:/srv/")
    assert inside(platform, sandbox, "cat /srv/*") == "x" + name
    platform.dsec("cp", tmp_path / "d", f"{sandbox}:/srv/")
    platform.dsec("cp", f"{sandbox}:/srv/{name}", tmp_path / "one")
    platform.dsec("cp", f"{sandbox}:/srv/d", tmp_path / "all")
    assert (tmp_path / "one").read_text() == (tmp_path / "all" / name).read_text() == "x" + name


def test_hostile_tree(platform: Platform, sandbox: str, tmp_path: Path) -> None:
    """Set-user-id programs lose that bit here, links lead nowhere, and devices and pipes are left out."""
    inside(
        platform, sandbox,
        "mkdir /srv/h && cd /srv/h && cp /bin/true suid && chmod 6755 suid && ln -s / root && ln -s ../.. up && mkfifo pipe && echo x > file && mkdir d && chmod 0 d",
    )  # fmt: skip
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "file").symlink_to("../precious")
    done = platform.dsec("cp", f"{sandbox}:/srv/h/.", tmp_path / "t")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "t" / "file").read_text() == "x\n"
    assert (tmp_path / "t" / "suid").stat().st_mode & 0o7777 == 0o755
    assert os.readlink(tmp_path / "t" / "root") == "/"
    assert not (tmp_path / "t" / "pipe").exists() and "left out" in done.stderr
    # A directory here that is a link to elsewhere is not entered.
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "d").symlink_to("..")
    inside(platform, sandbox, "chmod 755 /srv/h/d && echo x > /srv/h/d/precious")
    done = platform.dsec("cp", f"{sandbox}:/srv/h/.", tmp_path / "u", check=False)
    assert done.returncode == 1
    assert (tmp_path / "precious").read_text() == "mine"


def test_many_small_files(platform: Platform, sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for i in range(3000):
        (tmp_path / "many" / str(i)).write_text(str(i))
    platform.dsec("cp", tmp_path / "many", f"{sandbox}:/srv")
    assert inside(platform, sandbox, "cd /srv/many && ls | wc -l && cat 2999") == "3000\n2999"


def test_extended_attributes(platform: Platform, sandbox: str, tmp_path: Path) -> None:
    """Those of users are kept, both ways; others would give rights here, or mean nothing, and are told of."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    for at in ("d", "d/f"):
        os.setxattr(tmp_path / at, "user.mine", b"a\0b")
    platform.dsec("cp", tmp_path / "d", f"{sandbox}:/srv/")
    assert inside(platform, sandbox, 'python3 -c \'import os; print(os.getxattr("/srv/d/f", "user.mine"))\'') == "b'a\\x00b'\n"
    inside(platform, sandbox, 'python3 -c \'import os; os.setxattr("/srv/d/f", "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))\'')
    tree = platform.dsec("cp", f"{sandbox}:/srv/d", tmp_path / "back")
    one = platform.dsec("cp", f"{sandbox}:/srv/d/f", tmp_path / "one")
    for got in (tmp_path / "back" / "f", tmp_path / "one"):
        assert os.listxattr(got) == ["user.mine"]
        assert os.getxattr(got, "user.mine") == b"a\0b"
    assert "not kept, such as security.capability" in tree.stderr and "security.capability" in one.stderr
