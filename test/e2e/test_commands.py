"""Commands in a sandbox, through the SDK: what goes in and comes out, how they end, what is refused."""

from __future__ import annotations

import asyncio
import os
from hashlib import sha256
from pathlib import Path

import pytest
from platform_under_test import Platform

from libdsec import DSecError

NASTY = b"\n\nfirst\r\n\0\xff\xfe \xc3\n\n" + bytes(range(256)) + b"\n\nno newline at the end"


async def test_output_is_exact(new_sandbox):
    async with new_sandbox() as s:
        await s.write_file("/tmp/nasty", NASTY)
        r = await s.run_shell("cat /tmp/nasty; cat /tmp/nasty >&2; exit 7")
        assert (r.stdout_bytes, r.stderr_bytes, r.exit_code) == (NASTY, NASTY, 7)
        assert await s.read_file("/tmp/nasty") == NASTY
        r = await s.run_shell("seq 2000000")  # 14 MB: most of it beyond what an answer carries
        assert sha256(r.stdout_bytes).digest() == sha256(b"".join(b"%d\n" % i for i in range(1, 2000001))).digest()


async def test_one_long_line(new_sandbox):
    """10 MB without a newline, on both streams at once."""
    size = 10 << 20
    async with new_sandbox() as s:
        r = await s.run_shell(f"head -c {size} /dev/zero | tr '\\0' o & head -c {size} /dev/zero | tr '\\0' e >&2; wait")
        assert r.stdout_bytes == b"o" * size
        assert r.stderr_bytes == b"e" * size


async def test_output_over_what_is_kept(new_sandbox):
    """A command that writes without end is not told so: its head and its tail are kept, and how much there was."""
    async with new_sandbox() as s:
        r = await s.run_shell("echo first; head -c 100000000 /dev/zero; echo last")
        assert r.exit_code == 0
        assert r.stdout_truncated
        assert r.stdout_size == 100000000 + len("first\nlast\n")
        assert len(r.stdout_bytes) <= 64 << 20
        assert r.stdout_bytes.startswith(b"first\n\0")
        assert r.stdout_bytes.endswith(b"\0last\n")


async def test_argv_is_data(new_sandbox):
    async with new_sandbox() as s:
        r = await s.exec(["printf", "%s|", "a b", "$HOME", "", "*", "'\""])
        assert r.stdout == "a b|$HOME||*|'\"|"


async def test_exit_codes_and_signals(new_sandbox):
    async with new_sandbox() as s:
        assert (await s.run_shell("exit 255")).exit_code == 255
        r = await s.exec(["sh", "-c", "kill -TERM $$"])
        assert (r.exit_code, r.signal) == (143, 15)
        r = await s.exec(["sh", "-c", "kill -KILL $$"])
        assert (r.exit_code, r.signal, r.oom_killed) == (137, 9, False)


async def test_timeout_kills_the_whole_tree(new_sandbox):
    tree = "setsid sh -c 'sleep 301 & sleep 302' & (setsid setsid sleep 303 &) ; sleep 304"
    async with new_sandbox() as s:
        r = await s.run_shell(tree, timeout=0.5)
        assert r.timed_out and r.exit_code != 0
        left = await s.run_shell("grep -lx sleep /proc/[0-9]*/comm | wc -l")
        assert left.stdout.strip() == "0"
        assert (await s.run_shell("echo still here")).stdout == "still here\n"


async def test_background_child_does_not_hold_the_call(new_sandbox):
    async with new_sandbox() as s:
        for script in ("sleep 300 & echo done", "sleep 300 >/dev/null & echo done", "sleep 300 2>&1 >/dev/null & echo done"):
            r = await asyncio.wait_for(s.run_shell(script), 120)
            assert (r.stdout, r.exit_code) == ("done\n", 0)
        left = await s.run_shell("grep -lx sleep /proc/[0-9]*/comm | wc -l")
        assert left.stdout.strip() == "3"  # they live on


async def test_kill_takes_the_whole_tree(new_sandbox):
    async with new_sandbox() as s:
        command = await s.start("setsid sleep 300 & sleep 301")
        await command.kill()
        r = await command.wait()
        assert r.killed
        left = await s.run_shell("grep -lx sleep /proc/[0-9]*/comm | wc -l")
        assert left.stdout.strip() == "0"


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 16 << 20])
async def test_stdin(new_sandbox, size):
    data = os.urandom(size)
    async with new_sandbox() as s:
        r = await s.exec(["cat"], stdin=data)
        assert sha256(r.stdout_bytes).digest() == sha256(data).digest()
        assert r.exit_code == 0


async def test_stdin_by_default_and_broken(new_sandbox):
    async with new_sandbox() as s:
        assert (await s.run_shell("readlink /proc/self/fd/0")).stdout == "/dev/null\n"
        assert (await s.exec(["cat"])).stdout_bytes == b""
        assert (await s.run_shell("exec 0<&-; sleep 0.5", stdin=os.urandom(4 << 20))).stdin_broken


