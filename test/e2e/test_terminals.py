"""Commands at a terminal, through the SDK: what programs see there, keys, sizes, breaks, and time-outs without output."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from platform_under_test import IMAGE, Platform

from libdsec import (
    Command,
    DSecClient,
    DSecConfig,
    DSecContainerRunArgs,
    DSecError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    Sandbox,
    Terminal,
)

NewSandbox = Callable[..., AbstractAsyncContextManager[Sandbox]]


class Screen:
    """Looks at a terminal's output for what is expected."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.seen = b""

    async def sees(self, text: bytes) -> bytes:
        """Reads until text was shown; returns what was before it."""
        async with asyncio.timeout(60):
            while text not in self.seen:
                piece = await self.terminal.read()
                assert piece, f"it ended without {text!r}: {self.seen[-2000:]!r}"
                self.seen += piece
        before, _, self.seen = self.seen.partition(text)
        return before


@asynccontextmanager
async def shell(sandbox: Sandbox, **options: object) -> AsyncIterator[tuple[Terminal, Screen]]:
    """An interactive bash with a prompt that is easy to find."""
    argv = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
    async with await sandbox.terminal(argv, env={"PS1": "<prompt>"}, **options) as terminal:  # type: ignore[arg-type]
        screen = Screen(terminal)
        await screen.sees(b"<prompt>")
        yield terminal, screen


async def test_a_terminal(new_sandbox: NewSandbox) -> None:
    """For any user: the name is that of a terminal, the user owns it, the size is the one asked for, text is UTF-8."""
    look = "tty; stty size; echo $TERM $LANG; stat -c '%U %a %t' $(tty); echo € >/dev/tty; python3 -c 'print(\"\\u20ac\")'"
    async with new_sandbox() as s:
        await s.run_shell("useradd -m agent")
        for user, rows, cols, size in ((None, None, None, "24 80"), ("agent", 1, 65535, "1 65535"), ("root", 65535, 65535, "65535 65535")):
            async with await s.terminal(look, user=user, rows=rows, cols=cols) as terminal:
                text = "".join([t async for t in terminal.read_text()])
                lines = text.split("\r\n")
                assert lines[0].startswith("/dev/pts/"), text
                assert lines[1:] == [size, "xterm-256color C.UTF-8", f"{user or 'root'} 620 88", "€", "€", ""], text
                result = await terminal.wait()
                assert (result.exit_code, result.terminal, result.stderr_size) == (0, True, 0)
        plain = await s.start("sleep 600")
        assert not (await plain.poll()).terminal
        handle = Terminal(s._api, s.id, plain.id)
        with pytest.raises(FailedPreconditionError) as caught:
            await handle.resize(10, 10)
        assert caught.value.reason == "no_terminal"
        with pytest.raises(InvalidArgumentError):
            await handle.resize(0, 10)


async def test_job_control(new_sandbox: NewSandbox) -> None:
    async with new_sandbox() as s, shell(s) as (terminal, screen):
        await terminal.write("sleep 600; echo sleep ended with $?\n")
        await foreground(s, "sleep")
        await terminal.write(b"\x03")  # ^C
        await screen.sees(b"<prompt>")
        await terminal.write("cat\n")
        await foreground(s, "cat")
        await terminal.write(b"\x1a")  # ^Z
        await screen.sees(b"Stopped")
        await screen.sees(b"<prompt>")
        await terminal.write("fg\n")
        await foreground(s, "cat")
        await terminal.write("hello\n")
        await screen.sees(b"hello\r\nhello\r\n")
        await terminal.write(b"\x04")  # ^D
        await screen.sees(b"<prompt>")
        await terminal.write("sleep 600\n")
        await foreground(s, "sleep")
        await terminal.kill(signal.SIGINT)  # reaches what is in the foreground, not the shell
        await screen.sees(b"<prompt>")
        await terminal.write("exit 9\n")
        result = await terminal.wait()
        assert (result.exit_code, result.killed) == (9, False)


async def foreground(sandbox: Sandbox, name: str) -> None:
    """Waits until a program is in the foreground of the sandbox's one terminal."""
    script = f"until ps -eo stat=,comm= 2>/dev/null | grep -q '^S[^ ]*+ *{name}$'; do sleep 0.02; done"
    have_ps = (await sandbox.run_shell("command -v ps")).ok
    if not have_ps:
        script = (
            f'while :; do for d in /proc/[0-9]*; do [ "$(cat $d/comm 2>/dev/null)" = {name} ] || continue; '
            'set -- $(sed \'s/.*) //\' $d/stat 2>/dev/null); [ "$3" = "$6" ] && [ "$1" = S ] && exit 0; done; sleep 0.02; done'
        )
    assert (await sandbox.run_shell(script, timeout=60)).ok, f"{name} is not in the foreground"


