"""Terminals, tags, and taking up commands again."""

from __future__ import annotations

import pytest
from fake import Platform
from fakebox import Process
from fakehttp import Fault
from libdsec_api import Command, DSecClient, Sandbox, Terminal

from libdsec import CommandFailedError, DSecConfig, DSecContainerRunArgs, InvalidArgumentError, NotFoundError


async def make(config: DSecConfig) -> tuple[DSecClient, Sandbox]:
    client = DSecClient(config=config)
    return client, await client.run_container(DSecContainerRunArgs("debian:12"))


def commands(platform: Platform) -> list[Process]:
    return [p for box in platform.boxes.values() for p in box.commands.values()]


async def test_terminal(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    terminal = await sandbox.terminal('read x; echo "got $x"; exit 3', rows=50, term="vt100", tag="t")
    sent = commands(platform)[0].command
    assert sent["terminal"] == {"rows": 50, "term": "vt100"}
    assert sent["tag"] == "t"
    await terminal.resize(7, 65535)
    assert sent["terminal"] == {"rows": 7, "cols": 65535, "term": "vt100"}
    assert await terminal.write("hello\n")
    assert b"".join([piece async for piece in terminal]) == b"got hello\n"
    assert await terminal.read() == b""
    assert terminal.offset == len(b"got hello\n")
    terminal.offset = 4
    assert await terminal.read() == b"hello\n"
    await terminal.close()
    assert (await terminal.wait()).exit_code == 3
    shell = await sandbox.terminal()
    assert "argv" not in commands(platform)[1].command
    async with shell:
        assert await shell.write(b"echo here\n")
        assert await shell.read() == b"here\n"
    assert (await shell.poll()).killed
    await client.close()


async def test_terminals_are_checked(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    for bad in (
        {"rows": 0},
        {"cols": 65536},
        {"rows": True},
        {"cols": 1.5},
        {"term": ""},
        {"tag": "a b"},
        {"no_output_timeout": 0},
    ):
        with pytest.raises(InvalidArgumentError):
            await sandbox.terminal("true", **bad)
    with pytest.raises(InvalidArgumentError):
        await sandbox.list_commands(tag="")
    with pytest.raises(InvalidArgumentError):
        await sandbox.attach()
    with pytest.raises(InvalidArgumentError):
        await sandbox.attach("id", tag="tag")
    await client.close()


async def test_reading_goes_on_where_it_broke(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    terminal = await sandbox.terminal("seq 100000")
    for cut in (10, 1000, 5000, 100_000):
        platform.fault("/stdout", Fault(cut_at=cut))
    got = b"".join([piece async for piece in terminal])
    assert got == b"".join(b"%d\n" % i for i in range(1, 100_001))
    await client.close()


async def test_attach(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    first = await sandbox.terminal("while read x; do echo $x; done", tag="loop")
    assert await first.write("one\n")
    assert await first.read() == b"one\n"
    other = await sandbox.start("cat", stdin_open=True, tag="loop")
    assert [c.command_id for c in await sandbox.list_commands(tag="loop")] == [other.id, first.id]

    again = await sandbox.attach(first.id)
    assert isinstance(again, Terminal)
    assert await again.read() == b"one\n"
    assert await again.write("two\n")  # behind what was written before
    assert await again.read() == b"two\n"
    assert await first.read() == b"two\n"  # readers do not disturb each other
    await again.kill()
    await first.close()
    await again.close()

    newest = await sandbox.attach(tag="loop")
    assert newest.id == other.id
    assert isinstance(newest, Command)
    assert not isinstance(newest, Terminal)
    await newest.write_stdin("x", close=False)
    handle = sandbox.command(other.id)  # knows nothing, and asks
    await handle.write_stdin("y")
    assert (await other.wait()).stdout == "xy"
    assert await sandbox.list_commands(running=True) == []
    with pytest.raises(NotFoundError):
        await sandbox.attach(tag="none")
    with pytest.raises(NotFoundError):
        await sandbox.attach("none")
    await client.close()


async def test_text_is_not_torn(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    script = r"for b in 342 202 254 303 274 377 360 237; do printf \\$b; sleep 0.05; done"
    command = await sandbox.start(script)
    assert "".join([t async for t in command.iter_text()]) == "€ü\ufffd\ufffd"
    terminal = await sandbox.terminal(script)
    assert "".join([t async for t in terminal.read_text()]) == "€ü\ufffd\ufffd"
    await client.close()


async def test_no_output(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    result = await sandbox.run_shell("true", no_output_timeout=7.5, tag="quiet")
    assert result.tag == "quiet"
    assert commands(platform)[0].command["noOutputTimeoutSeconds"] == 7.5
    with pytest.raises(CommandFailedError, match="wrote nothing for too long") as caught:
        await sandbox.exec(["sleep", "60"], no_output_timeout=0.1, check=True)
    assert caught.value.result.no_output
    assert caught.value.result.timed_out
    await client.close()