@pytest.mark.parametrize("size", [1 << 20, 16 << 20])
async def test_long_script(new_sandbox, size):
    end = "echo $0 $#; exit 3\n"
    line = ":" + " ." * 4000 + "\n"
    script = line * ((size - len(end)) // len(line))
    script += "#" * (size - len(end) - len(script) - 1) + "\n" + end
    assert len(script) == size
    async with new_sandbox() as s:
        r = await s.run_shell(script)
        assert (r.stdout, r.exit_code) == ("bash 0\n", 3)
        if size == 16 << 20:
            with pytest.raises(DSecError) as e:
                await s.run_shell(script + "#")
            assert (e.value.code, e.value.reason) == ("invalid_argument", "script_too_long"), str(e.value)


async def test_user_cwd_and_environment(new_sandbox):
    async with new_sandbox(env={"FROM_SPEC": "1"}, workdir="/usr", init_user="nobody") as s:
        r = await s.run_shell("id -u; pwd; echo $FROM_SPEC $HOME $MORE", env={"MORE": "x"})
        assert r.stdout == "65534\n/usr\n1 /nonexistent x\n"
        assert (await s.exec(["id", "-u"], user="root", cwd="/tmp")).stdout == "0\n"
        assert (await s.exec(["id", "-u"], user="12345")).stdout == "12345\n"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"argv": ["no-such-program"]}, "program_not_found"),
        ({"argv": ["/no/such/program"]}, "program_not_found"),
        ({"argv": ["/etc/passwd"]}, "not_executable"),
        ({"argv": ["/etc"]}, "not_executable"),
        ({"argv": ["true", "a\0b"]}, "invalid_command"),
        ({"argv": ["true", "x" * (1 << 18)]}, "argument_too_long"),
        ({"argv": ["true"] + ["x" * 1000] * 5000}, "argument_list_too_long"),
        ({"argv": ["true"], "cwd": "/no/such/dir"}, "workdir_not_found"),
        ({"argv": ["true"], "user": "no-such-user"}, "user_not_found"),
        ({"argv": ["true"], "cwd": "relative"}, "invalid_command"),
    ],
)
async def test_refused_command(new_sandbox, how, reason):
    how = dict(how)
    async with new_sandbox() as s:
        with pytest.raises(DSecError) as e:
            await s.exec(how.pop("argv"), **how)
        assert e.value.reason == reason, str(e.value)
        assert (await s.exec(["true"])).exit_code == 0


async def test_file_errors_are_typed(new_sandbox):
    async with new_sandbox() as s:
        for path, code in (("/no/such/dir/file", "not_found"), ("/etc", "failed_precondition"), ("/etc/\0", "invalid_argument")):
            for attempt in (s.read_file, lambda path: s.write_file(path, b"x")):
                with pytest.raises(DSecError) as e:
                    await attempt(path)
                assert e.value.code == code, (path, str(e.value))
        with pytest.raises(DSecError) as e:
            await s.write_file("/etc/passwd", b"x", user="nobody")
        assert e.value.code == "permission_denied", str(e.value)
        assert (await s.read_file("/etc/passwd")).startswith(b"root:")


async def test_oom_is_reported(new_sandbox):
    async with new_sandbox(memory_limit_mb=64) as s:
        r = await s.exec(["python3", "-c", "x = bytearray(200 << 20)"])
        assert r.oom_killed and r.signal == 9
        r = await s.run_shell("python3 -c 'x = bytearray(200 << 20)'; echo $?")
        assert r.stdout == "137\n"
        assert (await s.run_shell("echo still here")).stdout == "still here\n"


async def test_fork_bomb_meets_its_limit(new_sandbox):
    async with new_sandbox(pids_limit=64) as s:
        bomb = "import os\nn = 0\ntry:\n  while True:\n    if os.fork() == 0:\n      import time; time.sleep(600); os._exit(0)\n    n += 1\nexcept OSError as e:\n  print(e.errno, 0 < n < 64)"
        r = await s.exec(["python3", "-c", bomb], timeout=120)
        assert r.stdout == "11 True\n"  # EAGAIN
        started = []
        with pytest.raises(DSecError) as e:
            for _ in range(64):
                started.append(await s.start(["sleep", "600"]))
        assert (e.value.code, e.value.reason) == ("resource_exhausted", "sandbox_resources"), str(e.value)
        assert b"root:" in await s.read_file("/etc/passwd")  # files need no process
        assert started, "the bomb's parent has ended: there is room for one"
        for command in started:
            await command.kill()
            assert (await command.wait()).killed
        assert (await s.run_shell("echo still here")).stdout == "still here\n"


async def test_disk_quota(new_sandbox):
    async with new_sandbox(disk_limit_mb=32) as s:
        r = await s.run_shell("head -c 100M /dev/zero >/tmp/big")
        assert r.exit_code != 0
        assert "Disk quota exceeded" in r.stderr or "No space left" in r.stderr
        with pytest.raises(DSecError) as e:
            await s.write_file("/tmp/more", os.urandom(8 << 20))
        assert e.value.code == "resource_exhausted", str(e.value)
        assert (await s.run_shell("rm /tmp/big && ls /tmp")).stdout == ""
        await s.write_file("/tmp/more", b"x" * (8 << 20))


async def test_thousand_failing_commands_leave_nothing(new_sandbox, platform: Platform):
    async with new_sandbox() as s:

        async def fail() -> None:
            with pytest.raises(DSecError):
                await s.exec(["/no/such/program"])

        def footprint() -> tuple[int, int]:
            edge = platform.edge_pid()
            mounts = [line for line in Path(f"/proc/{edge}/mountinfo").read_text().splitlines() if any(n in line for n in platform.names())]
            return len(os.listdir(f"/proc/{edge}/fd")) + len(os.listdir(f"/proc/{platform.aether_pid(s.id)}/fd")), len(mounts)

        for _ in range(20):
            await fail()
        fds, mounts = footprint()
        for _ in range(20):
            await asyncio.gather(*(fail() for _ in range(50)))
        after, mounts_after = footprint()
        assert after <= fds + 10  # the SDK's connections
        assert mounts_after == mounts
