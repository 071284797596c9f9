"""Two sandboxes of one node: neither sees, reaches or starves the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attacked import Box

LISTEN = """
import socket, time
a = socket.socket(socket.AF_UNIX); a.bind("\\0meeting"); a.listen()
t = socket.socket(); t.bind(("127.0.0.1", 4242)); t.listen()
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("127.0.0.1", 4242))
print("listening", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def pair(new_box) -> Iterator[tuple[Box, Box]]:
    with new_box() as a, new_box() as b:
        yield a, b


def test_sockets(pair: tuple[Box, Box]) -> None:
    a, b = pair
    server = a.sandbox.start(["python3", "-c", LISTEN])
    assert next(iter(server.iter_stdout())) == b"listening\n"
    code = "import socket\nfor f, where in ((1, '\\0meeting'), (2, ('127.0.0.1', 4242))):\n  try: socket.socket(f).connect(where); print('reached')\n  except ConnectionRefusedError: print('refused')"
    assert a.python(code) == "reached\nreached"
    assert b.python(code) == "refused\nrefused"
    assert "meeting" not in b.out("cat /proc/net/unix") and "1092" not in b.out("cat /proc/net/tcp")
    server.kill()


def test_network_is_loopback_alone(pair: tuple[Box, Box]) -> None:
    a, _ = pair
    assert a.out("ls /sys/class/net") == "lo"
    assert a.out("cat /proc/net/route | wc -l") == "1"
    code = "import socket\ns = socket.socket()\ns.settimeout(2)\ntry: s.connect(('{}', 80))\nexcept OSError as e: print(e.errno)"
    for address in ("10.0.0.1", "169.254.169.254", "8.8.8.8", "172.17.0.1"):
        assert a.python(code.format(address)) == "101"  # ENETUNREACH


def test_processes_and_ids(pair: tuple[Box, Box]) -> None:
    a, b = pair
    sleeper = a.sandbox.start(["sleep", "599"])
    assert "599" not in b.out("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert all(int(p) < 100000 for p in b.out("ls /proc | grep '^[0-9]*$'").split())
    for ids in ("uid_map", "gid_map"):
        ranges = [box.out(f"cat /proc/self/{ids}").splitlines() for box in pair]
        assert [len(r) for r in ranges] == [1, 1], ranges
        (first, low, size), (second, other, _) = (map(int, r[0].split()) for r in ranges)
        assert first == second == 0 and abs(low - other) >= size, ranges
    for name in ("net", "user", "ipc", "mnt", "pid", "uts", "cgroup"):
        assert a.out(f"readlink /proc/self/ns/{name}") != b.out(f"readlink /proc/self/ns/{name}")
    sleeper.kill()


def test_shared_memory_and_queues(pair: tuple[Box, Box]) -> None:
    a, b = pair
    make = "import ctypes; l = ctypes.CDLL(None); print(l.shmget(0x4444, 4096, 0o1666), l.semget(0x4444, 1, 0o1666), l.msgget(0x4444, 0o1666))"
    find = make.replace("0o1666", "0o666")
    assert "-1" not in a.python(make)
    assert b.python(find) == "-1 -1 -1"
    a.out("touch /dev/shm/mine /dev/mqueue/mine")
    assert b.out("ls /dev/shm /dev/mqueue | grep mine; true") == ""


EXHAUST = {
    "inotify instances": "import ctypes; l = ctypes.CDLL(None)\nwhile l.inotify_init1(0) >= 0: n += 1",
    "terminals": "import os\ntry:\n  while True: os.openpty(); n += 1\nexcept OSError: pass",
    "files": "import os\ntry:\n  while True: os.open('/etc/passwd', os.O_RDONLY); n += 1\nexcept OSError: pass",
    "signals": "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [40])\nimport ctypes; l = ctypes.CDLL(None)\nwhile l.sigqueue(os.getpid(), 40, 0) == 0: n += 1",
    "pipes": "import os, fcntl\ntry:\n  while True:\n    r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20); n += 1\nexcept OSError: pass",
}
KEPT = "\nprint(n, flush=True)\nimport time\ntime.sleep(600)"
RAISE = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (r.getrlimit(r.RLIMIT_NOFILE)[1],) * 2)\nn = 0\n"


@pytest.mark.parametrize("what", EXHAUST)
def test_budgets_are_each_ones_own(pair: tuple[Box, Box], what: str) -> None:
    a, b = pair
    greedy = a.sandbox.start(["python3", "-c", RAISE + EXHAUST[what] + KEPT])
    used = int(next(iter(greedy.iter_stdout())))
    code = RAISE + EXHAUST[what] + "\nprint(n)"
    assert int(b.python(code)) >= used * 0.9 > 0
    a.assert_well()
    greedy.kill()


def test_all_terminals_of_one_are_few_of_the_nodes(pair: tuple[Box, Box]) -> None:
    used = int(pair[0].python("n = 0\n" + RAISE + EXHAUST["terminals"] + "\nprint(n)"))
    assert 16 <= used <= 128


def test_use_of_the_disk_is_not_shown(pair: tuple[Box, Box]) -> None:
    a, _ = pair
    assert a.out("ls /sys/fs /sys/block /sys/kernel /sys/module /sys/devices/system 2>/dev/null; true").replace("\n", "").count("btrfs") == 0


# For ::1, made, and for 60 s after its socket; making it counts nowhere.
FLOW_LABEL = (
    "import socket, struct\ns = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)\ns.setsockopt(41, 32, bytes(15) + b'\\1' + struct.pack('>I', 0x12345) + struct.pack('=BBHHHI', 0, 1, 1, 0, 60, 0))"
)


def test_a_range_of_ids_is_clean_for_the_next(new_box) -> None:
    """Ranges are used again, one after another, as network slots are; nothing of the former sandbox is met."""
    seen: list[str] = []
    while len(seen) < 3 or (len(set(seen)) == len(seen) and len(seen) < 50):  # until one was
        with new_box() as box:
            seen.append(box.out("awk '{print $2}' /proc/self/uid_map"))
            assert box.python("import ctypes; print(ctypes.CDLL(None).shmget(0x4545, 4096, 0o666))") == "-1"
            assert box.out("find / -xdev -name left-behind; cat /proc/net/tcp | wc -l; wc -l < /proc/net/unix").split() == ["1", "1"]
            assert box.out("wc -l < /proc/self/projid_map; wc -l < /proc/net/ip6_flowlabel").split() == ["1", "1"]
            assert box.sh("echo 5 5 5 > /proc/self/projid_map").exit_code != 0, "it can be written once, and stays in the namespace"
            box.out("touch /left-behind /tmp/left-behind /dev/shm/left-behind")
            box.python(
                "import ctypes, socket\nctypes.CDLL(None).shmget(0x4545, 4096, 0o1666)\ns = socket.socket(); s.bind(('127.0.0.1', 999)); s.listen()\n"
                "c = socket.socket(); c.connect(('127.0.0.1', 999)); s.accept()[0].close()"
            )
    assert len(set(seen)) < len(seen), "no range was used again"
    for _ in range(2):  # apart from the others, since what they do counts
        with new_box() as box:
            assert box.out("wc -l < /proc/net/ip6_flowlabel") == "1"
            box.python(FLOW_LABEL)
            assert box.out("wc -l < /proc/net/ip6_flowlabel") == "2"
