"""The caller's reads and writes of files, where the sandbox has prepared the place."""

from __future__ import annotations

import threading

import pytest
from attacked import ATTACKS, Box, reason

from libdsec import DSecError


def test_what_is_no_file(box: Box) -> None:
    box.out("cd /tmp; mkfifo fifo; mkdir -p dir; ln -sfn self self; python3 -c \"import socket; socket.socket(1).bind('/tmp/socket')\"")
    box.out("cd /tmp; ln -sfn /dev/zero zero; ln -sfn /proc/self/mem mem; ln -sfn /proc/kmsg kmsg; ln -sfn /dev/tty tty")
    for name in "fifo socket zero self mem kmsg tty".split():
        assert reason(lambda: box.sandbox.read_file(f"/tmp/{name}")) == "invalid_request", name
    for name in "fifo socket zero self".split():
        assert reason(lambda: box.sandbox.write_file(f"/tmp/{name}", b"x")) == "invalid_request", name
    assert reason(lambda: box.sandbox.read_file("/tmp/dir")) == "is_directory"
    assert reason(lambda: box.sandbox.write_file("/tmp/dir", b"x")) == "is_directory"
    for path in ("/proc/1/environ", "/proc/self/environ", "/proc/1/mem", "/proc/cmdline", "/sys/class/net/lo/mtu"):
        assert reason(lambda: box.sandbox.read_file(path)) in {"invalid_request", "permission_denied"}, path
    for path in ("/proc/1/mem", "/proc/self/comm", "/proc/sys/kernel/core_pattern", "/sys/x", "/dev/null", "/dev/new"):
        assert reason(lambda: box.sandbox.write_file(path, b"x")) in {"invalid_request", "permission_denied", "read_only", "file_not_found"}, path
    box.assert_well()


def test_holes_without_end(box: Box) -> None:
    """A part of a file of 8 EiB is as quick as any, and its rest can be left."""
    box.out("truncate -s 9223372036854775807 /tmp/holes || truncate -s 7E /tmp/holes")
    assert box.sandbox.read_file("/tmp/holes", offset=1 << 62, length=10) == bytes(10)
    with box.sandbox.open_read("/tmp/holes") as reader:
        assert not any(next(reader))
    box.assert_well()


def test_a_link_out_is_a_link_within(box: Box) -> None:
    box.out("cd /tmp; ln -sfn /../../../../etc/hostname up; ln -sfn ../../../../../../../../etc/hostname up2")
    want = box.out("cat /etc/hostname").encode() + b"\n"
    assert box.sandbox.read_file("/tmp/up") == box.sandbox.read_file("/tmp/up2") == want
    assert box.sandbox.read_file("/../../../../../../etc/hostname") == want


def test_rights_of_the_named_user(box: Box) -> None:
    """Also where a link leads past a directory that the user may not enter."""
    box.out("rm -rf /s; mkdir -m 700 /s; echo secret > /s/f; chmod 666 /s/f; mkdir -m 777 /open; ln -sfn /s/f /open/link; ln -sfn /s /open/dir")
    for path in ("/s/f", "/open/link", "/open/dir/f"):
        assert reason(lambda: box.sandbox.read_file(path, user="1000")) == "permission_denied"
        assert reason(lambda: box.sandbox.write_file(path, b"x", user="1000")) == "permission_denied"
    assert reason(lambda: box.sandbox.write_file("/open/dir/new/f", b"x", user="1000", make_parents=True)) == "permission_denied"
    assert reason(lambda: box.sh("pwd", user="1000", cwd="/open/dir")) == "workdir_not_found"
    assert box.out("cat /s/f; ls /s") == "secret\nf"
    box.sandbox.write_file("/open/mine", b"x", user="1000")
    assert box.out("stat -c '%u %g %a' /open/mine") == "1000 1000 644" or box.out("stat -c '%u' /open/mine") == "1000"


REFUSED = {"permission_denied", "invalid_request", "file_not_found", "read_only"}