FULL_SCREEN = """
import curses
def main(screen):
    while True:
        screen.erase()
        rows, cols = screen.getmaxyx()
        screen.addstr(0, 0, f"size={rows}x{cols}=")
        screen.refresh()
        key = screen.getch()
        if key == ord("q"):
            return
        if key == curses.KEY_UP:
            screen.addstr(1, 0, "up was pressed")
            screen.refresh()
            screen.getch()
curses.wrapper(main)
"""


async def test_full_screen(new_sandbox: NewSandbox) -> None:
    """A program that draws with curses: window changes and keys that are sequences arrive, and the screen is restored."""
    async with new_sandbox() as s:
        await s.write_file("/tmp/full.py", FULL_SCREEN)
        async with await s.terminal("python3 /tmp/full.py; echo; echo restored; stty -a", rows=30, cols=100) as terminal:
            screen = Screen(terminal)
            start = await screen.sees(b"=30x100=")
            assert b"\x1b[?1049h" in start  # the other screen
            await terminal.resize(40, 120)
            await screen.sees(b"=40x120=")
            await terminal.write(b"\x1bOA")  # the key Up
            await screen.sees(b"up was pressed")
            await terminal.write("xq")
            await screen.sees(b"\x1b[?1049l")
            await screen.sees(b"restored")
            await screen.sees(b" iutf8")
            await screen.sees(b" icanon")
            assert (await terminal.wait()).ok


async def test_login_shell(new_sandbox: NewSandbox) -> None:
    async with new_sandbox() as s:
        await s.run_shell("useradd -m -s /bin/sh agent; useradd -m -s /no/such/shell lost; useradd -m -s /usr/sbin/nologin daemonic")
        for user, name in (("agent", "-sh"), ("lost", "-bash"), ("daemonic", "-bash"), (None, "-bash")):
            async with await s.terminal(user=user) as terminal:
                await terminal.write('echo "<$0 $(id -un)>"; exit 5\n')
                await Screen(terminal).sees(f"<{name} {user or 'root'}>\r\n".encode())
                assert (await terminal.wait()).exit_code == 5


async def test_long_line(new_sandbox: NewSandbox) -> None:
    """10 MB on one line do not stall, and every byte comes once, though the reader comes and goes."""
    size = 10 << 20
    async with new_sandbox() as s:
        terminal = await s.terminal(f"head -c {size} /dev/zero | tr '\\0' o; echo; echo last")
        got = bytearray()
        async with asyncio.timeout(120):
            while piece := await terminal.read():
                got += piece
                if len(got) % 7 == 0:
                    await terminal.close()
        assert bytes(got) == b"o" * size + b"\r\nlast\r\n"
        assert (await terminal.wait()).stdout_size == len(got)


async def test_input_of_any_bytes(new_sandbox: NewSandbox) -> None:
    """NUL, invalid UTF-8 and control characters arrive in raw mode as they are; also long ones, at a slow reader."""
    data = bytes(range(256)) * 1000
    async with new_sandbox() as s:
        script = f"stty raw -echo; echo ready; dd bs=100 count=3 2>/dev/null >/tmp/got; sleep 0.3; head -c {len(data) - 300} >>/tmp/got"
        async with await s.terminal(script) as terminal:
            await Screen(terminal).sees(b"ready")
            assert await terminal.write(data)
            assert (await terminal.wait()).ok
            got = await s.read_file("/tmp/got")
            assert got == data


async def test_a_program_that_does_not_read(new_sandbox: NewSandbox) -> None:
    """What is typed waits, and holds up nothing else; the command can be killed."""
    async with new_sandbox() as s:
        terminal = await s.terminal("stty raw -echo; echo ready; sleep 600")
        await Screen(terminal).sees(b"ready")
        typing = asyncio.create_task(terminal.write(b"x" * (4 << 20)))
        assert (await s.run_shell("echo meanwhile", timeout=60)).stdout == "meanwhile\n"
        assert not typing.done()
        await terminal.kill()
        assert not await typing
        assert (await terminal.wait()).killed


