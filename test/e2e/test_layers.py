"""What sandboxes are composed of: layers mounted once, covering each other, writable everywhere."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from platform_under_test import TOOLKIT, WORKSPACE, Platform

OPAQUE = {"SCHILY.xattr.trusted.overlay.opaque": "y"}


def entry(path: str, kind: bytes = tarfile.REGTYPE, **headers: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type, info.mode, info.pax_headers = kind, 0o755, headers
    return info


def add_file(tar: tarfile.TarFile, path: str, data: bytes) -> None:
    info = entry(path)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


@contextmanager
def environment(platform: Platform, kind: str, name: str, fill: Callable[[tarfile.TarFile], None], tmp_path: Path) -> Iterator[None]:
    archive = tmp_path / f"{kind}.tar"
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        fill(tar)
    platform.dsec(kind, "create", name, "--from-tar", archive)
    try:
        yield
    finally:
        platform.dsec(kind, "rm", name)


def layer_mounts(platform: Platform) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if re.search(r" - erofs ", line) and str(platform.run) in line]


async def test_layers_are_mounted_once(platform, args):
    """However many sandboxes stand on a layer, the host has one mount of it, and keeps it for the next one."""
    async with platform.client() as client:
        three = replace(args, workspace=WORKSPACE, toolkits=[TOOLKIT])
        first = await client.run_container(three)
        mounts = layer_mounts(platform)
        assert len(mounts) >= 3
        assert len(set(mounts)) == len(mounts)
        others = [s async for s in client.run_containers(three, 5)]
        try:
            assert layer_mounts(platform) == mounts
            for s in [first, *others]:
                r = await s.run_shell("rg --version | head -1; ls /workspace/sqlparse/pyproject.toml")
                assert re.fullmatch(r"ripgrep 13\.\S+\n/workspace/sqlparse/pyproject.toml\n", r.stdout), r
        finally:
            for s in [first, *others]:
                await s.stop()


def hide(tar: tarfile.TarFile) -> None:
    """What overlayfs has of a tree that was changed: it takes away from the base, or puts something in its place."""
    tar.addfile(entry("etc/os-release", tarfile.CHRTYPE))  # a file is gone
    tar.addfile(entry("usr/share/perl5", tarfile.CHRTYPE))  # a directory is gone
    tar.addfile(entry("usr/share/bash-completion", tarfile.DIRTYPE, **OPAQUE))  # a directory is new: nothing below shows through
    add_file(tar, "usr/share/bash-completion/ours", b"ours\n")
    add_file(tar, "etc/issue", b"from the workspace\n")


async def test_whiteouts(platform, args, tmp_path):
    with environment(platform, "workspace", "hides:1", hide, tmp_path):
        async with platform.client() as client, await client.run_container(replace(args, workspace="hides:1")) as s:
            r = await s.run_shell("ls /etc/os-release /usr/share/perl5; ls -A /usr/share/bash-completion; cat /etc/issue")
            assert r.stdout == "ours\nfrom the workspace\n"
            assert r.stderr.count("No such file or directory") == 2, r.stderr
            # What is hidden can be made anew.
            r = await s.run_shell("mkdir /usr/share/perl5 && echo new >/usr/share/perl5/x && echo new >/etc/os-release && ls -A /usr/share/perl5 && cat /etc/os-release")
            assert r.stdout == "x\nnew\n", r
        async with platform.client() as client, await client.run_container(args) as s:
            assert (await s.run_shell("cat /etc/os-release /usr/share/perl5/* >/dev/null 2>&1; test -s /etc/os-release && echo there")).stdout == "there\n"


async def test_writable_everywhere(platform, args):
    """Tools write into their own tree, whichever layer it came from; files of all layers can be changed, moved and removed."""
    script = """set -e
    for d in / /etc /usr/lib /opt/ripgrep/bin /workspace/sqlparse/sqlparse /var/lib /root /tmp /dev/shm; do
      echo x >$d/new; rm $d/new; mkdir $d/newdir; rmdir $d/newdir
    done
    echo '# changed' >>/workspace/sqlparse/pyproject.toml
    mv /opt/ripgrep/bin/rg /opt/ripgrep/bin/moved
    rm -r /usr/share/python3
    chmod 700 /workspace && chown -R nobody /workspace/sqlparse/sqlparse && ln /etc/passwd /etc/linked
    stat -c %U /workspace/sqlparse/sqlparse/sql.py
    ls -d /usr/share/python3 || tail -1 /workspace/sqlparse/pyproject.toml"""
    changes = {"workspace": WORKSPACE, "toolkits": [TOOLKIT]}
    async with platform.client() as client, await client.run_container(replace(args, **changes)) as s:
        r = await s.run_shell(script)
        assert (r.stdout, r.exit_code) == ("nobody\n# changed\n", 0), r
        async with await client.run_container(replace(args, **changes)) as other:
            r = await other.run_shell("stat -c %U /workspace/sqlparse/sqlparse/sql.py; ls -d /usr/share/python3 /opt/ripgrep/bin/rg; grep -c changed /workspace/sqlparse/pyproject.toml")
            assert r.stdout == "root\n/opt/ripgrep/bin/rg\n/usr/share/python3\n0\n", r


async def test_environment_in_use_is_replaced_and_removed(platform, args, tmp_path):
    """A name is moved or removed: sandboxes that stand on its layers keep them."""
    with environment(platform, "workspace", "moves:1", lambda tar: add_file(tar, "what", b"old\n"), tmp_path):
        async with platform.client() as client:
            async with await client.run_container(replace(args, workspace="moves:1")) as old:
                archive = tmp_path / "new.tar"
                with tarfile.open(archive, "w") as tar:
                    add_file(tar, "what", b"new\n")
                platform.dsec("workspace", "create", "moves:1", "--from-tar", archive)
                async with await client.run_container(replace(args, workspace="moves:1")) as new:
                    assert await new.read_file("/what") == b"new\n"
                assert await old.read_file("/what") == b"old\n"
                pinned = old.info.workspace
                async with await client.run_container(replace(args, workspace=pinned)) as same:
                    assert await same.read_file("/what") == b"old\n"


@pytest.mark.parametrize("name", ["../x", "/x", "a//b:1", "A:1", "x:", "x:../y", "x:y:z", "x\n:1", "é:1", "x" * 300])
def test_names_that_are_none(platform, name, tmp_path):
    before = platform.dsec("workspace", "ls", "-q").stdout
    with tarfile.open(tmp_path / "t.tar", "w"):
        pass
    done = platform.dsec("workspace", "create", name, "--from-tar", tmp_path / "t.tar", check=False)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("dsec: ")
    assert platform.dsec("workspace", "ls", "-q").stdout == before


@pytest.mark.parametrize("path", ["../escape", "/../../escape", "a/../../escape"], ids=["up", "absolute and up", "down and up"])
async def test_paths_that_leave_the_layer(platform, args, tmp_path, path):
    """An entry of an archive lands below the layer's root, or the archive is refused."""
    archive = tmp_path / "t.tar"
    with tarfile.open(archive, "w") as tar:
        add_file(tar, "kept", b"x")
        add_file(tar, path, b"x")
    done = platform.dsec("workspace", "create", "leaves:1", "--from-tar", archive, check=False)
    assert not Path("/escape").exists()
    assert not (platform.data.parent / "escape").exists()
    if done.returncode == 0:
        async with platform.client() as client, await client.run_container(replace(args, workspace="leaves:1")) as s:
            assert (await s.run_shell("ls -d /kept")).stdout == "/kept\n"
        platform.dsec("workspace", "rm", "leaves:1")
    else:
        assert done.stderr.startswith("dsec: ")
