"""A sandbox uses up all that it is given, and is answered all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacked import ATTACKS, reason, wait_for
from platform_under_test import Platform

from libdsec import DSecError, State


def resident(pid: int) -> int:
    """A process's own memory, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def test_fork_bomb(new_box) -> None:
    with new_box(pids_limit=128) as box:
        box.start("bomb")
        wait_for("no more processes", lambda: reason(lambda: box.sh("true")) == "sandbox_resources")
        box.sandbox.write_file("/tmp/a", b"still")  # needs no process
        assert box.sandbox.read_file("/tmp/a") == b"still"
        for command in box.sandbox.list_commands():
            box.sandbox.kill(command.command_id)
        wait_for("it was killed as a tree", lambda: reason(lambda: box.sh("true")) == "ok")
        box.assert_well()


def test_ten_thousand_orphans(new_box) -> None:
    with new_box(pids_limit=64) as box:
        assert box.attack("orphans", 10_000) == [("orphans", "ok")]
        wait_for("all were reaped", lambda: box.out("grep -l 'State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l") == "0")
        box.assert_well()


def test_kill_everything(new_box) -> None:
    with new_box() as box:
        other = box.sandbox.start("sleep 600")
        wait_for("it runs", lambda: "sleep" in box.out("cat /proc/[0-9]*/comm"))
        r = box.sh("kill -9 -1")
        assert (r.exit_code, r.signal) in {(137, 9), (0, 0)}  # the kernel spares who asks, bash may say so
        assert other.wait().signal == 9
        box.assert_well()


def test_stopping_everything_holds_up_nothing(new_box) -> None:
    """A child of aether that is stopped before it has executed would stop aether with it."""
    with new_box(cpu_cores_limit=2) as box:
        attacker = box.start("stop")
        for _ in range(4):  # each ends: well, by its timeout, or killed where it was stopped
            r = box.sandbox.run_shell("echo fine", timeout=2)
            assert r.stdout == "fine\n" or r.timed_out or r.signal == 9, r
        box.sandbox.write_file("/tmp/a", b"1")
        attacker.kill()
        attacker.wait()
        box.assert_well()


def test_a_lease_on_a_program_holds_up_nothing(new_box) -> None:
    with new_box() as box:
        box.out("cp /bin/true /tmp/leased")
        holder = box.sandbox.start([ATTACKS, "lease", "/tmp/leased"])
        wait_for("the lease", lambda: holder.poll() and box.out("grep -c LEASE /proc/locks; true") != "0")
        r = box.sandbox.exec(["/tmp/leased"])
        assert r.signal == 9 or r.exit_code == 0
        # A file is opened without waiting for anybody.
        box.out("echo content > /tmp/leased2")
        box.sandbox.start([ATTACKS, "lease", "/tmp/leased2"])
        wait_for("both leases", lambda: box.out("grep -c LEASE /proc/locks; true") == "2" or r.signal == 9)
        assert reason(lambda: box.sandbox.read_file("/tmp/leased2")) in {"ok", "sandbox_resources"}
        box.assert_well()


def test_pipes_of_others_kept_open(platform: Platform, new_box) -> None:
    """One process opens the outputs of all commands and keeps them. Costs bounded memory of aether's."""
    with new_box() as box:
        aether = platform.aether_pid(box.sandbox.id)
        box.start("hoard")
        before = resident(aether)
        for _ in range(40):
            assert box.sandbox.exec(["/bin/sleep", "0.01"], timeout=60).exit_code == 0
        assert resident(aether) - before < 16 << 20
        box.assert_well()


def test_memory(new_box) -> None:
    with new_box(memory_limit_mb=64) as box:
        other = box.sandbox.start("sleep 1; echo fine")
        r = box.sandbox.exec(["python3", "-c", "b = bytearray(1 << 30); print(len(b))"], timeout=60)
        assert r.signal == 9 and r.oom_killed
        assert other.wait().stdout == "fine\n"
        box.assert_well()