async def test_a_reader_that_stops(new_sandbox: NewSandbox) -> None:
    """A terminal whose output is never read goes on, up to what is kept, and others are not disturbed."""
    async with new_sandbox() as s:
        terminal = await s.terminal("head -c 30000000 /dev/zero; echo done")
        slow = Screen(await take(s, terminal.id))
        assert await slow.terminal.read()  # and no more
        assert (await s.run_shell("echo other")).stdout == "other\n"
        async with asyncio.timeout(120):
            result = await terminal.wait()
        assert result.stdout_size == 30000000 + len("done\r\n")
        await slow.sees(b"done\r\n")


async def take(sandbox: Sandbox, command_id: str | None = None, tag: str | None = None) -> Terminal:
    found = await sandbox.attach(command_id, tag=tag)
    assert isinstance(found, Terminal)
    return found


async def test_kill_takes_the_tree(new_sandbox: NewSandbox) -> None:
    async with new_sandbox() as s:
        terminal = await s.terminal("sleep 600 & setsid sleep 600 & echo up; sleep 600")
        await Screen(terminal).sees(b"up")
        await terminal.kill()
        assert (await terminal.wait()).killed
        assert (await s.run_shell("cat /proc/[0-9]*/comm | grep -c '^sleep$'")).stdout == "0\n"


async def test_no_terminal_left(new_sandbox: NewSandbox) -> None:
    """Somebody inside takes all terminals: a typed error, and the rest goes on."""
    hog = "import os, time\nn = 0\ntry:\n    while True: os.openpty(); n += 1\nexcept OSError: print(n, flush=True)\ntime.sleep(600)"
    async with new_sandbox() as s:
        await s.write_file("/tmp/hog.py", hog)
        command = await s.start("ulimit -n 4096; exec python3 /tmp/hog.py")
        async for piece in command.iter_stdout():
            assert int(piece) > 50
            break
        with pytest.raises(ResourceExhaustedError) as caught:
            await s.terminal("true")
        assert caught.value.reason == "no_terminals"
        assert (await s.run_shell("echo fine")).stdout == "fine\n"
        await command.kill()
        await command.wait()
        assert (await (await s.terminal("true")).wait()).ok


async def test_replaced_device(new_sandbox: NewSandbox) -> None:
    """Root inside cannot put something else in the place of the terminals."""
    async with new_sandbox() as s:
        await s.run_shell("rm -f /dev/ptmx; mkfifo /dev/ptmx; ln -sf /dev/null /dev/ptmx; mount -t tmpfs x /dev/pts; rm -rf /dev/pts")
        async with asyncio.timeout(60):
            result = await (await s.terminal("tty")).wait()
        assert result.stdout.startswith("/dev/pts/")
        assert (await s.run_shell("echo fine")).stdout == "fine\n"


async def test_tags(new_sandbox: NewSandbox) -> None:
    async with new_sandbox() as s:
        first = await s.start("cat", stdin_open=True, tag="job")
        await first.write_stdin("one ", close=False)
        second = await s.terminal("cat", tag="job")
        await s.run_shell("true", tag="other")
        assert [c.command_id for c in await s.list_commands(tag="job")] == [second.id, first.id]
        assert [c.tag for c in await s.list_commands()] == ["other", "job", "job"]
        assert {c.command_id for c in await s.list_commands(running=True)} == {first.id, second.id}
        assert (await s.attach(tag="job")).id == second.id
        again = await s.attach(first.id)
        assert type(again) is Command
        await again.write_stdin("two")  # behind the first
        assert (await first.wait()).stdout == "one two"
        with pytest.raises(DSecError) as caught:
            await s.attach(tag="none")
        assert caught.value.reason == "command_not_found"
        with pytest.raises(InvalidArgumentError):
            await s.run_shell("true", tag="a b")