@pytest.mark.parametrize("target", ["/proc/self/fd/5/../../../../../../etc/passwd", "/s2/f", "/dev/zero", "/tmp/swapfifo"])
def test_a_name_that_changes_all_the_time(box: Box, target: str) -> None:
    """A file and a link change places while the caller, as a user, reads and writes it: one or the other, or refused."""
    box.out("rm -rf /s2; mkdir -m 700 /s2; echo secret > /s2/f; chmod 666 /s2/f; mkfifo /tmp/swapfifo 2>/dev/null; true")
    for _ in range(5):
        box.out("rm -rf /w; mkdir -m 777 /w; printf mine > /w/file; chmod 666 /w/file")
        attacker = box.sandbox.start([ATTACKS, "swap", "/w/name", "/w/file", target])
        try:
            seen: set[bytes] = set()
            errors: set[str] = set()
            tries = 0
            while tries < 30 or (not (seen and errors & REFUSED) and tries < 3000):  # until the file and the link have both been met
                tries += 1
                try:
                    seen.add(box.sandbox.read_file("/w/name", user="1000"))
                except DSecError as e:
                    errors.add(e.reason)
            assert seen == {b"mine"}, (seen, errors)
            assert errors & REFUSED, errors
            for _ in range(10):  # after the reads: a write may put its file in the place of the link, and then there are two files
                errors.add(reason(lambda: box.sandbox.write_file("/w/name", b"mine", user="1000")))
            assert errors <= {"ok", *REFUSED}, errors
            assert box.out("cat /s2/f") == "secret"
        finally:
            attacker.kill()
    box.assert_well()


def test_strange_names(box: Box) -> None:
    names = ["new\nline", "tab\t", " ", "-rf", "..x", "ü€😀", "a" * 255, "%2e%2e", "a;b", "a?b#c", "&user=1000", "\\"]
    for name in names:
        box.sandbox.write_file(f"/tmp/n/{name}", name.encode(), make_parents=True)
        assert box.sandbox.read_file(f"/tmp/n/{name}") == name.encode()
    for raw in (b"/tmp/n/\xff\xfe", b"/tmp/n/\xc3", b"/tmp/n/\xed\xa0\x80"):
        assert reason(lambda: box.sandbox.write_file(raw, b"x")) in {"ok", "invalid_path", "invalid_request"}
    assert reason(lambda: box.sandbox.write_file("/tmp/n/" + "a" * 256, b"x")) == "name_too_long"
    assert reason(lambda: box.sandbox.write_file("/tmp" + "/d" * 3000, b"x", make_parents=True)) in {"invalid_request", "invalid_path", "name_too_long"}
    box.assert_well()


def test_hard_links_and_attributes(box: Box) -> None:
    """Replacing one name leaves the other what it was."""
    box.out("cd /tmp; rm -f h1 h2; printf old > h1; ln h1 h2; chmod 4755 h1")
    box.sandbox.write_file("/tmp/h1", b"new")
    assert (box.sandbox.read_file("/tmp/h1"), box.sandbox.read_file("/tmp/h2")) == (b"new", b"old")


def test_a_directory_that_vanishes_during_a_write(box: Box) -> None:
    box.out("mkdir -p /tmp/gone")

    def content():
        yield bytes(1 << 20)
        box.out("rm -rf /tmp/gone")
        yield bytes(1 << 20)

    assert reason(lambda: box.sandbox.write_file("/tmp/gone/file", content())) == "file_not_found"
    box.assert_well()


def test_many_transfers_at_once(box: Box) -> None:
    results: list[str] = []
    box.sandbox.write_file("/tmp/one", bytes(1 << 20))
    threads = [threading.Thread(target=lambda: results.append(reason(lambda: box.sandbox.read_file("/tmp/one")))) for _ in range(100)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert set(results) <= {"ok", "sandbox_resources"} and "ok" in results
    box.assert_well()
