"""What a sandbox is given, and not a bit more: the disk by whatever fills it, and the processors."""

from __future__ import annotations

import pytest
from attacked import Box

# Each makes one more of a kind, in directories of a thousand.
MAKE = {
    "empty files": "os.close(os.open(at, os.O_CREAT))",
    "small files": "open(at, 'wb').write(b'x')",
    "directories": "os.mkdir(at)",
    "symbolic links": "os.symlink('x' * 1000, at)",
    "hard links": "os.link('/flood/one', at)",
    "attributes": "os.close(os.open(at, os.O_CREAT)); os.setxattr(at, 'user.x', bytes(3000))",
    "sparse files": "f = os.open(at, os.O_CREAT | os.O_WRONLY); os.pwrite(f, b'x', 1 << 40); os.close(f)",
    "named pipes": "os.mkfifo(at)",
}
FLOOD = """
import errno, os
os.makedirs('/flood')
open('/flood/one', 'w').close()
n = 0
try:
    while n < 20_000_000:
        if n % 1000 == 0:
            os.mkdir(f'/flood/{n // 1000}')
        at = f'/flood/{n // 1000}/{"n" * 200}{n}'
        MAKE
        n += 1
except OSError as e:
    print(errno.errorcode[e.errno], n)
"""
QUOTA = 16  # MiB


@pytest.mark.limit(600)
@pytest.mark.parametrize("kind", MAKE)
def test_the_disk_ends_whatever_fills_it(new_box, kind: str) -> None:
    with new_box(disk_limit_mb=QUOTA) as box, new_box(disk_limit_mb=QUOTA) as neighbour:
        error, count = box.python(FLOOD.replace("MAKE", MAKE[kind])).split()
        assert error in {"EDQUOT", "ENOSPC"}, (error, count)
        assert 10 < int(count) < 1_000_000, "it is the quota that ended it, and the quota bounds what costs no data, too"
        neighbour.assert_well()
        box.out("rm -r /flood")
        box.assert_well()


def test_what_is_deleted_at_the_limit_can_be_written_again(new_box) -> None:
    with new_box(disk_limit_mb=64) as box:
        fill = "head -c 1G /dev/zero >/full"
        for _ in range(5):
            assert "quota" in box.sh(f"{fill}; rm /full; sync /").stderr.lower()
        assert box.sh(fill).exit_code != 0
        size = int(box.out("stat -c %s /full"))
        assert 32 << 20 < size <= 64 << 20
        box.out("rm /full; sync /; head -c 32M /dev/urandom >/half")
        box.assert_well()


def test_processors(new_box) -> None:
    """Half of one: that is what programs are told as well, and what is above is held back and told."""
    with new_box(cpu_cores_limit=0.5) as box:
        assert box.out("nproc") == box.python("import os; print(os.cpu_count() and len(os.sched_getaffinity(0)))") == "1"
        burned = box.sandbox.run_shell("while :; do :; done", timeout=3)
        assert burned.timed_out
        used = box.sandbox.metrics()
        assert used.cpu_throttled_periods > 0
        assert used.cpu_throttled_seconds > 0


def test_each_box_is_told_of_its_own_end(box: Box) -> None:
    """A command that the kernel killed for want of memory says so, and the sandbox counts it."""
    before = box.sandbox.metrics().oom_kills
    r = box.sh("tail /dev/zero")
    assert r.signal == 9 or r.exit_code == 137
    assert box.sandbox.metrics().oom_kills > before
    box.assert_well()