def test_memory_of_files(new_box) -> None:
    """/dev/shm and queues count as memory, and are bounded by it."""
    with new_box(memory_limit_mb=64) as box:
        r = box.sh("cd /dev/shm; head -c 200M /dev/zero > big; rm -f big")
        assert r.signal == 9 or "No space" in r.stderr or r.exit_code == 137 or "Killed" in r.stderr, r
        box.out("rm -f /dev/shm/*")
        code = "n = 0\nimport os\ntry:\n  while n < 100000:\n    open(f'/dev/mqueue/q{n}', 'w'); n += 1\nexcept OSError: pass\nprint(n)"
        assert int(box.python(code)) < 100000
        box.assert_well()


def test_files_in_memory_are_not_aethers(new_box) -> None:
    """What aether wrote there would be charged to it until it is killed, also behind a link."""
    with new_box() as box:
        box.out("touch /dev/shm/x; ln -s /dev/shm/x /tmp/result; ln -s /dev/shm /tmp/dir")
        for path in ("/dev/shm/big", "/tmp/result", "/tmp/dir/big"):
            for _ in range(3):
                assert reason(lambda: box.sandbox.write_file(path, bytes(32 << 20))) == "invalid_request"
        assert box.out("ls -A /dev/shm; stat -c %s /dev/shm/x") == "x\n0"
        box.sandbox.write_file("/tmp/big", bytes(200 << 20))  # far more than aether's memory, on a disk
        assert box.out("stat -c %s /tmp/big") == str(200 << 20)
        box.assert_well()


def test_disk(new_box) -> None:
    with new_box(disk_limit_mb=64) as box:
        r = box.sh("head -c 200M /dev/zero > /tmp/big")
        assert r.exit_code != 0 and ("quota" in r.stderr or "space" in r.stderr), r
        assert reason(lambda: box.sandbox.write_file("/tmp/more", bytes(1 << 20))) == "quota_exceeded"
        r = box.sh("i=0; while : > /tmp/f$i; do i=$((i+1)); done 2>/dev/null; echo $i")  # and by files without content
        assert r.exit_code == 0
        assert box.out("rm -f /tmp/big /tmp/f*; echo freed") == "freed"
        wait_for("there is room again", lambda: reason(lambda: box.sandbox.write_file("/tmp/more", bytes(1 << 20))) == "ok")
        box.assert_well()


@pytest.mark.parametrize("piece", [1, 65536])
def test_output_without_end(platform: Platform, new_box, piece: int) -> None:
    """Whatever the amount, what is kept is bounded: in aether, and in the edge."""
    edge = platform.edge_pid()
    assert edge is not None
    with new_box() as box:
        aether = platform.aether_pid(box.sandbox.id)
        before = {pid: resident(pid) for pid in (aether, edge)}
        flood = box.start("flood", piece)
        much = 1000 if piece == 1 else 300 << 20  # more than a stream and a sandbox may keep
        wait_for("output", lambda: flood.poll().stdout_size > much)
        assert box.out("echo beside it") == "beside it"
        grown = {pid: resident(pid) - before[pid] for pid in before}
        assert grown[aether] < 16 << 20 and grown[edge] < 96 << 20, grown
        flood.kill()
        assert flood.wait().signal == 9
        box.assert_well()


def test_everything_is_deleted(new_box) -> None:
    with new_box() as box:
        box.sh("rm -rf --no-preserve-root / 2>/dev/null")
        assert reason(lambda: box.sh("true")) == "no_shell"
        assert reason(lambda: box.sandbox.exec(["/bin/true"])) == "program_not_found"
        assert reason(lambda: box.sandbox.exec(["true"])) == "program_not_found"
        assert reason(lambda: box.sandbox.read_file("/etc/passwd")) == "file_not_found"
        assert reason(lambda: box.sh("true", cwd="/root")) == "workdir_not_found"
        box.sandbox.write_file("/new/file", b"x", make_parents=True)
        assert box.sandbox.read_file("/new/file") == b"x"
        assert box.sandbox.refresh().state is State.READY


def test_the_sandbox_of_a_flood_ends(new_box, client) -> None:
    """Delete wins, whatever runs."""
    with new_box(pids_limit=512) as box:
        for group in (("bomb",), ("flood", 1), ("stop",), ("hoard",)):
            try:
                box.start(*group)
            except DSecError:
                break  # the bomb was faster
        box.sandbox.stop()
        assert client.get_sandbox(box.sandbox.id).state in {State.STOPPED, State.FAILED}