async def test_no_output_timeout(new_sandbox: NewSandbox) -> None:
    """The tree is killed after so long without a byte; what it wrote before is there. Output puts it off."""
    async with new_sandbox() as s:
        r = await s.run_shell("echo before; echo err >&2; sleep 600 & sleep 600", no_output_timeout=2)
        assert (r.timed_out, r.no_output, r.killed, r.signal_name) == (True, True, False, "SIGKILL")
        assert (r.stdout, r.stderr) == ("before\n", "err\n")
        assert (await s.run_shell("cat /proc/[0-9]*/comm | grep -c '^sleep$'")).stdout == "0\n"
        r = await s.run_shell("for i in 1 2 3 4 5 6; do sleep 1; printf . >&$((i % 2 + 1)); done", no_output_timeout=5)
        assert (r.exit_code, r.timed_out, r.stdout + r.stderr) == (0, False, "......")
        terminal = await s.terminal("echo before; sleep 600", no_output_timeout=2, timeout=600)
        r = await terminal.wait()
        assert (r.timed_out, r.no_output, r.stdout) == (True, True, "before\r\n")
        r = await s.run_shell("echo before; sleep 600", timeout=2, no_output_timeout=600)
        assert (r.timed_out, r.no_output, r.stdout) == (True, False, "before\n")


async def test_daemons_killed_at_a_terminal(own: Platform) -> None:
    """The edge, then all of the platform are killed while somebody is typing: the screen goes on without gap or double."""
    config = DSecConfig(own.url, own.key(), retry_seconds=150)
    args = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=64, ttl_running_stop=600)
    async with DSecClient(config=config) as client, await client.run_container(args) as s:
        count = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done &"
        terminal = await s.terminal(f"stty -echo; {count} while read x; do echo got $x; done", tag="screen")
        got = b""

        async def until(text: bytes) -> None:
            nonlocal got
            async with asyncio.timeout(150):
                while text not in got:
                    piece = await terminal.read()
                    assert piece, got[-500:]
                    got += piece

        def restart() -> None:
            own.kill_up()
            own.start()

        for typed, kill in enumerate((own.kill_edge, restart)):
            await terminal.write(f"before{typed}\n")
            await until(f"got before{typed}\r\n".encode())
            await asyncio.to_thread(kill)
            await terminal.write(f"after{typed}\n")
            await terminal.resize(33, 44 + typed)
            await until(f"got after{typed}\r\n".encode())

        async with DSecClient(config=config) as other:  # a client that knows the tag alone
            theirs = await take(await other.get_sandbox(s.id), tag="screen")
            assert theirs.id == terminal.id
            await theirs.write("theirs\n")
            screen = Screen(theirs)
            replay = await screen.sees(b"got theirs\r\n")
            assert replay.startswith(got[:100])
            await theirs.kill()
        await until(b"got theirs\r\n")
        numbers = [int(line) for line in got.split(b"\r\n") if line.isdigit()]
        assert numbers == list(range(1, len(numbers) + 1))
        assert [line for line in got.split(b"\r\n") if line.startswith(b"got ")][:4] == [b"got before0", b"got after0", b"got before1", b"got after1"]


async def test_client_killed_at_a_terminal(platform: Platform, new_sandbox: NewSandbox) -> None:
    """A client that is killed leaves its terminal running, for the next one to go on with."""
    async with new_sandbox() as s:
        code = (
            "import sys\nfrom libdsec.sync import DSecClient\n"
            f"box = DSecClient().get_sandbox({s.id!r})\n"
            "t = box.terminal('stty -echo; while read x; do echo got $x; done', tag='left')\n"
            "t.write('one\\n')\n"
            "for piece in t: sys.stdout.buffer.write(piece); sys.stdout.buffer.flush()"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=platform.env, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readuntil(b"got one"), 60)
        process.kill()
        await process.wait()
        terminal = await take(s, tag="left")
        await terminal.write("two\n")
        screen = Screen(terminal)
        await screen.sees(b"got one\r\n")
        await screen.sees(b"got two\r\n")
        await terminal.kill()


async def test_nothing_is_left(platform: Platform, new_sandbox: NewSandbox) -> None:
    """A hundred terminals later aether and the edge have the descriptors that they had."""

    def descriptors(sandbox_id: str) -> tuple[int, int]:
        edge = platform.edge_pid()
        assert edge is not None
        return tuple(len(os.listdir(f"/proc/{pid}/fd")) for pid in (platform.aether_pid(sandbox_id), edge))  # type: ignore[return-value]

    async with new_sandbox() as s:
        for _ in range(3):
            await (await s.terminal("echo x")).wait()
        before = descriptors(s.id)
        for i in range(100):
            terminal = await s.terminal("cat & echo x; read x")
            await terminal.write("\n" if i % 2 else b"\x04")
            await terminal.wait()
        async with asyncio.timeout(60):
            while any(b > a + 5 for a, b in zip(before, descriptors(s.id), strict=True)):
                await asyncio.sleep(0.2)
