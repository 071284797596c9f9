"""Images of many makers: what is not in them must not be needed by the platform. One without a shell is in test_lifecycle.py."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_layers import add_file, entry, environment

import libdsec

BUSYBOX = Path("/bin/busybox").read_bytes()
APPLETS = "sh ls cat id echo mkdir sleep wc env grep cut".split()
STORE = "nix/store/0b2kg3nnvhkznq4bkmbnhw3kdk2avyii-busybox-1.37/bin"


def link(tar: tarfile.TarFile, path: str, to: str) -> None:
    info = entry(path, tarfile.SYMTYPE)
    info.linkname = to
    tar.addfile(info)


def alpine(tar: tarfile.TarFile) -> None:
    """busybox and links to it, /etc with few files, no bash, no glibc."""
    add_file(tar, "bin/busybox", BUSYBOX)
    for applet in APPLETS:
        link(tar, f"bin/{applet}", "/bin/busybox")
    add_file(tar, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nguest:x:405:100:guest:/dev/null:/sbin/nologin\n")
    add_file(tar, "etc/group", b"root:x:0:root\nusers:x:100:\n")


def nix(tar: tarfile.TarFile) -> None:
    """As nixos/nix: /bin has sh alone, a link into the store, where all else is, found through PATH."""
    add_file(tar, f"{STORE}/busybox", BUSYBOX)
    for applet in APPLETS:
        link(tar, f"{STORE}/{applet}", "busybox")
    link(tar, "bin/sh", f"/{STORE}/sh")
    add_file(tar, "etc/passwd", b"root:x:0:0::/root:/noshell\n")


def of_a_user(tar: tarfile.TarFile) -> None:
    """What an image with USER looks like: its own home, root's files closed to it."""
    alpine(tar)
    home = entry("home/app", tarfile.DIRTYPE)
    home.uid = home.gid = 1000
    tar.addfile(home)
    secret = entry("root/secret")
    secret.mode = 0o600
    tar.addfile(secret)


@pytest.fixture
def make(platform, tmp_path):
    def make(name: str, fill: Callable[[tarfile.TarFile], None]):
        return environment(platform, "image", name, fill, tmp_path)

    return make


async def test_alpine(platform, args, make):
    with make("alpine-like:1", alpine):
        async with platform.client() as client, await client.run_container(replace(args, container_image="alpine-like:1")) as s:
            r = await s.run_shell("id -u; echo $0; echo text >/tmp/f && cat /tmp/f; ls /proc/self/fd | wc -l", check=True)
            assert r.stdout.startswith("0\n") and "\ntext\n" in r.stdout, r
            r = await s.run_shell("id -u", user="guest", check=True)
            assert r.stdout == "405\n", r
            await s.write_file("/srv/deep/file", b"made with its directories", make_parents=True)
            assert await s.read_file("/srv/deep/file") == b"made with its directories"


async def test_nix(platform, args, make):
    with make("nix-like:1", nix):
        path = {"PATH": f"/{STORE}"}
        async with platform.client() as client, await client.run_container(replace(args, container_image="nix-like:1")) as s:
            r = await s.exec(["echo", "found"], env=path, check=True)
            assert r.stdout == "found\n", r
            r = await s.run_shell("wc -c <$(env | grep ^PATH= | cut -c6-)/busybox", env=path, check=True)
            assert r.stdout == f"{len(BUSYBOX)}\n", r
            with pytest.raises(libdsec.NotFoundError):
                await s.exec(["wc"])


async def test_image_of_a_user(platform, args, tmp_path):
    """The image's USER and WORKDIR hold, and root's files are closed to it."""
    archive = tmp_path / "user.tar"
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        of_a_user(tar)
    platform.dsec("image", "create", "user-like:1", "--from-tar", archive, "--user", "1000:1000", "--workdir", "/home/app")
    try:
        async with platform.client() as client, await client.run_container(replace(args, container_image="user-like:1")) as s:
            r = await s.run_shell("id -u; pwd; echo x >here && cat here; cat /root/secret 2>&1 || echo closed", check=True)
            assert r.stdout.split("\n")[0] == "1000" and "/home/app\nx\n" in r.stdout and r.stdout.endswith("closed\n"), r
            assert (await s.run_shell("id -u", user="root", check=True)).stdout == "0\n"
    finally:
        platform.dsec("image", "rm", "user-like:1")
