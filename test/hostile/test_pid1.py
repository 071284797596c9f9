"""aether is PID 1 beside root's commands: nothing they do reads it, changes it or stops it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from attacked import ATTACKS, Box, reason

REFUSED = {"EPERM", "EACCES", "EROFS", "ENOENT", "EINVAL", "ESRCH"}
HARMLESS = ("pidfd_open", "/wchan")  # a name for it, and the 0 that the kernel shows


def test_cannot_be_traced_read_or_limited(box: Box) -> None:
    tried = box.attack("pid1")
    assert len(tried) > 100
    got = {(name, result) for name, result in tried if result not in REFUSED and not name.endswith(HARMLESS)}
    assert not got
    box.assert_well()


def test_signals_of_every_kind_change_nothing(box: Box) -> None:
    commands = [box.sandbox.start(f"sleep 0.{i}; seq 20000; echo done {i} >&2; exit {i}") for i in range(1, 6)]
    attacker = threading.Thread(target=box.attack, args=["signals"])
    attacker.start()
    try:
        for i, command in enumerate(commands, 1):
            r = command.wait()
            assert (r.exit_code, r.signal, r.stderr) == (i, 0, f"done {i}\n")
            assert r.stdout == "".join(f"{n}\n" for n in range(1, 20001))
    finally:
        attacker.join()
    box.assert_well()


def test_has_no_program_and_no_socket_inside(box: Box) -> None:
    found = box.out("find / -xdev \\( -name '*aether*' -o -name '*dsec*' \\) -not -path '/proc/*' 2>/dev/null; true")
    assert found == ""
    assert box.out("grep -c . /proc/net/unix") == "1"  # its heading
    mounts = box.out("cat /proc/self/mountinfo")
    assert "aether" not in mounts and "/run/dsec" not in mounts
    assert box.sh("cat /proc/1/exe || cp /proc/1/exe /tmp/aether").exit_code != 0


def test_commands_inherit_three_descriptors(box: Box) -> None:
    code = "import os; print(sorted(int(f) for f in os.listdir('/proc/self/fd')))"
    assert box.sandbox.exec(["python3", "-c", code]).stdout == "[0, 1, 2, 3]\n"  # 3 is the listing itself
    assert box.out("for f in 0 1 2; do readlink /proc/self/fd/$f; done | sed 's/:.*//' | sort -u") == "/dev/null\npipe"


@pytest.mark.parametrize("held", range(10))
def test_what_it_has_open_leads_nowhere(box: Box, held: int) -> None:
    """A path through aether's own descriptors, asked for by the caller or put in its way by a link."""
    link, deep = f"/tmp/held{held}", f"/proc/self/fd/{held}" + "/.." * 8
    box.out(f"ln -sfn /proc/self/fd/{held} {link}; ln -sfn {deep}/etc/passwd {link}.file")
    for path in (f"{deep}/etc/passwd", f"{link}/../../../../../../../../etc/passwd", f"{link}.file"):
        assert reason(lambda: box.sandbox.read_file(path)) in {"invalid_request", "file_not_found", "not_directory"}
    for path in (f"/proc/self/fd/{held}/new", f"{link}/new"):
        assert reason(lambda: box.sandbox.write_file(path, b"x", make_parents=True)) != "ok"
    for cwd in (f"/proc/self/fd/{held}", link, deep, f"/proc/1/fd/{held}"):
        assert reason(lambda: box.sh("pwd", cwd=cwd)) == "workdir_not_found"


@pytest.fixture
def marker() -> Iterator[Path]:
    """A program of the host that everybody there may execute."""
    with TemporaryDirectory(dir="/tmp") as name:
        program = Path(name) / "marker"
        program.write_text("#!/bin/sh\necho host\n")
        program.chmod(0o755)
        program.parent.chmod(0o755)
        yield program


def test_programs_are_the_sandboxs_own(box: Box, marker: Path) -> None:
    """The child still has aether's descriptors when it looks up the program's path."""
    for held in range(8):
        for up in range(4, 10):
            path = f"/proc/self/fd/{held}" + "/.." * up + str(marker)
            assert reason(lambda: box.sandbox.exec([path])) in {"program_not_found", "program_not_executable"}, path


def test_its_own_program_gives_nothing(box: Box) -> None:
    """It may be executed, through the child's own link, and then does nothing but end."""
    assert reason(lambda: box.sandbox.read_file("/proc/self/exe")) == "invalid_request"
    r = box.sandbox.exec(["/proc/self/exe"], timeout=60)
    assert r.exit_code == 1 and "panic" not in r.stderr
    box.assert_well()


def test_what_is_preloaded_or_replaced_is_not_its_business(new_box) -> None:
    with new_box() as box:
        running = box.sandbox.start("sleep 1; echo undisturbed")
        box.out(
            "echo /tmp/evil.so > /etc/ld.so.preload; printf '#!%s flood 1\\n' /opt/attacks > /tmp/evil; chmod 755 /tmp/evil;"
            "cp --remove-destination /tmp/evil /bin/bash; printf 'root::77:77:evil:/evil:/evil\\n' > /etc/passwd; rm /etc/group"
        )
        box.sandbox.write_file("/tmp/a", b"1")
        assert box.sandbox.read_file("/tmp/a") == b"1"
        assert running.wait().stdout == "undisturbed\n"
        assert box.sandbox.exec([ATTACKS], user="0:0").exit_code == 2  # a program without the sandbox's loader or shell
        r = box.sandbox.exec(["/bin/sh", "-c", "id -u"], user="0:0", timeout=60)
        assert r.stdout == "0\n"
        assert box.sandbox.run_shell("echo hello", user="0:0").exit_code == 2  # the replaced shell's own business


def test_accounts_of_a_replaced_passwd(new_box) -> None:
    with new_box() as box:
        for target in ("/proc/self/mem", "/dev/zero", "/proc/kmsg", "/etc", "/tmp/fifo", "/nowhere"):
            box.out(f"mkfifo /tmp/fifo 2>/dev/null; rm -rf /etc/passwd /etc/group; ln -s {target} /etc/passwd; ln -s {target} /etc/group")
            assert box.out("id -u") == "0"
            assert box.out("id -u", user="1234:5") == "1234"
            assert reason(lambda: box.sh("true", user="bob")) == "user_not_found"
        box.python("import os; [os.unlink('/etc/' + f) for f in ('passwd', 'group')]\nopen('/etc/passwd', 'w').write('a::0:0:::\\n' * 300000)\nopen('/etc/group', 'w').write('a::0:\\n' * 300000)\n")
        for _ in range(5):
            assert box.out("touch /etc/passwd /etc/group; echo fine", user="0") == "fine"
        for user in ("65536", "4294967295", "0:99999999", "4294967296"):
            assert reason(lambda: box.sh("true", user=user)) != "ok"
        box.assert_well()
