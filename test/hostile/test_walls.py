"""The kernel, seen from a sandbox: calls, sockets, devices, /proc, /sys, groups."""

from __future__ import annotations

import pytest
from attacked import Box


def wrong(tried: list[tuple[str, str]], *allowed: str) -> list[tuple[str, str]]:
    assert tried
    return [t for t in tried if t[1] not in allowed]


def test_calls(box: Box) -> None:
    # ENOSPC: the budget of user namespaces is none. ENOSYS: another ABI. ENOTTY: overlayfs knows no such thing.
    assert not wrong(box.attack("calls"), "EPERM", "ENOSPC", "ENOSYS", "ENOTTY")
    assert ("clone3 user", "ENOSPC") in box.attack("calls")


def test_sockets(box: Box) -> None:
    assert not wrong(box.attack("sockets"), "EAFNOSUPPORT", "EPERM", "EPROTONOSUPPORT")
    assert box.python("import socket as s; [s.socket(f, t) for f in (s.AF_INET, s.AF_INET6) for t in (1, 2)]; s.socket(1); s.socket(16, 3, 0)") == ""


def test_devices(box: Box) -> None:
    assert not wrong(box.attack("devices"), "EPERM", "EROFS", "ENOENT")
    assert box.out("ls /dev").split() == "fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero".split()
    assert box.sh("head -c 4 /dev/urandom >/dev/null && echo x >/dev/null && head -c 4 /dev/zero >/dev/null").exit_code == 0


@pytest.mark.parametrize("path", "acpi asound interrupts kcore keys kpagecgroup kpagecount kpageflags latency_stats sched_debug scsi timer_list".split())
def test_proc_masked(box: Box, path: str) -> None:
    assert box.out(f"cd /proc; if [ -d {path} ]; then ls -A {path}; elif [ -e {path} ]; then head -c 100 {path} | wc -c; else echo 0; fi") in ("", "0")


def test_recursive_read_of_proc_and_sys(box: Box) -> None:
    """Agents do it: grep -r from /. It ends or is ended, and the host and PID 1 are as before."""
    box.sandbox.run_shell("timeout 5 grep -rIs nothing_at_all /proc /sys /dev/shm; true", timeout=90)
    box.assert_well()


def test_nothing_of_proc_and_sys_can_be_written(box: Box) -> None:
    places = "/proc/sys /proc/bus /proc/irq /proc/fs /sys"
    # Writable by their mode, and not on a read-only mount, only what belongs to processes.
    found = box.out(f"for f in $(find {places} /proc/sysrq-trigger -type f 2>/dev/null); do if ( : >> $f ) 2>/dev/null; then echo $f; fi; done")
    assert found == ""
    assert box.sh("echo c > /proc/sysrq-trigger").exit_code != 0
    for key in ("kernel/core_pattern", "kernel/modprobe", "vm/drop_caches", "user/max_user_namespaces", "net/ipv4/ip_forward", "kernel/ns_last_pid"):
        assert box.sh(f"echo 1 > /proc/sys/{key}").exit_code != 0
    outside = box.out("find /proc -maxdepth 1 -type f -perm /222 2>/dev/null; true").split()
    assert {p for p in outside if box.sh(f": >> {p}").exit_code == 0} <= {"/proc/" + p for p in "kcore keys interrupts timer_list kpagecgroup kpagecount kpageflags latency_stats sched_debug".split()}


def test_control_groups_are_out_of_sight(box: Box) -> None:
    assert box.out("find / -xdev -name cgroup.procs 2>/dev/null; find /sys -name cgroup.procs; awk '$3 ~ /cgroup/' /proc/self/mounts") == ""
    paths = box.out("cut -d: -f3 /proc/self/cgroup").split()
    # Relative to aether's own group; where aether has none (pids), the path names this sandbox, as its host name does.
    assert [p for p in paths if p != "/" and not p.startswith("/../") and box.sandbox.id not in p] == []


def test_mounts(box: Box) -> None:
    """No device works anywhere, and what should be read-only is."""
    for line in box.out("cat /proc/self/mounts").splitlines():
        _, point, kind, options = line.split()[:4]
        have = set(options.split(","))
        if not (point == "/dev" or point.startswith("/dev/pts") or kind == "devpts") and not point.startswith("/proc/"):
            assert "nodev" in have, line
        if point in ("/dev", "/sys", "/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs") or point.startswith("/sys/"):
            assert "ro" in have, line


def test_chroot_leads_nowhere(box: Box) -> None:
    code = (
        "import os\nos.makedirs('/tmp/jail', exist_ok=True)\nup = os.open('/', os.O_RDONLY)\nos.chroot('/tmp/jail')\nos.fchdir(up)\n"
        "[os.chdir('..') for _ in range(64)]\nos.chroot('.')\nprint(os.stat('/').st_ino, os.path.exists('/opt/attacks'))"
    )
    assert box.python(code) == box.out("stat -c '%i True' /")


def test_no_core_is_dumped(box: Box) -> None:
    r = box.sh("ulimit -c; ulimit -c unlimited; cd /tmp; sh -c 'kill -SEGV $$'; ls /tmp | grep core")
    assert r.stdout == "0\n", r


def test_programs_with_setuid_stay_within(box: Box) -> None:
    """They work, as in every container, and root that they give is root of the sandbox."""
    box.out("cp /usr/bin/python3.11 /tmp/p; chmod 6755 /tmp/p")
    assert box.out("/tmp/p -c 'import os; print(os.geteuid(), os.getegid(), os.stat(\"/proc/1/stat\").st_uid)'", user="1000") == "0 0 65534"


def test_rights_of_a_command(box: Box) -> None:
    status = dict(line.split(":\t") for line in box.out("cat /proc/self/status").splitlines() if ":\t" in line)
    assert status["Gid"].split() == ["0"] * 4 and status["Uid"].split() == ["0"] * 4  # not aether's guard
    assert int(status["CapEff"], 16) & (1 << 24 | 1 << 21 | 1 << 13 | 1 << 12 | 1 << 16) == 0  # RESOURCE ADMIN RAW NET_ADMIN MODULE
    assert status["CapBnd"] == status["CapEff"] and status["Seccomp"] == "2"
