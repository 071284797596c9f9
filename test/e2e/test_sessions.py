"""Sessions through the real SDK and daemons: state, time-outs, ends, and daemons that are killed in the middle."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from platform_under_test import IMAGE, Platform

from libdsec import DSecClient, DSecConfig, DSecContainerRunArgs, FailedPreconditionError, NotFoundError, Sandbox, Session

ARGS = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=256, ttl_running_stop=600)


async def says(session: Session, script: str, stdout: str, exit_code: int = 0) -> None:
    result = await session.run(script, timeout=120)
    assert (result.stdout, result.exit_code) == (stdout, exit_code), result


async def gone(sandbox: Sandbox, what: str) -> None:
    """Returns once no process whose arguments have this in them is left."""
    script = f"while grep -lz '^{what}$' /proc/[0-9]*/cmdline 2>/dev/null | grep -q .; do sleep 0.05; done"
    assert (await sandbox.run_shell(script, timeout=60)).exit_code == 0


async def test_state_lasts(new_sandbox):
    async with new_sandbox(env={"OF": "sandbox"}) as sandbox, await sandbox.session("s", cwd="/tmp", env={"A": "session"}) as session:
        await says(session, "echo $PWD $OF $A; cd /etc; x='a  b'; f() { echo f $1; }; export C=3; set -o noglob", "/tmp sandbox session\n")
        await says(session, "echo $PWD \"$x\"; f 1; sh -c 'echo $C'; echo *; (exit 7)", "/etc a  b\nf 1\n3\n*\n", 7)
        await says(session, "echo $?", "7\n")
        await says(session, "sleep 1234 & echo started", "started\n")
        await says(session, "jobs %1 | cut -d' ' -f2- >/dev/null && kill %1; wait %1; echo $?", "143\n")
        await says(session, "(until [ -s /tmp/fg ]; do sleep 0.01; done; exit 9) & fg >/tmp/fg", "", 9)
        again = await sandbox.session("s", cwd="/")
        await says(again, "pwd", "/etc\n")
        assert [s.name for s in await sandbox.list_sessions()] == ["s"]
    async with new_sandbox(init_user="nobody") as sandbox, await sandbox.session("s") as session:
        await says(session, "id -un; exec 5>&1; echo to-5 >/dev/fd/5; cat", "nobody\nto-5\n")


async def test_busybox_is_the_shell(new_sandbox):
    """As in an image of Alpine."""
    async with new_sandbox() as sandbox:
        await sandbox.write_file("/opt/busybox", Path("/bin/busybox").read_bytes(), mode=0o755)
        await sandbox.exec(["/opt/busybox", "sh", "-c", "rm -f /bin/bash /bin/sh; ln -s /opt/busybox /bin/sh"], check=True)
        async with await sandbox.session("s", cwd="/tmp", env={"A": "1"}) as session:
            assert (await session.refresh()).shell == "sh"
            await says(session, "x='a  b'; f() { echo f $1; }; export C=3; sleep 1234 & (exit 7)", "", 7)
            await says(session, 'echo $? $A "$x" $PWD; f 1; cat <<EOF\n$C\nEOF\n', "7 1 a  b /tmp\nf 1\n3\n")
            result = await session.run("echo 'open")
            assert (result.exit_code, result.stdout) == (2, "")
            result = await session.run("echo part; while :; do sleep 5678; done", timeout=0.5)
            assert (result.timed_out, result.killed, result.stdout) == (True, False, "part\n")
            await says(session, "kill -0 $! && echo lives", "lives\n")
            assert (await session.run("cat", stdin=b"\0in")).stdout_bytes == b"\0in"


async def test_a_shell_that_runs_nothing_more_is_noticed(new_sandbox):
    async with new_sandbox() as sandbox:
        for script in ("echo a; set -n", "echo a; command() { :; }; sleep 0.1"):
            session = await sandbox.session("s")
            result = await session.run(script)
            assert (result.exit_code, result.signal, result.stdout) == (137, signal.SIGKILL, "a\n")
            info = await session.refresh()
            assert (info.ended, info.reason) == (True, "unresponsive")


async def test_scripts_are_data(new_sandbox):
    async with new_sandbox() as sandbox, await sandbox.session("s") as session:
        await says(session, "cat <<EOF\none $((1+1))\nEOF\n", "one 2\n")
        await says(session, "cat <<'EOF' | tr a-z A-Z\nit's\nEOF", "IT'S\n")
        for script in ("echo 'open", 'echo "open', "if true; then", ") x", "f() {"):
            result = await session.run(script)
            assert result.exit_code == 2
            assert result.stdout == ""
            assert result.stderr != ""
        await says(session, "printf 'a\\n\\n\\r\\000\\377\\n\\nlast' | od -An -c | tr -d ' \\n'", "a\\n\\n\\r\\0377\\n\\nlast")
        result = await session.run("printf 'a\\n\\n\\r\\000\\377\\n\\nlast'; printf '\\n\\nx' >&2")
        assert (result.stdout_bytes, result.stderr_bytes) == (b"a\n\n\r\x00\xff\n\nlast", b"\n\nx")
        long = await session.run("x='" + "y" * (8 << 20) + "'; echo ${#x}")
        assert long.stdout == f"{8 << 20}\n"
        await says(session, "seq 2000000 | tail -1; yes | head -c 3000000 | wc -c", "2000000\n3000000\n")
        result = await session.run("cat; readlink /proc/self/fd/0", stdin=b"\x00bytes")
        assert result.stdout_bytes.startswith(b"\x00bytes")
        await says(session, "readlink /proc/self/fd/0", "/dev/null\n")


async def test_background_children_do_not_hold_a_command(new_sandbox):
    async with new_sandbox() as sandbox:
        async with await sandbox.session("s") as session, asyncio.timeout(120):
            for script in ("sleep 4321 & echo a", "setsid sleep 4321 & echo a", "(sleep 4321 >/dev/null &); echo a", "sleep 4321 2>&1 | cat & echo a"):
                await says(session, script, "a\n")
        await gone(sandbox, "4321")  # closing the session ends them, however they have detached themselves


async def test_timeout_kills_the_command_and_not_the_session(new_sandbox):
    async with new_sandbox() as sandbox, await sandbox.session("s") as session:
        await says(session, "x=5; sleep 7777 & echo a", "a\n")
        for script in ("setsid sleep 5678 & sleep 5678", "while :; do sleep 5678; done", "sh -c 'trap \"\" INT TERM; sleep 5678; sleep 5678'", "while :; do :; done"):
            result = await session.run("echo part; " + script, timeout=0.5)
            assert (result.timed_out, result.killed, result.exit_code, result.stdout) == (True, False, 137, "part\n")
            await gone(sandbox, "5678")
        await says(session, "echo $x; kill -0 %1 && echo lives", "5\nlives\n")
        command = await session.start("echo begun; sleep 5678")
        async for piece in command.iter_stdout():
            assert piece == b"begun\n"
            await command.kill()
        assert (await command.wait()).killed
        await gone(sandbox, "5678")
        waiting = asyncio.create_task(session.run("sleep 5678"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await says(session, "echo $x", "5\n")
        quiet = await session.run("sleep 5678", no_output_timeout=0.3)
        assert (quiet.timed_out, quiet.no_output) == (True, True)
        await says(session, "echo $x", "5\n")


async def test_how_sessions_end(new_sandbox):
    async with new_sandbox() as sandbox:
        closed = await sandbox.session("never")
        await closed.close()
        await closed.close()
        with pytest.raises(NotFoundError) as unknown:
            await closed.run("true")
        assert unknown.value.reason == "session_not_found"
        for script, code, reason in (
            ("exit 3", 3, "exited"),
            ("set -e; false; echo no", 1, "exited"),
            ("exec sh -c 'exit 4'", 4, "exited"),
            ("kill -9 $$", 137, "killed"),
        ):
            session = await sandbox.session("s")
            result = await session.run(script)
            assert (result.exit_code, result.stdout) == (code, "")
            with pytest.raises(FailedPreconditionError) as ended:
                await session.run("true")
            assert ended.value.reason == "session_ended"
            info = await session.refresh()
            assert (info.ended, info.exit_code, info.reason) == (True, code, reason)
        session = await sandbox.session("s")
        pid = (await session.run("echo $$")).stdout.strip()
        running = await session.start("echo a; sleep 1000")
        behind = await session.start("echo never")
        await sandbox.run_shell(f"until [ -e /proc/{pid} ]; do :; done; kill -9 {pid}")
        result = await running.wait()
        assert (result.signal, result.exit_code) == (signal.SIGKILL, 137)
        with pytest.raises(FailedPreconditionError, match="has ended"):
            await behind.wait()


async def test_memory_runs_out_in_a_session(new_sandbox):
    async with new_sandbox(memory_limit_mb=64) as sandbox:
        session = await sandbox.session("s")
        result = await session.run("x=a; while :; do x=$x$x; done")
        assert (result.oom_killed, result.exit_code) == (True, 137)
        info = await session.refresh()
        assert (info.ended, info.reason) == (True, "oom")
        async with await sandbox.session("s") as fresh:
            await says(fresh, "echo fresh", "fresh\n")


async def test_many_sessions_at_once(new_sandbox):
    async with new_sandbox() as sandbox:

        async def talk(i: int) -> None:
            async with await sandbox.session(f"s{i}") as session:
                for n in range(20):
                    await says(session, "n=$((n+1)); echo $n", f"{n + 1}\n")

        await asyncio.gather(*(talk(i) for i in range(16)))
        assert await sandbox.list_sessions() == []


async def test_commands_take_turns(new_sandbox):
    async with new_sandbox() as sandbox, await sandbox.session("s") as session:
        await sandbox.run_shell("mkfifo /tmp/gate", check=True)
        first = await session.start("read x </tmp/gate; n=0")
        others = [await session.start("n=$((n+1)); echo $n") for _ in range(10)]
        info = await session.refresh()
        assert (info.running_command, info.waiting_commands) == (first.id, 10)
        listed = await sandbox.list_commands(session="s")
        assert {c.session for c in listed} == {"s"}
        assert len(listed) == 11
        await sandbox.run_shell("echo >/tmp/gate")
        assert [(await c.wait()).stdout for c in others] == [f"{n}\n" for n in range(1, 11)]


@pytest.mark.parametrize("victim", ["edge", "everything"])
async def test_daemons_are_killed_in_the_middle(own: Platform, victim: str):
    def kill() -> None:
        if victim == "edge":
            own.kill_edge()
            return
        own.kill_up()
        own.start()

    await lives_through(own, kill)


async def lives_through(own: Platform, kill: Callable[[], None]) -> None:
    """A session with a job in the background, a command that runs and one that waits, all of which notice nothing."""
    patient = DSecConfig(own.url, own.key(), retry_seconds=150)
    async with DSecClient(config=patient) as client, await client.run_container(ARGS) as sandbox:
        await sandbox.run_shell("mkfifo /tmp/gate", check=True)
        session = await sandbox.session("s")
        await says(session, "x=kept; sleep 8888 & echo a", "a\n")
        running = await session.start("seq 100000; read y </tmp/gate; seq 100001 200000; echo $y")
        behind = asyncio.create_task(session.run("echo $x; kill -0 %1 && echo job"))
        while (await session.refresh()).waiting_commands == 0:
            await asyncio.sleep(0.02)

        await asyncio.to_thread(kill)

        info = await session.refresh()
        assert (info.ended, info.running_command, info.waiting_commands) == (False, running.id, 1)
        assert {c.session for c in await sandbox.list_commands(running=True)} == {"s"}
        await sandbox.run_shell("echo opened >/tmp/gate", check=True)
        result = await running.wait()
        assert result.stdout == "".join(f"{n}\n" for n in range(1, 200001)) + "opened\n"
        assert (await behind).stdout == "kept\njob\n"
        await says(session, "echo $x", "kept\n")
        await session.close()
        await gone(sandbox, "8888")
